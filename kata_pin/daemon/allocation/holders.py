"""Containers with exclusive CPUs that our allocator did not give them (D28).

Their CPUs are not free for our allocator. What is known comes from

1. NRI: containers that another plugin gave a cpuset. While NRI is not connected the last ones known
   stay, because nothing reports that they ended;
2. the records of containers without a grant, judged as for pins (policy/placement/exclusive.py): by
   the kubelet's checkpoint, the administrator's settings, or inference. A pass replaces a
   sandbox's records by what it believes of them;
3. entries of the kubelet's checkpoint (policy static), and DRA claims, of containers that have no
   record.

Records are read again only if the registry has changed. Lifetime: the allocator's. Out of scope:
what follows for grants (allocator.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kata_pin.daemon.allocation.ledger import Ledger
from kata_pin.daemon.store.containers import Registry
from kata_pin.model.alloc import AllocState, Holder, HolderSource
from kata_pin.model.cpuset import CpuSet, union
from kata_pin.model.node import Node
from kata_pin.model.sandbox import Container, Sandbox
from kata_pin.policy.placement.exclusive import claims
from kata_pin.policy.placement.mask import counted
from kata_pin.policy.placement.precedence import settled


class Holders:
    """Knows them; used in the event loop's thread only."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._facts: object = None
        self._version = -1
        self._records: dict[str, Sequence[Container]] = {}
        self._recorded: dict[str, tuple[Holder, ...]] = {}
        self._plugins: tuple[Holder, ...] = ()

    def believed(self, containers: Sequence[Container], node: Node) -> None:
        """Take one sandbox's containers with the cpusets that its pass uses."""
        if containers:
            sandbox_id = containers[0].sandbox_id
            self._recorded[sandbox_id] = tuple(_recorded(sandbox_id, containers, node))

    def current(self, node: Node, state: AllocState, ledger: Ledger) -> tuple[Holder, ...]:
        """Return them as of now, those of NRI first; each container once."""
        self._refresh(node)
        if ledger.is_connected:
            self._plugins = tuple(_left_alone(ledger))
        ours: set[str] = set()
        if node.kubelet is None or not node.kubelet.static:  # else it decides about all of them
            ours = {*state.grants, *(request.container_id for request, _, _ in ledger.requests())}
        found = {one.container_id: one for one in self._plugins if one.container_id not in ours}
        for holders in self._recorded.values():
            for one in holders:
                if one.container_id not in ours:
                    found.setdefault(one.container_id, one)
        return (*found.values(), *_unrecorded(node, union(one.cpus for one in found.values())))

    def _refresh(self, node: Node) -> None:
        """Judge again the records of sandboxes that have changed, all if the node has."""
        facts = node.kubelet, node.claims, node.settings
        if facts != self._facts:
            self._facts, self._version, self._records = facts, -1, {}
        if self._version == self._registry.version:
            return
        self._version = self._registry.version
        every = self._registry.sandboxes()
        for sandbox_id in [*(self._recorded.keys() - every)]:
            self._recorded.pop(sandbox_id)
            self._records.pop(sandbox_id, None)
        for sandbox_id in every:
            records = self._registry.containers(sandbox_id)
            if self._records.get(sandbox_id) is not records:
                self._records[sandbox_id] = records
                self.believed(settled(records, kubelet=node.kubelet, configured=CpuSet()), node)


def _left_alone(ledger: Ledger) -> Iterator[Holder]:
    for request, cpus in ledger.others():
        reason = f"another NRI plugin gave it cpuset {cpus}"
        yield Holder(
            request.container_id,
            request.pod.title,
            request.name,
            cpus,
            HolderSource.PLUGIN,
            reason,
        )


def _recorded(sandbox_id: str, containers: Sequence[Container], node: Node) -> Iterator[Holder]:
    sandbox = Sandbox(sandbox_id, tuple(containers))
    every = counted(sandbox, node)
    for container, claim in zip(every, claims(every, node, sandbox.handler), strict=True):
        if claim.exclusive:
            source = HolderSource(claim.provenance.value)
            yield Holder(
                container.id, sandbox.pod, container.title, claim.exclusive, source, claim.reason
            )


def _unrecorded(node: Node, known: CpuSet) -> Iterator[Holder]:
    """Yield what claims and the checkpoint give to containers of which nothing else is known."""
    for uid, cpus in node.claims.items():
        if rest := cpus - known:
            known |= rest
            reason = "its CDI spec has it"
            yield Holder(f"claim/{uid}", f"claim {uid}", "", rest, HolderSource.CLAIM, reason)
    kubelet = node.kubelet
    if kubelet is None or not kubelet.static:
        return
    entries = [
        (uid, name, cpus) for uid, of in kubelet.entries.items() for name, cpus in of.items()
    ]
    entries += [(uid, "", cpus) for uid, cpus in kubelet.pod_entries.items()]
    for uid, name, cpus in entries:
        if rest := cpus - known:
            known |= rest
            reason = "the kubelet's checkpoint has it"
            yield Holder(f"{uid}/{name}", uid, name, rest, HolderSource.KUBELET, reason)
