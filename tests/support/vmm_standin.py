"""Stand-ins for VMMs that are in no registry: cloud-hypervisor, Firecracker, Dragonball.

    with running(Spec(program, argv, threads=("vmm", "vcpu0"))) as pid: ...

A process with exactly the executable, command line, thread names, folders and, for a jail, the root
and mount namespace of the real one. With `kvm_ids` it makes a real VM, whose vCPUs halt, in the
thread `maker`: KVM's debugfs and descriptors are the kernel's own. What runs is Python; its
arguments are overwritten in place, so /proc/PID/cmdline has none of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

_SPEC: Final = "KATA_PIN_STANDIN"
_SCRIPT: Final = "s"
_CLONE_NEWNS: Final = 0x20000
_MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x1000, 0x4000, 0x40000, 2
_PIVOT_ROOT: Final = {"x86_64": 155, "aarch64": 41}
_PR_SET_NAME: Final = 15
_CREATE_VM, _CREATE_IRQCHIP, _CREATE_VCPU, _RUN = 0xAE01, 0xAE60, 0xAE41, 0xAE80
_SET_TSS_ADDR, _SET_MEMORY = 0xAE47, 0x4020AE46
_HALT: Final = b"\xfa\xf4\xeb\xfd"  # cli; hlt; jmp to hlt
_SPARE: Final = 500  # descriptors that stay free for everything else
_RESPAWN_S: Final = 0.2

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Spec:
    """A VMM: `program` is its file, `threads` the names of all threads but the first.

    `maker` is the one that makes the VM, empty for the first; `kvm_ids` are KVM's vCPU ids by name.
    `jail` is the folder that its jailer makes its root (then `program` is copied there);
    `daemonized`: the jailer leaves it to init and a pid file.
    A hostile one has so many other `descriptors`, below those of its vCPUs, and with `respawns` a
    busy thread that ends and starts anew all the time; `nice` is its scheduling priority.
    """

    program: str
    argv: Sequence[str]
    threads: Sequence[str] = ()
    maker: str = ""
    kvm_ids: Mapping[str, int] = field(default_factory=dict)
    jail: str = ""
    daemonized: bool = False
    descriptors: int = 0
    respawns: bool = False
    nice: int = 0

    @property
    def command(self) -> list[str]:
        """The command that becomes it, or starts it."""
        return [sys.executable, "-S", str(Path(__file__).resolve()), json.dumps(asdict(self))]

    def is_ready(self, pid: int) -> bool:
        """Whether the process shows its arguments and all of its threads."""
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            names = [p.read_text().strip() for p in Path(f"/proc/{pid}/task").glob("*/comm")]
            shown = line == b"".join(arg.encode() + b"\0" for arg in self.argv)
            return shown and {name[:15] for name in self.threads} <= set(names)
        return False


def copy_of_python(path: Path) -> str:
    """Make a program of this name, which a stand-in is run from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return str(shutil.copy(os.path.realpath(sys.executable), path))


@contextlib.contextmanager
def running(spec: Spec) -> Iterator[int]:
    """Run one as a child of the caller, or of init; yield its pid when it is complete."""
    from tests.support.waiting import wait_for  # not there in a jail

    with subprocess.Popen(spec.command, stdin=subprocess.DEVNULL) as process:
        pid = process.pid
        try:
            if spec.daemonized:
                process.wait(20)
                pid = jailed_pid(spec)
            wait_for(lambda: spec.is_ready(pid), f"{spec.argv[0]} to be complete")
            yield pid
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            wait_for(lambda: not lives(pid), "its end")


def jailed_pid(spec: Spec) -> int:
    """Return what the jailer wrote into the jail, 0 for nothing yet."""
    with contextlib.suppress(FileNotFoundError):
        return int(Path(spec.jail, f"{Path(spec.program).name}.pid").read_text() or 0)
    return 0


