"""The part `identity`: processes of an unprivileged user that claim to be a sandbox's VMM.

Each kind of fake has all that its user can have: the host's QEMU with the sandbox's name, a cgroup
named after the sandbox in a delegated subtree, a parent with effective uid 0 and the shim's
arguments, a binary of its own that reads as the host's deleted one. They claim a sandbox that has
its VMM, one whose VMM is dead, and ones that never were, also over restarts of the daemon.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kata_pin.linux.cgroup_mounts import cgroup_mounts
from kata_pin.linux.files import HOST
from tests.bench.figures import BenchError, Row, count_row
from tests.support import stopped, vmm_standin
from tests.support.daemon import Node, Pod, private_node
from tests.support.qemu import QEMU, Machine

STRANGER: Final = 4242
BATCH: Final = 40
RESTART: Final = 5
"""Batches after which the daemon is started anew."""
_CLONE_NEWNS: Final = 0x20000

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Outcome:
    """What came of the tries."""

    tries: int = 0
    accepted: list[str] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    wrongly_told: list[str] = field(default_factory=list)


def measure(tries: int, _only: tuple[str, ...]) -> Iterator[Row]:
    """Yield how many of so many fakes were accepted, or moved."""
    done = Outcome()
    with contextlib.ExitStack() as closing:
        node = closing.enter_context(private_node())
        delegated = closing.enter_context(_delegated())
        pod = closing.enter_context(node.pod("victim", machine=Machine(boot=2, maximum=2)))
        node.start()
        pod.announce()
        pod.create("c1", "1")
        kinds = _kinds(node, delegated)
        batches = max(3, -(-tries // BATCH))
        for number in range(batches):
            share = 3 * number // batches
            if number and share != 3 * (number - 1) // batches:
                _next_act(share, pod)
            if number % RESTART == RESTART - 1 and node.daemon is not None:
                node.daemon.kill()
                node.start()
            kind, make = kinds[number % len(kinds)]
            claimed = pod.id if number % 3 else node.id_of(f"none{number}")
            _one_batch(done, node, pod, f"{kind}, act {share}", make(claimed), alive=share < 2)
    problems = [*done.accepted, *done.moved, *done.wrongly_told]
    for line in problems[:10]:
        print(f"  {line}", file=sys.stderr)
    yield count_row("identity: fakes accepted as a VMM", len(done.accepted), done.tries)
    yield count_row("identity: fakes whose affinity was set", len(done.moved), done.tries)
    yield count_row(
        "identity: hooks told `pinned` while the VMM was not", len(done.wrongly_told), done.tries
    )


def _next_act(share: int, pod: Pod) -> None:
    """Take from the victim what names its VMM beside its shim, then its life."""
    if share == 1:
        pod.kata.pidfile.unlink()
        real, pod.kata.pid = pod.kata.pid, 0
        pod.kata.write_persist(pod.kata.containers)
        pod.kata.pid = real
    else:
        os.kill(pod.kata.pid, 9)


def _one_batch(
    done: Outcome, node: Node, pod: Pod, kind: str, fakes: contextlib.AbstractContextManager[
        Sequence[int]
    ], *, alive: bool,
) -> None:  # fmt: skip
    with fakes as pids:
        before = {pid: os.sched_getaffinity(pid) for pid in pids}
        done.tries += len(pids)
        said = node.hook("poststart", "c1", pod.kata.shim.pid, state_id=pod.id).stderr
        if alive:
            said = node.hook("createRuntime", "c1", pod.kata.shim.pid).stderr
            if not said and pod.misplaced({1}):
                done.wrongly_told.append(f"{kind}: {pod.misplaced({1})[0]}")
        for _ in range(2):
            node.ask("reconcile")
        state = node.ask("state")
        vmms = {one["vmm"]["pid"] for one in state["sandboxes"] if one["vmm"] is not None}
        done.accepted += [f"{kind}: pid {pid} accepted" for pid in sorted(vmms & set(pids))]
        done.moved += [
            f"{kind}: pid {pid} on {os.sched_getaffinity(pid)}"
            for pid in pids
            if os.sched_getaffinity(pid) != before[pid]
        ]


Maker = Callable[[str], contextlib.AbstractContextManager[Sequence[int]]]


def _kinds(node: Node, delegated: Path) -> list[tuple[str, Maker]]:
    """Return each kind of fake: what makes a batch that claims a sandbox."""

    def in_cgroup(claimed: str, **options: str) -> contextlib.AbstractContextManager[Sequence[int]]:
        def before() -> None:
            folder = delegated / claimed
            folder.mkdir(exist_ok=True)
            os.chown(folder, STRANGER, STRANGER)
            (folder / "cgroup.procs").write_text("0")
            if options:
                _own_binaries(node.root / "own", options["name"])

        return _stopped(claimed, before, options.get("name", ""))

    return [
        ("a name alone", lambda claimed: _stopped(claimed, None, "")),
        ("a delegated cgroup", in_cgroup),
        ("a setuid parent", _children_of_setuid),
        ("a deleted binary", lambda claimed: in_cgroup(claimed, name=QEMU)),
        ("a binary called deleted", lambda claimed: in_cgroup(claimed, name=f"{QEMU} (deleted)")),
        ("a jail of its own", lambda claimed: _jailed(node, claimed)),
    ]


@contextlib.contextmanager
def _jailed(node: Node, claimed: str) -> Iterator[list[int]]:
    """Start a batch in a jail that is the stranger's, with the program and the pid file of one."""
    jail = node.root / "strangers" / claimed
    argv = ["/firecracker", "--id", claimed[:32], "--start-time-us", "1"]
    pids: list[int] = []

    def enter() -> None:
        vmm_standin.enter_jail(jail, [("/usr/bin/true", "firecracker")])
        for path in ("/", "/firecracker"):
            os.chown(path, STRANGER, STRANGER)

    try:
        for _ in range(BATCH):
            one = stopped.start(argv, executable="/firecracker", uid=STRANGER, before=enter)
            pids.append(one)
        (jail / "firecracker.pid").write_text(str(pids[0]))
        yield pids
    finally:
        stopped.end(pids)


