"""What is remembered of threads' roles while the threads live (DESIGN D6).

A living thread's role never changes; only what is known of it grows: a better source replaces a
weaker one, and a contradiction is added to it. So most passes read nothing at all. A RoleCache
lives as long as its sandbox's supervisor; losing it costs one look.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from kata_pin.model.thread import Role, RoleSource, Task, ThreadKey, ThreadRole
from kata_pin.wire.qemu.qmp import QmpAnswers

YOUNG_S: Final = 2.0
"""A thread younger than this may not yet do what it was made for: a vCPU enters KVM later."""

RELOOK_S: Final = 60.0
"""How often threads that no source named are looked at again."""

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_RANK: Final = {source: rank for rank, source in enumerate(RoleSource)}
_UNNAMED: Final = frozenset({RoleSource.ORDER, RoleSource.REST})


class RoleCache:
    """Roles by thread, and the QMP answers bound to the threads that they were about."""

    def __init__(self) -> None:
        self._roles: dict[ThreadKey, Role] = {}
        self._answers: QmpAnswers | None = None
        self._vcpus: dict[ThreadKey, int] = {}
        self._iothreads: dict[ThreadKey, str] = {}
        self._looked_s = 0.0

    @property
    def qmp_vcpus(self) -> dict[ThreadKey, int]:
        """The cpu-index that QMP told, by thread."""
        return self._vcpus

    @property
    def qmp_iothreads(self) -> dict[ThreadKey, str]:
        """The iothread id that QMP told, by thread."""
        return self._iothreads

    @property
    def vcpus(self) -> dict[ThreadKey, int]:
        """The cpu-index of each thread that is known to be a vCPU's, whatever the source."""
        return {key: role.vcpu for key, role in self._roles.items() if role.vcpu is not None}

    def get(self, key: ThreadKey) -> Role | None:
        """Return a thread's role."""
        return self._roles.get(key)

    def keep_only(self, keys: Iterable[ThreadKey]) -> None:
        """Forget threads that are not among `keys`."""
        alive = set(keys)
        for kept in (self._roles, self._vcpus, self._iothreads):
            for key in [key for key in kept if key not in alive]:
                del kept[key]

    def bind(self, answers: QmpAnswers | None, tasks: Sequence[Task]) -> None:
        """Tie QMP's thread ids to the threads that have them now: do it as soon as they come.

        Ids that are no thread of the VMM are ignored. The same answers are tied only once, so a
        thread that gets a dead one's id later inherits nothing.
        """
        if answers is None or answers is self._answers:
            return
        keys = {task.key.tid: task.key for task in tasks}
        for cpu in answers.cpus:
            if cpu.thread_id in keys:
                self._vcpus[keys[cpu.thread_id]] = cpu.index
        for iothread in answers.iothreads:
            if iothread.thread_id in keys:
                self._iothreads[keys[iothread.thread_id]] = iothread.id
        self._answers = answers
        self._looked_s = 0.0

    def needs_look(self, tasks: Sequence[Task], boot: int) -> bool:
        """Whether the sources can tell something new of these threads; `boot` vCPUs are a must."""
        roles = [self._roles.get(task.key) for task in tasks]
        if any(role is None for role in roles):
            return True
        unnamed = [
            task
            for task, role in zip(tasks, roles, strict=True)
            if role is not None and role.source in _UNNAMED
        ]
        if not unnamed:
            return False
        vcpus = sum(role is not None and role.role is ThreadRole.VCPU for role in roles)
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        young = any(_is_young(task.key, now_s) for task in unnamed)
        return young or vcpus < boot or now_s - self._looked_s > RELOOK_S

    def unsure(self, boot: int, maximum: int) -> bool:
        """Whether a young thread may yet show that it is a vCPU: of `maximum`, 0 for any number.

        While boot vCPUs are missing that may be any young thread that no source named; later only
        one younger than every vCPU, for vCPUs are hotplugged one after the other.
        """
        vcpus = self.vcpus
        if 0 < maximum <= len(vcpus) and not self._guessed(vcpus):
            return False
        newest = max(map(_born, vcpus), default=(0, 0)) if len(vcpus) >= boot else (0, 0)
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        return any(
            (key in vcpus or _born(key) > newest) and _is_young(key, now_s)
            for key, role in self._roles.items()
            if role.source in _UNNAMED
        )

    def _guessed(self, keys: Iterable[ThreadKey]) -> bool:
        return any(self._roles[key].source in _UNNAMED for key in keys)

    def learn(self, found: dict[ThreadKey, Role]) -> None:
        """Take the roles of a look."""
        self._looked_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        for key, new in found.items():
            old = self._roles.get(key)
            self._roles[key] = new if old is None else better(old, new)


def better(old: Role, new: Role) -> Role:
    """Return what is known of a thread after a second look."""
    if _RANK[new.source] < _RANK[old.source]:
        return new
    if new.source is not old.source:
        return old
    if (new.role, new.vcpu, new.apic_id) == (old.role, old.vcpu, old.apic_id):
        return new
    if old.conflict:
        return old
    return replace(old, conflict=f"{old.source} said {_said(old)}, then {_said(new)}")


def _born(key: ThreadKey) -> tuple[int, int]:
    """Sort key of creation."""
    return key.starttime, key.tid


def _is_young(key: ThreadKey, now_s: float) -> bool:
    return now_s - key.starttime / _TICKS < YOUNG_S


def _said(role: Role) -> str:
    known = role.role is ThreadRole.VCPU and role.vcpu is not None
    return f"{role.role} {role.vcpu}" if known else role.role.value
