"""Which containers claim which CPUs when a state is reconciled with what runs.

Claims come from the old state and, for containers without a grant, from the CPUs they are observed
on. A claim keeps others away until its container has been served. Lives for one reconcile.
Out of scope: serving (`pooled`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from kata_pin.model.alloc import AllocState, ContainerRequest, Grant, GrantKind, Running
from kata_pin.model.cpuset import EMPTY, CpuSet, union
from kata_pin.policy.alloc.demand import Demand


class Claims:
    """The claims of running containers; `pending` are those of containers not yet served."""

    def __init__(
        self,
        state: AllocState,
        running: Sequence[Running],
        rule: Callable[[ContainerRequest], Demand],
        vm_cpus: int,
    ) -> None:
        """`vm_cpus` is how many own CPUs a VM has in the cpuset beside its containers'."""
        self._state = state
        self._rule = rule
        self._vm_cpus = vm_cpus
        self._known = {one.request.container_id: one for one in running}
        self._claims: dict[str, CpuSet] = {}

    @property
    def pending(self) -> CpuSet:
        """All CPUs that are still claimed."""
        return union(self._claims.values())

    def within(self, free: CpuSet) -> Iterator[tuple[Running, CpuSet]]:
        """Yield each container with the CPUs to prefer for it.

        First containers with grants of own CPUs, in the order of the grants, then those observed on
        CPUs that suit them, then those that wait for CPUs, then the rest as listed. Containers of
        the shared pool come last, so that a VM keeps its own CPUs meanwhile. `free` are the CPUs
        that can be granted. A container's claim ends when the next one is yielded.
        """
        grants = self._state.grants.items()  # their own CPUs, even if those CPUs are gone
        self._claims = {name: grant.own for name, grant in grants if name in self._known}
        self._claims |= self._seen(free)
        others = [name for name in self._known if name not in self._claims]
        claims = dict(self._claims)
        for name in sorted(
            [*claims, *others], key=lambda one: (self._pooled(one), not claims.get(one))
        ):
            yield self._known[name], self._claims.get(name, EMPTY)
            self._claims.pop(name, None)

    def _pooled(self, name: str) -> bool:
        return self._rule(self._known[name].request).pooled

    def vms(self, free: CpuSet) -> Iterator[Grant]:
        """Yield the old grants of running VMs that still have own CPUs."""
        running = {one.request.pod.sandbox_id for one in self._known.values()}
        for name, grant in self._state.grants.items():
            if grant.kind is GrantKind.SANDBOX and name in running and grant.exclusive & free:
                yield replace(grant, exclusive=grant.exclusive & free)

    def _seen(self, free: CpuSet) -> dict[str, CpuSet]:
        """Return the CPUs that containers without a grant are observed on, if those suit them.

        All of them must be free, and as many as requested; a Kata container's cpuset can also
        contain its VM's and the housekeeping CPUs.
        """
        claims: dict[str, CpuSet] = {}
        for name, one in self._known.items():
            if name in self._claims or one.cpus is None:
                continue
            demand = self._rule(one.request)
            seen = one.cpus & free
            most = demand.whole + (self._vm_cpus if one.request.pod.kata else 0)
            if not demand.pooled and demand.whole <= len(seen) <= most:
                claims[name] = seen
        return claims


def differing(
    before: AllocState, after: AllocState, running: Sequence[Running]
) -> tuple[Grant, ...]:
    """Return the grants whose CPUs are not those that the container is observed on.

    If that is unknown, and for VMs: not those of the old grant.
    """
    had = {name: grant.cpus for name, grant in before.grants.items()}
    had |= {one.request.container_id: one.cpus for one in running if one.cpus is not None}
    return tuple(grant for name, grant in after.grants.items() if had.get(name) != grant.cpus)
