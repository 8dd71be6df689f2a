"""The installed hook, run by real OCI runtimes with what they really write to its stdin."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kata_pin.peers.oci import Phase, parse_config, parse_state
from tests.support.commandline import run
from tests.support.hooks import HookConnection, HookDaemon, HookMessage, spooled_messages
from tests.support.ocirun import (
    RUNTIMES,
    OciContainer,
    OciError,
    available,
    in_private_namespace,
    make_rootfs,
)
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.oci, pytest.mark.root]

HOOK_PATH = "/usr/libexec/kata-pin/kata-pin-hook"
HOOKS_DIR = "usr/share/containers/oci/hooks.d"
FRAGMENT = "etc/kata-pin/containerd-hooks.json"
LIFE = [Phase.PRESTART, Phase.CREATE_RUNTIME, Phase.POSTSTART, Phase.POSTSTOP]


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A runtime directory below /run, where an installation accepts it."""
    path = Path(tempfile.mkdtemp(prefix="kata-pin-test-", dir="/run"))
    (path / "spool").mkdir(mode=0o700)
    yield path
    shutil.rmtree(path)


@pytest.fixture(params=RUNTIMES)
def runtime(request: pytest.FixtureRequest) -> str:
    if not available(request.param):
        pytest.skip(f"{request.param} is not installed")
    return str(request.param)


PATIENT = "record_ms: 5000, pin_ms: 5000"
"""Budgets for tests in which the daemon answers, on a machine that others load too."""


def installed(root: Path, runtime_dir: Path, runtime: str, hook: str = PATIENT) -> Path:
    """Install below `root`, with JSON files that name the hook where it is there; return it."""
    settings = root / "etc/kata-pin/config.yaml"
    settings.parent.mkdir(parents=True)
    settings.write_text(f"version: 1\nruntime_dir: {runtime_dir}\nhook: {{{hook}}}\n")
    also = ["--prestart"] if runtime == "--containerd" else []
    program = ("--program", "/usr/bin/kata-pin")
    assert run(["install", "--root", str(root), *program, runtime, *also]) == 0
    for file in [*root.rglob("*.json")]:
        file.write_text(file.read_text().replace(HOOK_PATH, f"{root}{HOOK_PATH}"))
    return root


def containerd_hooks(root: Path, runtime_dir: Path, hook: str = PATIENT) -> dict[str, Any]:
    installed(root, runtime_dir, "--containerd", hook)
    hooks = json.loads((root / FRAGMENT).read_text())["hooks"]
    # run inside the container's mount namespace, where the hook is not; only Kata runs it outside
    del hooks["createContainer"]
    return dict(hooks)


def check_life(messages: list[HookMessage], container: OciContainer) -> None:
    """Check that the messages tell the container's whole life, each as the parsers want it."""
    assert [message.phase for message in messages] == LIFE
    for message in messages:
        state = parse_state(message.body)
        assert (state.id, state.bundle) == (container.name, str(container.bundle))
        assert (state.pid > 0) == (message.phase is not Phase.POSTSTOP)
    stamps = [message.stamp_ns for message in messages]
    assert stamps == sorted(stamps)


def test_life_of_a_container(runtime: str, runtime_dir: Path, tmp_path: Path) -> None:
    """Every phase reaches the daemon in order, and its bundle can be read while it is there."""
    seen = []

    async def read_bundle(connection: HookConnection) -> None:
        state = parse_state(connection.message.body)
        seen.append(parse_config(Path(state.bundle, "config.json").read_bytes()))
        await connection.recorded()
        await connection.pinned()

    hooks = containerd_hooks(tmp_path / "root", runtime_dir)
    annotations = {"io.kubernetes.cri.sandbox-id": "p1"}
    with HookDaemon(runtime_dir, read_bundle) as daemon:
        with OciContainer(
            runtime, tmp_path, "kp-life", hooks=hooks, annotations=annotations
        ) as container:
            container.start()
            container.stop()
        check_life(daemon.messages, container)
    assert [dict(config.annotations) for config in seen] == [annotations] * 4
    assert os.listdir(runtime_dir / "spool") == []


def test_life_without_a_daemon(runtime: str, runtime_dir: Path, tmp_path: Path) -> None:
    """Without a daemon the container lives as ever, and the spool tells its life in order."""
    hooks = containerd_hooks(tmp_path / "root", runtime_dir)
    with OciContainer(runtime, tmp_path, "kp-away", hooks=hooks) as container:
        container.start()
        assert container.status == "running"
        container.stop()
    check_life(spooled_messages(runtime_dir), container)


