"""Setting and checking affinities and scheduling classes of threads (D5, D7).

The self-test tries whether pins survive a change of the cpuset on this kernel.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from enum import StrEnum
from errno import EACCES, EINVAL, EPERM, ESRCH, ESTALE
from types import MappingProxyType
from typing import Final, NamedTuple, TypeVar

from msgspec import Struct

from kata_pin.base.counters import PF_NO_SETAFFINITY, RtNode, Scheduling
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import HostError, KataPinError, ParseError, reason_of
from kata_pin.base.placement import Action, ActionResult
from kata_pin.base.sandbox import Process
from kata_pin.base.steps import STEP, Steps
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import Outcome
from kata_pin.linux.cgroup_mounts import CgroupMount, cgroup_mounts
from kata_pin.linux.counters import parse_scheduling
from kata_pin.linux.files import HostRoot, host_errors, read_once, read_text, translated
from kata_pin.linux.kernel_text import parse_starttime
from kata_pin.linux.proc import parse_stat
from kata_pin.linux.tasks import TaskReader, as_cpuset, as_numbers, list_inodes
from kata_pin.linux.topology import online
from kata_pin.rights.broker.protocol import AffinityChange, Changed

# There is no form of sched_setaffinity that takes a process descriptor, so a tid could change hands
# between a look and the call. So Calls.set_affinities checks a thread's identity before and after:
#
# - a thread without a known inode by its stat file, read twice through one descriptor: Linux ties
#   the open file to the very task, and reading it fails once that task is gone, even when its
#   number is taken again;
# - one whose folder's inode is known (tasks.TaskReader) by a listing of the process before the
#   first and after the last thread: a thread that has that inode in both was the same all the time.
#   For a tid to be used again in between, the kernel would have to give out all other numbers
#   first.
#
# A task that changed is reported, and nothing is undone: it was never ours to judge. Facts:
# sched_setaffinity(2); kernel/sched/syscalls.c; measured on 6.1, 6.12 and 6.18.

_OUTCOMES: Final = {
    ESRCH: Outcome.GONE,
    ESTALE: Outcome.REUSED,
    EPERM: Outcome.DENIED,
    EACCES: Outcome.UNVERIFIED,
}


def apply_all(
    root: HostRoot, actions: Sequence[Action], reader: TaskReader | None = None
) -> list[ActionResult]:
    """Apply actions in their order; one that fails does not stop the rest.

    - GONE: the thread exited before, or while, it was set (ESRCH).
    - REUSED: the tid is another thread's.
    - REFUSED: no CPU of the target is both online and in its cpuset (EINVAL).
    - FIXED: a kernel thread that cannot be moved (EINVAL with PF_NO_SETAFFINITY).
    - DENIED: not ours to set without CAP_SYS_NICE (EPERM).
    - UNVERIFIED: the broker does not accept the process (EACCES; rights/broker/policy.py).
    - CLIPPED: what is read back is not the target: fewer CPUs, or another writer's choice.
    - DONE: what is read back is the target.

    `reader` knows the inodes of threads that it has read. Raises HostError for an error that
    sched_setaffinity(2) does not list (a damaged system).
    """
    changes = [
        AffinityChange(
            *one.key, reader.inode(one.key) if reader else 0, as_numbers(one.ask or one.target)
        )
        for one in actions
    ]
    done = root.calls.set_affinities(changes, root.proc())
    return [_result(root, action, one) for action, one in zip(actions, done, strict=True)]


def _result(root: HostRoot, action: Action, changed: Changed) -> ActionResult:
    if not changed.errno:
        after = as_cpuset(changed.after)
        return ActionResult(
            action, Outcome.DONE if after == action.target else Outcome.CLIPPED, after
        )
    if changed.errno == EINVAL:
        return ActionResult(action, _invalid(root, action))
    outcome = _OUTCOMES.get(changed.errno)
    if outcome is None:
        raise HostError("set affinity of", f"thread {action.key.tid}", changed.errno)
    return ActionResult(action, outcome)


def _invalid(root: HostRoot, action: Action) -> Outcome:
    """Return what EINVAL means for a thread."""
    tgid, tid, _ = action.key
    try:
        stat = parse_stat(read_once(f"{root.proc()}/{tgid}/task/{tid}/stat"))
    except OSError:
        return Outcome.GONE
    return Outcome.FIXED if stat.flags & PF_NO_SETAFFINITY else Outcome.REFUSED


# The daemon's hot loop: does every thread of a process have its affinity?
#
# audit_affinity opens no file of a thread and builds no CpuSet while all is well. What it finds
# only marks a sandbox for a pass (D1), so an answer may be a moment old. Budgets: design.md,
# "Numbers to hold".


class AuditFinding(Struct, frozen=True):
    """What an audit of one process found; empty when nothing differs.

    `moved`: threads with another affinity than expected; `born`: threads not expected; `gone`:
    expected ones that exited, or whose tid another thread has now.
    """

    moved: tuple[int, ...] = ()
    born: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()


T = TypeVar("T")

VANISHED: Final = (FileNotFoundError, ProcessLookupError)
"""GONE_ERRNOS as exceptions."""

NOTHING: Final = AuditFinding()


class ExpectedThread(NamedTuple):
    """What a deep audit expects of a thread: when it was born and where it may run."""

    starttime: int
    affinity: frozenset[int]


def audit_affinity(
    root: HostRoot, tgid: int, expected: Mapping[int, frozenset[int]]
) -> Steps[AuditFinding]:
    """Compare the process's threads, by tid, and their affinities with what is expected.

    One listing and one system call a thread. A process that is gone has all its threads gone.
    Raises HostError for an errno that no vanished thread explains.
    """
    get_affinity = root.calls.get_affinity
    observed = yield from _observe(root, tgid, get_affinity)
    if observed == expected:
        return NOTHING
    return _compare(observed, expected, set(expected))


def audit_deep(
    root: HostRoot,
    tgid: int,
    expected: Mapping[int, ExpectedThread],
    inodes: Mapping[int, int] = MappingProxyType({}),
) -> Steps[AuditFinding]:
    """Compare start times too: another start time means that the thread exited and a new one came.

    `inodes` are those of the threads' folders in /proc when their start times were read. The kernel
    gives each task another one (TaskReader), so a thread that still has its own is the
    expected one; of any other the stat file is read. Raises HostError as audit_affinity does.
    """
    get_affinity = root.calls.get_affinity
    base = f"{root.proc()}/{tgid}/task"
    same = inodes.items() & list_inodes(root, tgid).items() if inodes else frozenset()
    starts = {tid: expected[tid].starttime for tid, _ in same if tid in expected}

    def look(tid: int) -> tuple[int, AbstractSet[int]]:
        start = starts.get(tid)
        if start is None:
            start = parse_starttime(read_once(f"{base}/{tid}/stat"))
        return start, get_affinity(tid)

    observed = yield from _observe(root, tgid, look)
    if observed == expected:
        return NOTHING
    still = {tid for tid, e in expected.items() if tid in observed and observed[tid][0] == e[0]}
    return _compare(observed, expected, still)


def _observe(root: HostRoot, tgid: int, look: Callable[[int], T]) -> Steps[dict[int, T]]:
    """Return what `look` sees of each thread, without those that vanish meanwhile."""
    tids: list[int] = []
    observed: dict[int, T] = {}
    try:
        with suppress(*VANISHED):
            tids = list(map(int, os.listdir(f"{root.proc()}/{tgid}/task")))
        for start in range(0, len(tids), STEP):
            several = tids[start : start + STEP]
            try:
                observed |= {tid: look(tid) for tid in several}
            except VANISHED:  # look again, thread by thread
                for tid in several:
                    with suppress(*VANISHED):
                        observed[tid] = look(tid)
            yield
    except OSError as error:
        raise translated(error, "audit", f"process {tgid}") from error
    return observed


def _compare(observed: Mapping[int, T], expected: Mapping[int, T], same: set[int]) -> AuditFinding:
    """Sort the differences; `same` are the expected threads that still have their start time."""
    return AuditFinding(
        moved=tuple(t for t in observed if t in same and observed[t] != expected[t]),
        born=tuple(t for t in observed if t not in same),
        gone=tuple(t for t in expected if t not in same or t not in observed),
    )


# Scheduling classes of threads, and what real-time ones must leave to others.

_GUARD: Final = re.compile(r"(?:ksoftirqd|rcuc)/([0-9]{1,5})\Z")
_RELEASE: Final = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})")
_FAIR_SERVER: Final = (6, 12)


def scheduling(root: HostRoot, key: ThreadKey) -> Scheduling | None:
    """Return a thread's class now, None if it has ended; raises HostError or ParseError."""
    path = root.proc(key.tgid, "task", key.tid, "stat")
    try:
        found = parse_scheduling(read_once(path))
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError as error:
        raise HostError("read", path, error.errno or 0) from error
    return found if found.starttime == key.starttime else None


