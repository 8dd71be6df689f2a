"""Real Firecracker and cloud-hypervisor, where their programs are on PATH.

They are in no registry. Each runs a VM as Kata starts it, with a kernel that only halts. In a jail
there is nothing but its program, so Firecracker has to be linked statically, as its own releases
are.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.vmm_standin import lives
from tests.support.waiting import wait_for

_AT = 0x100000
_HALT = b"\xfa\xf4\xeb\xfd"  # cli; hlt; jmp to hlt: the same in 32 and 64 bits
_NOTE = struct.pack("<III", 4, 8, 18) + b"Xen\0" + struct.pack("<Q", _AT)  # the PVH entry


def program(name: str) -> Path:
    """Return a program of PATH; skip the test without it."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"no {name} on PATH: it is in no registry")
    return Path(path)


def kernel() -> bytes:
    """Return a program that x86 VMMs load as a kernel (ELF, with a PVH note), which halts."""
    code = 64 + 2 * 56
    ident = b"\x7fELF\2\1\1".ljust(16, b"\0")
    head = struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, _AT, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    load = struct.pack("<IIQQQQQQ", 1, 5, code, _AT, _AT, len(_HALT), 0x1000, 0x1000)
    note = struct.pack("<IIQQQQQQ", 4, 4, code + 8, 0, 0, len(_NOTE), len(_NOTE), 4)
    return ident + head + load + note + _HALT.ljust(8, b"\0") + _NOTE


@contextlib.contextmanager
def jailed_firecracker(vc: Path, cut: str) -> Iterator[tuple[int, int]]:
    """Run Firecracker with two vCPUs in a jail, as Go's runtime did; yield its pid, the jailer's.

    The jailer daemonizes it and has ended.
    """
    firecracker, jailer = program("firecracker"), program("jailer")
    jail = vc / "firecracker" / cut / "root"
    jail.mkdir(parents=True)
    _config(jail, "/vmlinux")
    argv = [
        *(str(jailer), "--id", cut, "--exec-file", _named(firecracker, vc)),
        *("--uid", "0", "--gid", "0"),
        *("--chroot-base-dir", str(vc), "--daemonize", "--", "--config-file", "/fcConfig.json"),
    ]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL) as process:
        assert process.wait(20) == 0
    file = jail / "firecracker.pid"
    pid = wait_for(lambda: int(file.read_text() or 0) if file.exists() else 0, "the pid file")
    try:
        wait_for(lambda: "fc_vcpu 1" in names(pid), "the VM to start")
        yield pid, process.pid
    finally:
        os.kill(pid, 9)
        wait_for(lambda: not lives(pid), "its end")


def firecracker_without_jail(vc: Path, cut: str) -> list[str]:
    """Return the command of Firecracker as Go's runtime starts it without a jailer."""
    home = vc / "firecracker" / cut / "root"
    (home / "run").mkdir(parents=True)
    config = _config(home, str(home / "vmlinux"))
    socket_path = home / "run" / "firecracker.socket"
    return [*(str(program("firecracker")), "--api-sock", str(socket_path)), *config]


def firecracker_of_rs(kata: Path, sandbox_id: str, *, jailed: bool) -> list[str]:
    """Return the command of Firecracker as runtime-rs starts it; it then waits for its API."""
    firecracker = program("firecracker")
    if not jailed:
        (kata / sandbox_id / "run").mkdir(parents=True)
        return [str(firecracker), "--api-sock", str(kata / sandbox_id / "run" / "fc.sock")]
    return [
        *(str(program("jailer")), "--id", sandbox_id, "--gid", "0", "--uid", "0"),
        *("--exec-file", _named(firecracker, kata), "--chroot-base-dir", str(kata)),
        *("--", "--api-sock", "/run//fc.sock"),
    ]


def _config(home: Path, kernel_path: str) -> list[str]:
    """Write a machine with two vCPUs; return the arguments that name it, outside of a jail."""
    (home / "vmlinux").write_bytes(kernel())
    config = {
        "boot-source": {"kernel_image_path": kernel_path, "boot_args": "x"},
        "drives": [],
        "machine-config": {"vcpu_count": 2, "mem_size_mib": 128},
    }
    (home / "fcConfig.json").write_text(json.dumps(config))
    return ["--config-file", str(home / "fcConfig.json")]


def _named(path: Path, base: Path) -> str:
    """Return a copy of a program that has Firecracker's own name: its jail is named after it."""
    copy = base.parent / "real" / "firecracker"
    copy.parent.mkdir(exist_ok=True)
    return str(shutil.copy(path, copy))


@contextlib.contextmanager
def cloud_hypervisor(vc: Path, sandbox_id: str) -> Iterator[tuple[int, Path]]:
    """Run cloud-hypervisor with five vCPUs whose APIC ids have a gap; yield its pid and program."""
    path = program("cloud-hypervisor")
    home = vc / "vm" / sandbox_id
    home.mkdir(parents=True)
    (home / "vmlinux").write_bytes(kernel())
    api = home / "clh-api.sock"
    topology = {"threads_per_core": 1, "cores_per_die": 3, "dies_per_package": 1, "packages": 2}
    config = {
        "payload": {"kernel": str(home / "vmlinux")},
        "cpus": {"boot_vcpus": 5, "max_vcpus": 6, "topology": topology},
        "memory": {"size": 128 << 20},
    }
    with subprocess.Popen(
        [str(path), "--api-socket", str(api)], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            wait_for(api.exists, "the API of cloud-hypervisor")
            _put(api, "vm.create", config)
            _put(api, "vm.boot", None)
            wait_for(lambda: "vcpu4" in names(process.pid), "the VM to start")
            yield process.pid, path
        finally:
            process.kill()


def names(pid: int) -> set[str]:
    """Return the names of a process's threads; empty where it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return {path.read_text().strip() for path in Path(f"/proc/{pid}/task").glob("*/comm")}
    return set()


def _put(api: Path, what: str, content: Any) -> None:
    connection = http.client.HTTPConnection("localhost", timeout=20)
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as connection.sock:
        connection.sock.connect(str(api))
        body = None if content is None else json.dumps(content)
        connection.request("PUT", f"/api/v1/{what}", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status in {200, 204}, (what, answer.status, answer.read())
