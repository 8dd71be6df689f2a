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
from functools import lru_cache
from typing import Final

from msgspec.structs import replace

from kata_pin.base.sandbox import Role, Task
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import RoleSource, ThreadRole
from kata_pin.peers.qemu import QmpAnswers

YOUNG_S: Final = 2.0
"""A thread younger than this may not yet do what it was made for: a vCPU enters KVM later."""

RELOOK_S: Final = 60.0  # how often threads that no source named are examined again

LIST_S: Final = 10.0
"""How often a VMM's descriptors may be listed: it can have thousands, and ever new threads."""

_NONE: Final[frozenset[ThreadKey]] = frozenset()
_TICKS: Final = os.sysconf("SC_CLK_TCK")
RANK: Final = {source: rank for rank, source in enumerate(RoleSource)}
"""The better a source, the lower."""

_UNNAMED: Final = frozenset({RoleSource.ORDER, RoleSource.REST})
_GUESSED: Final = _UNNAMED | {RoleSource.NAME}  # by the VMM's word, or by none


class RoleCache:
    """Roles by thread, and the QMP answers bound to the threads that they were about."""

    def __init__(self) -> None:
        self.qmp_vcpus: dict[ThreadKey, int] = {}
        """The cpu-index that QMP reported, by thread."""
        self.qmp_iothreads: dict[ThreadKey, str] = {}
        """The iothread id that QMP reported, by thread."""
        self.qmp_others: frozenset[ThreadKey] = _NONE
        """Threads that QMP did not report although they lived when it was asked: neither."""
        self._roles: dict[ThreadKey, Role] = {}
        self._asked_s: dict[ThreadKey, float] = {}
        """When the kernel was last asked about a thread, in seconds of CLOCK_BOOTTIME."""
        self._answers: QmpAnswers | None = None
        self._is_answered = False
        """Whether QMP has answered since the last examination."""
        self.keys: list[ThreadKey] = []
        """The threads that roles were last asked for."""
        self._pruned: list[ThreadKey] = self.keys
        self._due_s = 0.0
        self._young_until_s = 0.0
        self._list_s = 0.0
        self._look_s = 0.0
        """When the sources began to be asked, in seconds of CLOCK_BOOTTIME: recall had nothing."""

    def get(self, key: ThreadKey) -> Role | None:
        """Return a thread's role, None when it is not known."""
        return self._roles.get(key)

    def to_ask(self, tasks: Iterable[Task], *, missing: bool) -> list[Task]:
        """Return the threads about which the kernel may report something new; count them as asked.

        A thread that it named stays what it is. Others are asked about while they are young or boot
        vCPUs are missing, and where no source named them once more then, and now and then.
        """
        found = [task for task in tasks if self._is_open(task.key, self._look_s, missing=missing)]
        self._asked_s |= {task.key: self._look_s for task in found}
        return found

    def may_list(self) -> bool:
        """Whether it is time to list the VMM's descriptors; the next time is LIST_S later."""
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        if now_s < self._list_s:
            return False
        self._list_s = now_s + LIST_S
        return True

    def are_newborn(self, tasks: Iterable[Task]) -> bool:
        """Whether these are all young, in a process that was examined before."""
        since_s = time.clock_gettime(time.CLOCK_BOOTTIME) - YOUNG_S
        return bool(self._roles) and all(t.key.starttime / _TICKS > since_s for t in tasks)

    def settled(self, tasks: Iterable[Task]) -> Mapping[ThreadKey, Role]:
        """Return the roles of those threads of which the sources report nothing new after a birth.

        They are all but young ones; none where an older one is open too, or QMP has answered.
        """
        settled: dict[ThreadKey, Role] = {}
        if self._is_answered or not self._roles:
            return settled
        young_s = self._look_s - YOUNG_S
        for task in tasks:
            key, role = task.key, self._roles.get(task.key)
            if role is not None and (
                task.user_worker or not self._is_open(key, self._look_s, missing=False)
            ):
                settled[key] = role
            elif key.starttime / _TICKS <= young_s:
                return {}
        return settled

    def _is_open(self, key: ThreadKey, now_s: float, *, missing: bool) -> bool:
        role, asked_s = self._roles.get(key), self._asked_s.get(key)
        if role is None or asked_s is None or role.conflict:
            return True
        if role.source not in _GUESSED:
            return False
        grown_s = key.starttime / _TICKS + YOUNG_S
        if missing or now_s < grown_s:
            return True
        return role.source in _UNNAMED and (asked_s < grown_s or now_s - asked_s >= RELOOK_S)

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
        self._is_answered = True
        self._due_s = 0.0

    def recall(self, tasks: Sequence[Task]) -> Mapping[ThreadKey, Role] | None:
        """Return the roles of these threads; None where the sources may report something new.

        That is where a thread is new, or one that no source named may have shown what it is.
        """
        self._look_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        if self._look_s >= self._due_s:
            return None
        keys = [task.key for task in tasks]
        if keys != self.keys:
            if not all(key in self._roles for key in keys):
                return None
            self.keys = keys
        return self._asked_for()

    def learn(
        self, found: Mapping[ThreadKey, Role], tasks: Sequence[Task], boot: int
    ) -> Mapping[ThreadKey, Role]:
        """Take the roles that the sources gave these threads, and return the best known ones.

        With fewer than `boot` vCPUs among them, or a young one unnamed, recall asks again.
        """
        self._is_answered = False
        for key, new in found.items():
            old = self._roles.get(key)
            self._roles[key] = shared(new if old is None else better(old, new))
        self.keys = [task.key for task in tasks]
        roles = {key: self._roles[key] for key in self.keys}
        born = [key.starttime for key, role in roles.items() if role.source in _UNNAMED]
        self._young_until_s = max(born, default=-math.inf) / _TICKS + YOUNG_S
        now_s = self._look_s  # a thread that grew up during the look was asked while it was young
        vcpus = sum(role.role is ThreadRole.VCPU for role in roles.values())
        settled = now_s >= self._young_until_s and vcpus >= boot
        self._due_s = math.inf if not born else now_s + RELOOK_S if settled else 0.0
        return self._asked_for()

    def _asked_for(self) -> Mapping[ThreadKey, Role]:
        """The table itself, if it has no thread that ended since it was pruned."""
        if len(self._roles) == len(self.keys):
            return self._roles
        return {key: self._roles[key] for key in self.keys}

    def prune(self) -> None:
        """Forget the threads that were not among the last ones asked for."""
        if self.keys is not self._pruned:
            self._pruned = self.keys
            alive = set(self.keys)
            for kept in (self._roles, self._asked_s, self.qmp_vcpus, self.qmp_iothreads):
                for key in [key for key in kept if key not in alive]:
                    del kept[key]
            if self.qmp_others:
                self.qmp_others &= alive

    def may_grow(self, maximum: int) -> bool:
        """Whether there may be another vCPU than those that are known, of `maximum` (0: any)."""
        sources = [role.source for role in self._roles.values() if role.vcpu is not None]
        return not 0 < maximum <= len(sources) or not _UNNAMED.isdisjoint(sources)

    def unsure(self, boot: int, maximum: int) -> bool:
        """Whether a young thread may yet show that it is a vCPU: of `maximum`, 0 for any number.

        While boot vCPUs are missing that may be any young thread that no source named; later only
        one younger than every vCPU, for vCPUs are hotplugged one after the other.
        """
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        if now_s >= self._young_until_s:
            return False
        if not self.may_grow(maximum):
            return False
        vcpus = [key for key, role in self._roles.items() if role.vcpu is not None]
        newest = max(map(born, vcpus), default=(0, 0)) if len(vcpus) >= boot else (0, 0)
        return any(
            (key in vcpus or born(key) > newest) and now_s - key.starttime / _TICKS < YOUNG_S
            for key, role in self._roles.items()
            if role.source in _UNNAMED
        )


@lru_cache(maxsize=4096)
def shared(role: Role) -> Role:
    """Return one object for equal roles: many threads of many sandboxes have the same."""
    return role


def better(old: Role, new: Role) -> Role:
    """Return what is known of a thread after a second examination."""
    if RANK[new.source] < RANK[old.source]:
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