@contextlib.contextmanager
def _stopped(claimed: str, before: Callable[[], None] | None, name: str) -> Iterator[list[int]]:
    """Start a batch of stopped processes; `name` is that of a binary of their own."""
    argv = [QEMU, "-name", f"sandbox-{claimed}", "-smp", "2"]
    pids: list[int] = []
    try:
        for _ in range(BATCH):
            pid = stopped.start(argv, executable=name or QEMU, uid=STRANGER, before=before)
            pids.append(pid)
            if name == QEMU:
                os.unlink(f"/proc/{pid}/root{name}")
        yield pids
    finally:
        stopped.end(pids)


def _own_binaries(source: Path, name: str) -> None:
    """Hide QEMU's folder behind one with a single binary, for this process alone."""
    if _libc.unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    if not source.exists():
        shutil.copy("/usr/bin/true", source)
    data = source.read_bytes()
    flags = {"private": 0x4000 | 0x40000}
    _mount(b"none", b"/", None, flags["private"])
    _mount(b"none", os.fsencode(Path(name).parent), b"tmpfs", 0)
    Path(name).write_bytes(data)
    os.chmod(name, 0o755)


def _mount(source: bytes, target: bytes, kind: bytes | None, flags: int) -> None:
    if _libc.mount(source, target, kind, flags, None):
        raise OSError(ctypes.get_errno(), "mount", target)


_PARENT: Final = """
import os, sys
sys.path.insert(0, sys.argv[1])
from tests.support import stopped
os.setresuid(4242, 0, 0)
argv = ["/usr/bin/qemu-system-x86_64", "-name", "sandbox-" + sys.argv[-1], "-smp", "2"]
pids = [stopped.start(argv, uid=4242) for _ in range(int(sys.argv[2]))]
print(*pids, flush=True)
sys.stdin.readline()
stopped.end(pids)
"""


@contextlib.contextmanager
def _children_of_setuid(claimed: str) -> Iterator[list[int]]:
    """Start a batch whose parent has effective uid 0 and the arguments of the sandbox's shim."""
    root = str(Path(__file__).resolve().parents[2])
    argv = ["/usr/bin/containerd-shim-kata-v2", "-c", _PARENT, root, str(BATCH), "-id", claimed]
    with subprocess.Popen(
        argv, executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        try:
            pids = [int(word) for word in parent.stdout.readline().split()]
            if not pids:
                raise BenchError("the fakes of a setuid parent did not start")
            yield pids
        finally:
            parent.communicate("\n")


@contextlib.contextmanager
def _delegated() -> Iterator[Path]:
    """Make a cgroup that belongs to the stranger, in the first hierarchy that lets one be made."""
    for mount in sorted(cgroup_mounts(HOST), key=lambda one: one.v1):
        top = Path(mount.point, f"kp-delegated-{os.getpid()}")
        try:
            top.mkdir()
        except OSError:
            continue
        for name in ("", "cgroup.procs"):
            os.chown(top / name, STRANGER, STRANGER)
        if mount.v1:
            for name in ("cpuset.cpus", "cpuset.mems"):
                (top / name).write_text((Path(mount.point) / name).read_text())
        try:
            yield top
        finally:
            folders = itertools.chain(top.iterdir(), [top])
            for folder in folders:
                if folder.is_dir():
                    with contextlib.suppress(OSError):
                        folder.rmdir()
        return
    raise BenchError("no cgroup can be made here")
