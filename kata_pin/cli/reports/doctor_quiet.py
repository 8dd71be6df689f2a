"""`doctor` for `quiet: irq|full` and `resctrl`: whether the daemon may write, and what failed.

The daemon's rights are those of its unit with drop-ins, or of its container. They are read from
/proc and tested by no write, so a node without pods shows them too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final, NamedTuple

from kata_pin.cli.reports import remedies
from kata_pin.config import Config
from kata_pin.host.quiet.rights import NET_ADMIN, SETUID, is_read_only_for, may_have
from kata_pin.host.root import HostRoot
from kata_pin.model.count_noun import count
from kata_pin.model.quiet.node import Unknown
from kata_pin.model.reports.doctor import Row
from kata_pin.model.reports.quiet import KeptQuiet
from kata_pin.model.reports.state import State
from kata_pin.model.settings import QuietLevel
from kata_pin.remedy import here

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
    closed = is_read_only_for(root, pid, need.path)
    if isinstance(closed, Unknown):
        yield Row(CHECK, "info", f"not known: {closed.reason}", "run as root")
        return
    if closed:
        text = f"{need.path} is read-only for the daemon (pid {pid}), so writes fail: {need.fails}"
        yield Row(CHECK, "warn", text, _remedy(need.drop_in, root))
    elif need.capability and may_have(root, pid, need.capability) is False:
        name = _CAPABILITIES[need.capability]
        text = f"the daemon (pid {pid}) may not have {name}, so some writes fail: {need.fails}"
        yield Row(CHECK, "warn", text, _remedy(need.drop_in, root))


def _remedy(drop_in: str, root: HostRoot) -> str:
    installed = os.path.exists(root.path(f"{DROP_INS}/{drop_in}"))
    return here(remedies.DROP_IN_UNUSED if installed else remedies.DROP_IN, file=drop_in)


def _failures(kept: KeptQuiet) -> Iterator[Row]:
    total = sum(kept.failed_writes.values())
    if kept.problems:
        more = f" and {len(kept.problems) - 1} more" if len(kept.problems) > 1 else ""
        kinds = ", ".join(f"{kind} {number}" for kind, number in kept.failed_writes.items())
        text = f"cannot set {kept.problems[0]}{more}"
        text += f"; failed writes since the daemon's start: {kinds}" if kinds else ""
        yield Row("quiet writes", "warn", text)
    elif total:
        text = f"{count(total, 'write')} failed since the daemon's start, none in its last round"
        yield Row("quiet writes", "info", text)
    if kept.left:
        more = f" and {len(kept.left) - 1} more" if len(kept.left) > 1 else ""
        text = f"left to another writer for now: {kept.left[0]}{more}"
        yield Row(
            "quiet writers", "warn", text, "kata-pin history names programs that may write it"
        )
