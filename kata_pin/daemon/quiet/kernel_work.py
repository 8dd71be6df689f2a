"""The tunables of `quiet: full`: where the kernel does its own work, idle states, governors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from errno import ENOENT, ESRCH
from typing import Final

from kata_pin.calls import TunableWrite
from kata_pin.daemon.live_config import LiveConfig
from kata_pin.daemon.quiet.tuner import Write, Writer, Written
from kata_pin.errors import ParseError
from kata_pin.host.quiet.power import read_policies, read_power
from kata_pin.host.quiet.queues import read_queues
from kata_pin.host.quiet.reading import cpu_list, mask
from kata_pin.host.quiet.threads import kernel_threads
from kata_pin.host.root import HostRoot
from kata_pin.host.topology import online
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.quiet.node import Unknown
from kata_pin.model.quiet.tunables import (
    NO_CPU,
    Goal,
    Observed,
    QuietState,
    TunableKey,
    TunableKind,
)
from kata_pin.model.topology import HostTopology
from kata_pin.policy.quiet.full import PowerGoals, full_goals, idle_value
from kata_pin.wire.kernel.masks import parse_mask, render_mask

PART: Final = 64
"""Writes after which the event loop gets a turn."""

_MASKS: Final = frozenset({TunableKind.WORKQUEUES, TunableKind.RPS, TunableKind.XPS})
_WORDS: Final = frozenset({TunableKind.IDLE_LIMIT, TunableKind.GOVERNOR})
_KINDS: Final = (
    *(TunableKind.WORKQUEUES, TunableKind.WATCHDOG, TunableKind.KERNEL_THREAD),
    *(TunableKind.RPS, TunableKind.XPS, TunableKind.IDLE_LIMIT, TunableKind.GOVERNOR),
)


class KernelWork:
    """See the module; a TunableSource of the keeper."""

    def __init__(self, root: HostRoot, live: LiveConfig) -> None:
        self._root = root
        self._live = live
        self._policies: dict[str, CpuSet] = {}
        self.kinds: Mapping[TunableKind, Writer] = dict.fromkeys(_KINDS, self._write)

    async def observe(self) -> Sequence[Observed]:
        """Return what there is now; what cannot be read is left out. Raises HostError."""
        root = self._root
        found = [*self._node(), *self._queues(), *self._threads()]
        await asyncio.sleep(0)
        for cpu in online(root):
            latency = read_power(root, cpu).latency
            if not isinstance(latency, Unknown):
                key = TunableKey(TunableKind.IDLE_LIMIT, str(cpu))
                found.append(Observed(key, "", latency, f"idle limit of pCPU {cpu}"))
        self._policies = {}
        wanted = self._live.now.quiet_governor
        for policy in read_policies(root):
            key = TunableKey(TunableKind.GOVERNOR, policy.name)
            label = f"governor of pCPUs {policy.cpus}"
            found.append(Observed(key, str(policy.cpus), policy.governor, label))
            if wanted in policy.available:
                self._policies[policy.name] = policy.cpus
        return found

    def goals(
        self, topology: HostTopology, state: QuietState, seen: Sequence[Observed]
    ) -> Mapping[TunableKey, Goal]:
        """Return how they must be; those without a goal are given back."""
        now = self._live.now
        power = PowerGoals(
            idle_value(now.quiet_idle_us),
            now.quiet_governor,
            self._policies,
        )
        return full_goals(topology, state, seen, power)

    def _node(self) -> Iterator[Observed]:
        work = mask(self._root.sys("devices/virtual/workqueue/cpumask"))
        if not isinstance(work, Unknown):
            key = TunableKey(TunableKind.WORKQUEUES)
            yield Observed(key, "", str(work), "mask of unbound workqueues")
        watched = cpu_list(self._root.proc("sys/kernel/watchdog_cpumask"))
        if not isinstance(watched, Unknown):
            key = TunableKey(TunableKind.WATCHDOG)
            yield Observed(key, "", str(watched), "mask of the lockup detectors")

    def _queues(self) -> Iterator[Observed]:
        queues = read_queues(self._root)
        for one in () if isinstance(queues, Unknown) else queues:
            key = TunableKey(TunableKind(one.kind), f"{one.device}/{one.name}")
            label = f"{one.kind}_cpus of {one.device} {one.name}"
            yield Observed(key, "", str(one.cpus) or NO_CPU, label)

    def _threads(self) -> Iterator[Observed]:
        threads = kernel_threads(self._root)
        for one in () if isinstance(threads, Unknown) else threads:
            key = TunableKey(TunableKind.KERNEL_THREAD, f"{one.tid}:{one.starttime}")
            label = f"affinity of {one.comm} (tid {one.tid})"
            yield Observed(key, "", str(one.affinity), label)

    async def _write(self, writes: Sequence[Write]) -> Sequence[Written]:
        root = self._root
        prefix = "" if root.live else root.path("").rstrip("/")
        done: list[Written] = []
        for at in range(0, len(writes), PART):
            part = [_request(one) for one in writes[at : at + PART]]
            for asked, answer in zip(part, root.calls.write_tunables(part, prefix), strict=True):
                gone = ENOENT if answer.errno == ESRCH else answer.errno
                done.append(Written(gone, _value(asked.kind, answer.value)))
            await asyncio.sleep(0)
        return done


def _request(one: Write) -> TunableWrite:
    """Return a write in the form that its file takes."""
    value = one.value
    if one.key.kind in _MASKS:
        value = render_mask(CpuSet() if value == NO_CPU else CpuSet.parse(value))
    return TunableWrite(one.key.kind.value, one.key.name, value)


def _value(kind: str, text: str) -> str | None:
    """Return what a file has, as `observe` has it; None for what makes no sense."""
    with contextlib.suppress(ParseError):
        if kind in _WORDS:
            return text
        cpus = parse_mask(text.encode(), kind) if kind in _MASKS else CpuSet.parse(text)
        return str(cpus) or NO_CPU
    return None
