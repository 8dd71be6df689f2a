"""`doctor`: whether it can be seen who runs on exclusive pCPUs, and what the daemon may write."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final, NamedTuple

from kata_pin.base.config.tree import Config
from kata_pin.base.documents.measured import WatchDocument
from kata_pin.base.documents.state import KeptQuiet, Row, State
from kata_pin.base.errors import DaemonError, ParseError, reason_of
from kata_pin.base.values import QuietLevel, count, here, listed
from kata_pin.cli.reports import words
from kata_pin.linux.files import HostRoot, read_text
from kata_pin.linux.process import NET_ADMIN, SETUID, may_have, may_write
from kata_pin.linux.topology import online

PERFMON_SUFFICES: Final = 2
"""Above this kernels of Debian and Ubuntu give perf events to CAP_SYS_ADMIN only."""

_NEEDS: Final = (
    "the service needs CAP_PERFMON and SystemCallFilter=perf_event_open (kata-pin install writes "
    "them), and kernel.perf_event_paranoid of at most 2; a container the capability PERFMON and a "
    "seccomp profile that allows the call"
)


def task_switches(root: HostRoot) -> Row:
    """Return whether this process can record task switches, as `prove` does."""
    try:
        os.close(root.calls.switches(online(root).first))
    except OSError as error:
        text = f"cannot be recorded: {error.strerror}; intruders on exclusive pCPUs have no names"
        return Row("task switches", "warn", text, here(words.RECORDS))
    with suppress(OSError, ValueError):
        if int(read_text(root.proc("sys/kernel/perf_event_paranoid"))) > PERFMON_SUFFICES:
            text = "can be recorded by root (perf), not by the daemon, which has CAP_PERFMON alone"
            return Row("task switches", "warn", text, here(words.PARANOID))
    return Row("task switches", "ok", "can be recorded (perf)")


def scheduler(root: HostRoot) -> Iterator[Row]:
    """Yield whether a BPF scheduler is loaded (sched_ext), nothing where the kernel has none.

    Documentation/scheduler/sched-ext.rst: affinities hold under it; it alone chooses which of the
    threads that may run on a CPU runs, and how long. Real-time threads are not its own.
    """
    try:
        state = read_text(root.sys("kernel/sched_ext/state")).strip()
    except OSError:
        return
    if state == "disabled":
        yield Row("scheduler", "ok", "the kernel's own; no sched_ext scheduler is loaded")
        return
    try:
        name = read_text(root.sys("kernel/sched_ext/root/ops")).strip()[:64]
    except OSError:
        name = "of unknown name"
    text = (
        f"sched_ext scheduler {name} is {state}: affinities hold, but it alone decides which "
        "thread of a pCPU runs and for how long, and what weights and slices mean"
    )
    yield Row("scheduler", "warn", text, "end it where latency counts, such as systemctl stop scx")


def watch(ask: Callable[[], WatchDocument]) -> Iterator[Row]:
    """Yield whether the daemon can name who runs on exclusive pCPUs, nothing without one."""
    try:
        found = ask()
    except DaemonError:
        return
    if found.problem:
        yield Row("watch", "warn", f"intruders have no names: {found.problem}", _NEEDS)
    elif found.pcpus:
        yield Row("watch", "ok", f"watches {count(len(found.pcpus), 'exclusive pCPU')}")


# `doctor` for `quiet: irq|full` and `resctrl`: whether the daemon may write, and what failed.
#
# The daemon's rights are those of its unit with drop-ins, or of its container. They are read from
# /proc and tested by no write, so a node without pods shows them too.

DROP_INS: Final = "/usr/lib/systemd/system/kata-pin.service.d"
CHECK: Final = "quiet rights"


class _Need(NamedTuple):
    """A tree or a capability that a drop-in gives, and what fails without it."""

    drop_in: str
    path: str
    capability: int
    fails: str


_IRQ: Final = (
    _Need("quiet.conf", "/proc/irq", SETUID, "masks of interrupts; irqbalance takes no request"),
)
_FULL: Final = (
    _Need("quiet-full.conf", "/sys/devices", NET_ADMIN, "workqueues, RPS and XPS, idle states"),
    _Need("quiet-full.conf", "/proc/sys/kernel/watchdog_cpumask", 0, "the lockup detectors' mask"),
)
_RESCTRL: Final = (_Need("resctrl.conf", "/sys/fs/resctrl", 0, "groups of resctrl"),)

_CAPABILITIES: Final = {SETUID: "CAP_SETUID", NET_ADMIN: "CAP_NET_ADMIN"}


def rows(state: State, config: Config, root: HostRoot) -> Iterator[Row]:
    """Yield what the daemon may not write, and what it failed to write."""
    level = config.quiet
    needs = (
        *(_IRQ if level.acts else ()),
        *(_FULL if level is QuietLevel.FULL else ()),
        *(_RESCTRL if config.resctrl.enabled else ()),
    )
    if not needs:
        return
    if not state.daemon.running:
        yield Row(CHECK, "info", "not known: the daemon does not run")
        return
    found = [row for need in needs for row in _lacking(need, state.daemon.pid or 0, root)]
    if not found:
        names = ", ".join(need.path for need in needs if os.path.exists(root.path(need.path)))
        found = [Row(CHECK, "ok", f"the daemon can write {names}")]
    yield from found
    if state.kept_quiet is not None:
        yield from _failures(state.kept_quiet)


def _lacking(need: _Need, pid: int, root: HostRoot) -> Iterator[Row]:
    if not os.path.exists(root.path(need.path)):  # this kernel lacks it
        return
    try:
        writable = may_write(root, pid, need.path)
        capable = not need.capability or may_have(root, pid, need.capability)
    except (OSError, ParseError) as error:
        yield Row(CHECK, "info", f"not known: {reason_of(error)}", "run as root")
        return
    if not writable:
        text = f"{need.path} is read-only for the daemon (pid {pid}), so writes fail: {need.fails}"
        yield Row(CHECK, "warn", text, _remedy(need.drop_in, root))
    elif not capable:
        name = _CAPABILITIES[need.capability]
        text = f"the daemon (pid {pid}) may not have {name}, so some writes fail: {need.fails}"
        yield Row(CHECK, "warn", text, _remedy(need.drop_in, root))


def _remedy(drop_in: str, root: HostRoot) -> str:
    installed = os.path.exists(root.path(f"{DROP_INS}/{drop_in}"))
    return here(words.DROP_IN_UNUSED if installed else words.DROP_IN, file=drop_in)


def _failures(kept: KeptQuiet) -> Iterator[Row]:
    total = sum(kept.failed_writes.values())
    if kept.problems:
        kinds = ", ".join(f"{kind} {number}" for kind, number in kept.failed_writes.items())
        text = f"cannot set {listed(kept.problems, 1)}"
        text += f"; failed writes since the daemon's start: {kinds}" if kinds else ""
        yield Row("quiet writes", "warn", text)
    elif total:
        text = f"{count(total, 'write')} failed since the daemon's start, none in its last round"
        yield Row("quiet writes", "info", text)
    if kept.left:
        text = f"left to another writer for now: {listed(kept.left, 1)}"
        yield Row(
            "quiet writers", "warn", text, "kata-pin history names programs that may write it"
        )