def rt_node(root: HostRoot, processes: Iterable[Process], cpus: Collection[int]) -> RtNode:
    """Return what the node says of real-time threads on these pCPUs."""
    guards: dict[int, dict[str, int]] = {}
    for process in processes:
        match = _GUARD.match(process.comm) if process.kernel else None
        if match is not None and int(match[1]) in cpus:
            key = ThreadKey(process.pid, process.pid, process.key.starttime)
            with suppress(HostError, ParseError):
                found = scheduling(root, key)
                if found is not None:
                    of_cpu = guards.setdefault(int(match[1]), {})
                    of_cpu[process.comm] = found.priority if found.is_realtime else 0
    whole = {cpu: names for cpu, names in guards.items() if f"ksoftirqd/{cpu}" in names}
    unserved = {
        cpu for cpu in cpus if _number(root.debug("sched/fair_server", f"cpu{cpu}", "runtime")) == 0
    }
    return RtNode(
        _number(root.proc("sys/kernel/sched_rt_runtime_us")),
        _number(root.proc("sys/kernel/sched_rt_period_us")),
        _has_fair_server(root),
        frozenset(unserved),
        whole,
    )


def _has_fair_server(root: HostRoot) -> bool:
    with suppress(OSError):
        match = _RELEASE.match(read_text(root.proc("sys/kernel/osrelease")))
        return match is not None and (int(match[1]), int(match[2])) >= _FAIR_SERVER
    return False