def lives(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


# ---- the program ---------------------------------------------------------------------------


def _launch(spec: Spec) -> None:
    """Become the VMM, as a shim or a jailer does."""
    program, script = spec.program, str(Path(__file__).resolve())
    if spec.jail:
        name = Path(spec.program).name
        enter_jail(Path(spec.jail), [(spec.program, name), (script, _SCRIPT)])
        program, script = f"/{name}", f"/{_SCRIPT}"
        if spec.daemonized:
            _daemonize(f"{program}.pid")
    env = {"PYTHONHOME": sys.base_prefix, _SPEC: json.dumps(asdict(spec))}
    size = sum(len(arg.encode()) + 1 for arg in spec.argv)
    arguments = ["p", "-S", script]
    pad = size - sum(len(arg) + 1 for arg in arguments) - 1
    if pad < 0:
        raise ValueError("the command line is too short for a stand-in")
    os.execve(program, [*arguments, "x" * pad], env)


def enter_jail(jail: Path, files: Sequence[tuple[str, str]]) -> None:
    """Make a jail as Firecracker's jailer does, with what Python needs, and make it the root."""
    jail.mkdir(parents=True, mode=0o700, exist_ok=True)
    for source, name in files:
        if not (jail / name).exists():
            shutil.copy(source, jail / name)
    _check(_libc.unshare(_CLONE_NEWNS), "unshare")
    _mount("none", "/", _MS_REC | _MS_PRIVATE)
    _mount(str(jail), str(jail), _MS_BIND | _MS_REC)
    for folder in dict.fromkeys(("/usr", "/lib", "/lib64", "/proc", "/dev", sys.base_prefix)):
        if os.path.isdir(folder):
            os.makedirs(f"{jail}{folder}", exist_ok=True)
            _mount(os.path.realpath(folder), f"{jail}{folder}", _MS_BIND | _MS_REC)
    os.chdir(jail)
    os.makedirs("old_root", exist_ok=True)
    _check(_libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"old_root"), "pivot_root")
    os.chdir("/")
    _check(_libc.umount2(b"/old_root", _MNT_DETACH), "umount")
    os.rmdir("/old_root")


def _daemonize(pid_file: str) -> None:
    """Go on in a child, whose pid is left in a file; this process, the jailer, ends."""
    ready, done = os.pipe()
    pid = os.fork()
    if pid:
        Path(pid_file).write_text(str(pid))
        os.write(done, b"x")
        os._exit(0)
    os.setsid()
    os.read(ready, 1)


def _mount(source: str, target: str, flags: int) -> None:
    _check(_libc.mount(source.encode(), target.encode(), None, flags, None), f"mount {target}")


def _check(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), what)


def _be(spec: Spec) -> None:
    """Show the arguments, start the threads, and wait to be killed."""
    line = b"".join(arg.encode() + b"\0" for arg in spec.argv)
    words = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(words[45]), int(words[46])  # fields 48 and 49 of proc_pid_stat(5)
    if end - start != len(line):
        raise ValueError("the arguments do not fit")
    os.nice(spec.nice)
    _open_descriptors(spec.descriptors)
    vcpus: dict[str, int] = {}
    made = threading.Event()

    def be_thread(name: str) -> None:
        _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
        if name == spec.maker and spec.kvm_ids:
            vcpus.update(_make_vm(spec.kvm_ids))
            made.set()
        if name in spec.kvm_ids:
            made.wait()
            while True:
                with contextlib.suppress(InterruptedError):
                    fcntl.ioctl(vcpus[name], _RUN, 0)
        threading.Event().wait()

    if spec.kvm_ids and not spec.maker:
        vcpus.update(_make_vm(spec.kvm_ids))
        made.set()
    for name in spec.threads:
        threading.Thread(target=be_thread, args=(name,), daemon=True).start()
    if spec.respawns:
        threading.Thread(target=_respawn, daemon=True).start()
    ctypes.memmove(start, line, len(line))
    while True:
        signal.pause()


def _open_descriptors(count: int) -> None:
    """Open so many, or as many as a process may have here."""
    if not count:
        return
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    for limit in (hard, count + _SPARE):  # more than the first needs CAP_SYS_RESOURCE
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    for _ in range(min(count, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _SPARE)):
        os.dup(0)


def _respawn() -> None:
    """Run for a moment, as a busy vCPU does, and leave that to another thread."""
    end = time.monotonic() + _RESPAWN_S
    while time.monotonic() < end:
        pass
    threading.Thread(target=_respawn, daemon=True).start()


def _make_vm(ids: Mapping[str, int]) -> dict[str, int]:
    """Return the descriptors of a VM's vCPUs by thread name; the first halts, the others wait."""
    vm = fcntl.ioctl(os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC), _CREATE_VM, 0)
    fcntl.ioctl(vm, _SET_TSS_ADDR, 0xFFFB_D000 - (1 << 32))  # a C int
    fcntl.ioctl(vm, _CREATE_IRQCHIP, 0)
    rom = mmap.mmap(-1, 0x1000)
    rom[0xFF0 : 0xFF0 + len(_HALT)] = _HALT
    _KEPT.append(rom)
    address = ctypes.addressof(ctypes.c_char.from_buffer(rom))
    fcntl.ioctl(vm, _SET_MEMORY, struct.pack("=IIQQQ", 0, 0, 0xFFFF_F000, 0x1000, address))
    return {name: fcntl.ioctl(vm, _CREATE_VCPU, number) for name, number in ids.items()}


_KEPT: list[mmap.mmap] = []

if __name__ == "__main__":
    if _SPEC in os.environ:
        _be(Spec(**json.loads(os.environ[_SPEC])))
    else:
        _launch(Spec(**json.loads(sys.argv[1])))
