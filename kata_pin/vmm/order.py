"""Roles inferred from the order in which QEMU creates its threads.

Seen with QEMU 7.2, KVM and TCG alike (system/vl.c: objects before the machine, monitors before
vCPUs):

    main loop, call_rcu, one thread for each -object iothread in command line order,
    the monitor's thread (with -qmp), boot vCPUs in index order, then whatever comes later:
    hotplugged vCPUs, workers

Short-lived threads leave no trace; one that is still alive shifts everything after it. So there is
no guess unless the numbers fit exactly, and none about threads after the boot vCPUs. Kernel workers
(vhost, KVM) can be anywhere and are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

from kata_pin.model.sandbox import Vmm
from kata_pin.model.thread import Task, ThreadKey, ThreadRole
from kata_pin.vmm.kinds import NamedRole

HEAD: Final = 2  # the main loop and call_rcu

MAX_TID_STEP: Final = 8192
"""Within one clock tick tids ascend by less than this, unless they wrapped around."""


def guess(
    vmm: Vmm, tasks: Sequence[Task], known: Mapping[ThreadKey, int], *, monitor: bool
) -> dict[ThreadKey, NamedRole]:
    """Return what follows from creation order; `known` are vCPU threads with their cpu-index.

    `monitor` says whether QEMU has a QMP monitor, which has a thread of its own.
    """
    line = creation_order(tasks) if vmm.guest.boot else None
    if line is None or not line or line[0].tid != line[0].tgid:
        return {}
    first = HEAD + len(vmm.iothreads) + monitor
    boot = line[first : first + vmm.guest.boot]
    if len(boot) < vmm.guest.boot or not _fits(line, boot, known, vmm.guest.boot):
        return {}
    guesses = {key: NamedRole(ThreadRole.VCPU, vcpu=n) for n, key in enumerate(boot)}
    named = zip(line[HEAD:], vmm.iothreads, strict=False)
    guesses |= {key: NamedRole(ThreadRole.IOTHREAD, iothread=name) for key, name in named}
    others = (*line[:HEAD], *line[first - monitor : first])
    return guesses | dict.fromkeys(others, NamedRole(ThreadRole.EMULATOR))


def creation_order(tasks: Sequence[Task]) -> list[ThreadKey] | None:
    """Return user threads as they were created, None when tids wrapped around within a tick."""
    keys = sorted(
        (task.key for task in tasks if not task.user_worker and not task.kernel),
        key=lambda key: (key.starttime, key.tid),
    )
    for before, after in pairwise(keys):
        if before.starttime == after.starttime and after.tid - before.tid > MAX_TID_STEP:
            return None
    return keys


def _fits(
    line: Sequence[ThreadKey],
    boot: Sequence[ThreadKey],
    known: Mapping[ThreadKey, int],
    count: int,
) -> bool:
    """Whether known boot vCPUs are in their places; with none known, no thread may be extra."""
    places = {index: key for key, index in known.items() if index < count}
    if not places:
        return len(line) == line.index(boot[0]) + count
    return all(boot[index] == key for index, key in places.items())
