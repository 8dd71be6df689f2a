"""What is known of threads' roles while the threads live (D6).

A living thread's role never changes; only what is known of it grows: a better source replaces a
weaker one, and a contradiction is added to it. So most passes read nothing at all. A RoleCache
lives as long as its sandbox's supervisor; losing it costs one examination.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from kata_pin.model.thread import Role, RoleSource, Task, ThreadKey, ThreadRole
from kata_pin.wire.qemu.qmp import QmpAnswers

YOUNG_S: Final = 2.0
"""A thread younger than this may not yet do what it was made for: a vCPU enters KVM later."""

RELOOK_S: Final = 60.0  # how often threads that no source named are examined again

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_RANK: Final = {source: rank for rank, source in enumerate(RoleSource)}
_UNNAMED: Final = frozenset({RoleSource.ORDER, RoleSource.REST})


class RoleCache:
    """Roles by thread, and the QMP answers bound to the threads that they were about."""

    def __init__(self) -> None:
        self.qmp_vcpus: dict[ThreadKey, int] = {}
        """The cpu-index that QMP reported, by thread."""
        self.qmp_iothreads: dict[ThreadKey, str] = {}
        """The iothread id that QMP reported, by thread."""
        self.qmp_others: set[ThreadKey] = set()
        """Threads that QMP did not report although they lived when it was asked: neither."""
        self._roles: dict[ThreadKey, Role] = {}
        self._answers: QmpAnswers | None = None
        self._keys: list[ThreadKey] = []
        self._pruned: list[ThreadKey] = self._keys
        self._recalled: Mapping[ThreadKey, Role] = {}
        self._due_s = 0.0
        self._young_until_s = 0.0

    def get(self, key: ThreadKey) -> Role | None:
        """Return a thread's role, None when it is not known."""
        return self._roles.get(key)

    def vcpus(self, tasks: Iterable[Task]) -> dict[ThreadKey, int]:
        """Return the cpu-index of those threads that are known to be vCPUs, by whatever source."""
        found = ((task.key, self._roles.get(task.key)) for task in tasks)
        return {key: r.vcpu for key, r in found if r is not None and r.vcpu is not None}

    def bind(
        self,
        answers: QmpAnswers | None,
        tasks: Sequence[Task],
        before: Collection[ThreadKey] = (),
    ) -> None:
        """Tie QMP's thread ids to the threads that have them now: do it as soon as they come.

        `before` are threads that lived before QEMU was asked: it lists every vCPU and every
        iothread, so those that it does not list are neither (both are made and listed in one step
        of its main loop). Ids that are no thread of the VMM are ignored. The same answers are tied
        only once, so a thread that gets a dead one's id later inherits nothing.
        """
        if answers is None or answers is self._answers:
            return
        keys = {task.key.tid: task.key for task in tasks}
        for cpu in answers.cpus:
            if cpu.thread_id in keys:
                self.qmp_vcpus[keys[cpu.thread_id]] = cpu.index
        for iothread in answers.iothreads:
            if iothread.thread_id in keys:
                self.qmp_iothreads[keys[iothread.thread_id]] = iothread.id
        if answers.cpus:
            listed = self.qmp_vcpus.keys() | self.qmp_iothreads.keys()
            self.qmp_others |= set(keys.values()).intersection(before) - listed
        self._answers = answers
        self._due_s = 0.0

    def recall(self, tasks: Sequence[Task]) -> Mapping[ThreadKey, Role] | None:
        """Return the roles of these threads; None where the sources may report something new.

        That is where a thread is new, or one that no source named may have shown what it is.
        """
        if time.clock_gettime(time.CLOCK_BOOTTIME) >= self._due_s:
            return None
        keys = [task.key for task in tasks]
        if keys != self._keys:
            try:
                self._recalled = {key: self._roles[key] for key in keys}
            except KeyError:
                return None
            self._keys = keys
        return self._recalled

    def learn(
        self, found: Mapping[ThreadKey, Role], tasks: Sequence[Task], boot: int
    ) -> Mapping[ThreadKey, Role]:
        """Take the roles that the sources gave these threads, and return the best known ones.

        With fewer than `boot` vCPUs among them, or a young one unnamed, recall asks again.
        """
        for key, new in found.items():
            old = self._roles.get(key)
            self._roles[key] = new if old is None else better(old, new)
        self._keys = [task.key for task in tasks]
        self._recalled = roles = {key: self._roles[key] for key in self._keys}
        born = [key.starttime for key, role in roles.items() if role.source in _UNNAMED]
        self._young_until_s = max(born, default=-math.inf) / _TICKS + YOUNG_S
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        vcpus = sum(role.role is ThreadRole.VCPU for role in roles.values())
        settled = now_s >= self._young_until_s and vcpus >= boot
        self._due_s = math.inf if not born else now_s + RELOOK_S if settled else 0.0
        return roles

    def prune(self) -> None:
        """Forget the threads that were not among the last ones asked for."""
        if self._keys is not self._pruned:
            self._pruned = self._keys
            alive = set(self._keys)
            for kept in (self._roles, self.qmp_vcpus, self.qmp_iothreads):
                for key in [key for key in kept if key not in alive]:
                    del kept[key]
            self.qmp_others &= alive

    def unsure(self, boot: int, maximum: int) -> bool:
        """Whether a young thread may yet show that it is a vCPU: of `maximum`, 0 for any number.

        While boot vCPUs are missing that may be any young thread that no source named; later only
        one younger than every vCPU, for vCPUs are hotplugged one after the other.
        """
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        if now_s >= self._young_until_s:
            return False
        vcpus = {key: role for key, role in self._roles.items() if role.vcpu is not None}
        guessed = any(role.source in _UNNAMED for role in vcpus.values())
        if 0 < maximum <= len(vcpus) and not guessed:
            return False
        newest = max(map(born, vcpus), default=(0, 0)) if len(vcpus) >= boot else (0, 0)
        return any(
            (key in vcpus or born(key) > newest) and now_s - key.starttime / _TICKS < YOUNG_S
            for key, role in self._roles.items()
            if role.source in _UNNAMED
        )


def better(old: Role, new: Role) -> Role:
    """Return what is known of a thread after a second examination."""
    if _RANK[new.source] < _RANK[old.source]:
        return new
    if new.source is not old.source:
        return old
    if (new.role, new.vcpu, new.apic_id) == (old.role, old.vcpu, old.apic_id):
        return new
    if old.conflict:
        return old
    conflict = f"{old.source} reported {_text(old)}, then {_text(new)}"
    return replace(old, conflict=conflict)


def born(key: ThreadKey) -> tuple[int, int]:
    """Sort key of creation."""
    return key.starttime, key.tid


def _text(role: Role) -> str:
    known = role.role is ThreadRole.VCPU and role.vcpu is not None
    return f"{role.role} {role.vcpu}" if known else role.role.value
