"""The tunables of `quiet: full`: where the kernel does its own work, idle states, governors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from kata_pin.daemon.live_config import LiveConfig
from kata_pin.daemon.quiet.files import TunableFiles
from kata_pin.daemon.quiet.tuner import Writer
from kata_pin.daemon.reconcile.slices import Slices
from kata_pin.host.quiet.power import read_idle_limit, read_policies
from kata_pin.host.quiet.queues import device_names, read_queues
from kata_pin.host.quiet.reading import cpu_list, mask
from kata_pin.host.quiet.threads import kernel_threads
from kata_pin.host.root import HostRoot
from kata_pin.host.topology import online
from kata_pin.model.quiet.node import FrequencyPolicy, Unknown
from kata_pin.model.quiet.tunables import (
    NO_CPU,
    Goal,
    Observed,
    PowerGoals,
    QuietClaim,
    QuietState,
    TunableKey,
    TunableKind,
)
from kata_pin.model.topology import HostTopology
from kata_pin.policy.quiet.full import full_goals
from kata_pin.policy.quiet.power import (
    idle_limits,
    idle_value,
    power_goals,
    power_problems,
    wanted_power,
)

_KINDS: Final = (
    *(TunableKind.WORKQUEUES, TunableKind.WATCHDOG, TunableKind.KERNEL_THREAD),
    *(TunableKind.RPS, TunableKind.XPS, TunableKind.IDLE_LIMIT, TunableKind.GOVERNOR),
)


class KernelWork:
    """See the module; a TunableSource of the keeper."""

    def __init__(self, root: HostRoot, live: LiveConfig) -> None:
        self._root = root
        self._live = live
        self._policies: dict[str, FrequencyPolicy] = {}
        self._devices: Sequence[str] = ()
        self._seen: Sequence[Observed] = ()
        self.kinds: Mapping[TunableKind, Writer] = dict.fromkeys(_KINDS, TunableFiles(root).write)

    def _power(self) -> Iterator[Observed]:
        for cpu in online(self._root):
            latency = read_idle_limit(self._root, cpu)
            if not isinstance(latency, Unknown):
                key = TunableKey(TunableKind.IDLE_LIMIT, str(cpu))
                yield Observed(key, "", latency, f"idle limit of pCPU {cpu}")
        self._policies = {one.name: one for one in read_policies(self._root)}
        for policy in self._policies.values():
            key = TunableKey(TunableKind.GOVERNOR, policy.name)
            label = f"governor of pCPUs {policy.cpus}"
            yield Observed(key, str(policy.cpus), policy.governor, label)

    async def observe(self, *, fresh: bool) -> Sequence[Observed]:
        """Return what there is now; what cannot be read is left out. Raises HostError.

        Unless it must be `fresh`, and while there are the same network devices, it is what was
        there at the last look: on a large node that takes thousands of reads.
        """
        root = self._root
        devices = device_names(root)
        if not fresh and devices == self._devices:
            return self._seen
        self._devices = devices
        found: list[Observed] = []
        slices = Slices()
        for part in (self._node(), self._queues(), self._threads(), self._power()):
            for one in part:
                found.append(one)
                await slices.breathe()
        self._seen = found
        return found

    def goals(
        self,
        topology: HostTopology,
        state: QuietState,
        claims: Sequence[QuietClaim],
        seen: Sequence[Observed],
    ) -> Mapping[TunableKey, Goal]:
        """Return how they must be; those without a goal are given back."""
        goals = full_goals(topology, state, seen)
        goals.update(power_goals(seen, self._wanted(state, claims), self._policies))
        return goals

    def problems(
        self, state: QuietState, claims: Iterable[QuietClaim], seen: Sequence[Observed]
    ) -> Iterator[tuple[str, str]]:
        """Yield by sandbox why its pCPUs do not have the idle states and frequency they should."""
        claims = tuple(claims)
        wanted, limits = self._wanted(state, claims), idle_limits(seen)
        for claim in claims:
            for why in power_problems(claim, limits, wanted, self._policies):
                yield claim.sandbox, why

    def _wanted(self, state: QuietState, claims: Iterable[QuietClaim]) -> PowerGoals:
        now = self._live.now
        return wanted_power(state, claims, idle_value(now.quiet_idle_us), now.quiet_governor)

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