def test_life_with_a_hung_daemon(runtime: str, runtime_dir: Path, tmp_path: Path) -> None:
    """A daemon that never answers costs each phase its budget and the container nothing else."""

    async def hang(connection: HookConnection) -> None:
        await connection.gone.wait()

    hooks = containerd_hooks(tmp_path / "root", runtime_dir, "record_ms: 100")
    with HookDaemon(runtime_dir, hang) as daemon:
        start = time.monotonic()
        with OciContainer(runtime, tmp_path, "kp-hung", hooks=hooks) as container:
            container.start()
            took = time.monotonic() - start
            assert container.status == "running"
            container.stop()
    assert 0.3 < took < 5
    spooled = spooled_messages(runtime_dir)
    check_life(spooled, container)
    assert spooled == daemon.messages


def test_strict_mode(runtime: str, runtime_dir: Path, tmp_path: Path) -> None:
    """In strict mode a container without pins does not come up, and one with pins does."""

    async def unpin(connection: HookConnection) -> None:
        await connection.recorded()
        await connection.unpinned("no VMM found")

    hooks = containerd_hooks(tmp_path / "root", runtime_dir, f"strict: true, {PATIENT}")
    with (
        HookDaemon(runtime_dir, unpin),
        pytest.raises(OciError, match="hook"),
        OciContainer(runtime, tmp_path, "kp-strict", hooks=hooks),
    ):
        pass
    with (
        HookDaemon(runtime_dir),
        OciContainer(runtime, tmp_path, "kp-strict2", hooks=hooks) as container,
    ):
        assert container.status == "created"


PODMAN_MARK = "io.kata-pin.enable=true"


@pytest.mark.parametrize(
    ("files", "annotation", "phases"),
    [("--crio", "", [Phase.CREATE_RUNTIME, Phase.POSTSTART, Phase.POSTSTOP]),
     ("--podman", PODMAN_MARK, [Phase.CREATE_RUNTIME, Phase.POSTSTART, Phase.POSTSTOP]),
     ("--podman", "", [])],
    ids=["always", "annotated", "not-annotated"],
)  # fmt: skip
@pytest.mark.skipif(not available("podman"), reason="podman is not installed")
def test_podman_reads_hooks_d(
    *,
    runtime: str,
    runtime_dir: Path,
    podman_dir: Path,
    tmp_path: Path,
    files: str,
    annotation: str,
    phases: list[Phase],
) -> None:
    """podman, and CRI-O by the same library, take the hooks.d files: always, or by annotation."""
    root = installed(tmp_path / "root", runtime_dir, files)
    make_rootfs(podman_dir / "rootfs")
    with HookDaemon(runtime_dir) as daemon:
        done = subprocess.run(
            podman(runtime, podman_dir, root / HOOKS_DIR, annotation),
            capture_output=True, text=True, check=False, timeout=50,
        )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr
    assert [message.phase for message in daemon.messages] == phases
    for message in daemon.messages:
        assert parse_state(message.body).bundle.endswith("/userdata")


def podman(runtime: str, folder: Path, hooks_dir: Path, annotation: str) -> list[str]:
    """Return the command that runs one container, all of podman's own files below `folder`."""
    command = [
        "podman", "--root", f"{folder}/storage", "--runroot", f"{folder}/run",
        "--tmpdir", f"{folder}/libpod", "--storage-driver", "vfs", "--events-backend", "file",
        "--cgroup-manager", "cgroupfs", "--runtime", runtime, "--hooks-dir", str(hooks_dir),
        "run", "--rm", "--network", "none", "--ulimit", "nofile=1024:20000",
        "--ulimit", "nproc=1024:20000", "--volume", "/usr:/usr:ro",
        *(["--annotation", annotation] if annotation else []),
        "--rootfs", f"{folder}/rootfs", "echo", "hello",
    ]  # fmt: skip
    return in_private_namespace(command)


@pytest.fixture
def podman_dir(runtime_dir: Path) -> Iterator[Path]:
    """A folder with a short path, as podman wants it; then no cgroup of podman's is left."""
    yield runtime_dir / "podman"
    wait_for(lambda: not conmons(runtime_dir), "conmon to end")
    for cgroup in podman_cgroups():
        with contextlib.suppress(OSError):  # other podmans of the machine may use it
            cgroup.rmdir()


def conmons(folder: Path) -> list[str]:
    """Return the processes of conmon that work below a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes()
            if (process / "comm").read_text() == "conmon\n" and os.fsencode(folder) in words:
                found.append(process.name)
    return found


def podman_cgroups() -> list[Path]:
    """Return the cgroups that podman leaves behind in every hierarchy, leaves first."""
    parents = Path("/sys/fs/cgroup").glob("*/libpod_parent")
    return [path for parent in parents for path in (parent / "conmon", parent)]