def _number(path: str) -> int | None:
    """Return the number in a file, None where it cannot be read."""
    with suppress(OSError, ValueError):
        return int(read_text(path, 64))
    return None


# Do pins survive a change of the cpuset on this kernel? Tried, not guessed from its version.
#
# Linux before 6.2 forgets an affinity whenever the cgroup's cpuset changes; later kernels, and
# distributions that took the change back, keep it (commit 8f9ea86fdf99). The test makes a cgroup of
# its own with one process of its own, and removes both. Killed halfway, the process ends by itself
# (its input closes) and the empty cgroup is removed by the next run. No other task is touched and
# no existing cgroup is written (D7). Blocks for some milliseconds.

PREFIX: Final = "kata-pin-selftest-"
"""Names of our cgroups begin with it; the pid of their maker follows."""

REMOVE_S: Final = 1.0
"""How long a cgroup may stay busy after its last process was reaped."""


class Sticking(StrEnum):
    """What becomes of a pin when the cpuset changes."""

    STICK = "stick"
    LOST = "lost"
    UNKNOWN = "unknown"


class PinsStick(Struct, frozen=True):
    """The answer, and what it rests on (or what was in the way)."""

    answer: Sticking
    reason: str


def pins_stick(root: HostRoot) -> PinsStick:
    """Try it; UNKNOWN with the reason where it cannot be tried. Never raises."""
    if not root.live:
        return PinsStick(Sticking.UNKNOWN, "not the running system")
    try:
        mount = _usable_mount(root)
        with _cgroup(root, mount) as folder:
            return _try(root, folder, mount)
    except (OSError, KataPinError) as error:
        return PinsStick(Sticking.UNKNOWN, reason_of(error))


def _usable_mount(root: HostRoot) -> CgroupMount:
    """Return a hierarchy in which a new cgroup has a cpuset of its own.

    On v2 the controller must already be handed on: to hand it on wipes the pins of all tasks.
    """
    mounts = cgroup_mounts(root)
    for mount in mounts:
        if mount.v1:
            return mount
        with suppress(OSError):
            if "cpuset" in read_text(f"{mount.point}/cgroup.subtree_control").split():
                return mount
    missing = "the cpuset controller is not handed on" if mounts else "no cgroups are mounted"
    raise KataPinError(missing)


@contextmanager
def _cgroup(root: HostRoot, mount: CgroupMount) -> Iterator[str]:
    _sweep(root, mount.point)
    folder = f"{mount.point}/{PREFIX}{os.getpid()}-{os.urandom(4).hex()}"
    os.mkdir(folder)
    try:
        yield folder
    finally:
        _remove(folder)


def _try(root: HostRoot, folder: str, mount: CgroupMount) -> PinsStick:
    allowed = CpuSet.parse(read_text(f"{mount.point}/{_effective(mount, 'cpus')}")) & online(root)
    if len(allowed) < 2:
        return PinsStick(Sticking.UNKNOWN, "needs two CPUs")
    pinned, wide = CpuSet(list(allowed)[1:2]), CpuSet(list(allowed)[:2])
    _write(folder, "cpuset.mems", read_text(f"{mount.point}/{_effective(mount, 'mems')}"))
    _write(folder, "cpuset.cpus", str(wide))
    with _bystander() as pid:
        _write(folder, "cgroup.procs", str(pid))
        os.sched_setaffinity(pid, pinned)
        _write(folder, "cpuset.cpus", str(pinned))
        _write(folder, "cpuset.cpus", str(wide))
        after = CpuSet(root.calls.get_affinity(pid))
    if after == pinned:
        return PinsStick(Sticking.STICK, f"a pin to {pinned} outlived a change of its cpuset")
    return PinsStick(Sticking.LOST, f"a pin to {pinned} became {after} when its cpuset changed")


def _effective(mount: CgroupMount, what: str) -> str:
    return f"cpuset.effective_{what}" if mount.v1 else f"cpuset.{what}.effective"


@contextmanager
def _bystander() -> Iterator[int]:
    """Run a process that ends when its input does, so also when we are killed.

    It is our interpreter: the container image has no other program.
    """
    command = [sys.executable, "-ISc", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, close_fds=True) as child:
        try:
            yield child.pid
        finally:
            child.kill()


def _write(folder: str, name: str, text: str) -> None:
    path = f"{folder}/{name}"
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        with host_errors("write", path):
            os.write(fd, text.encode())
    finally:
        os.close(fd)


def _sweep(root: HostRoot, point: str) -> None:
    """Remove what a killed run left; a cgroup in use refuses to go."""
    for name in os.listdir(point):
        maker = name.removeprefix(PREFIX).partition("-")[0]
        if name.startswith(PREFIX) and not os.path.exists(root.proc(maker)):
            with suppress(OSError):
                os.rmdir(f"{point}/{name}")


def _remove(folder: str) -> None:
    deadline = time.monotonic() + REMOVE_S
    while True:
        try:
            os.rmdir(folder)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)
        else:
            return
