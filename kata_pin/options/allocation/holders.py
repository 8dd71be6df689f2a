"""Who else gives out CPUs (D28), and on which NUMA nodes running VMs have their memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from kata_pin.base.allocation import AllocState, AtCreation, ContainerRequest, Holder, Refusal
from kata_pin.base.cpuset import EMPTY, CpuSet, union
from kata_pin.base.documents.answers import NodeEventKind
from kata_pin.base.errors import ParseError
from kata_pin.base.placement import Node
from kata_pin.base.sandbox import Container, Sandbox, Vmm
from kata_pin.base.values import HolderSource, RefusalKind
from kata_pin.engine.node import NodeWatch
from kata_pin.linux.cgroups import CgroupFiles
from kata_pin.linux.files import HostRoot
from kata_pin.options.allocation.ledger import Ledger
from kata_pin.options.allocation.policy import other_owner
from kata_pin.peers.nri.replies import Cpuset
from kata_pin.placement.exclusive import exclusive_claims
from kata_pin.placement.masks import counted, resolve_cpusets, sandbox_of
from kata_pin.records.containers import Registry

# Containers with exclusive CPUs that our allocator did not give them (D28).
#
# Their CPUs are not free for our allocator. What is known comes from
#
# 1. NRI: containers that another plugin gave a cpuset. While NRI is not connected the last ones
#    known stay, because nothing reports that they ended;
# 2. the records of containers without a grant, judged as for pins (placement/exclusive.py): by
#    the kubelet's checkpoint, the administrator's settings, or inference. A pass replaces a
#    sandbox's records by what it believes of them;
# 3. entries of the kubelet's checkpoint (policy static), and DRA claims, of containers that have no
#    record.
#
# Records are read again only if the registry has changed. Lifetime: the allocator's.


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
                self.believed(
                    resolve_cpusets(records, kubelet=node.kubelet, configured=CpuSet()), node
                )


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
    for container, claim in zip(every, exclusive_claims(every, node, sandbox.handler), strict=True):
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


# Where the memory of running VMs is, for choosing CPUs near it.
#
# It is looked at when a running container's CPUs are about to change, from the counters of the
# VMM's cgroup, which cost a few small reads. Lifetime: the daemon's.


class MemoryHomes(Struct, frozen=True):
    """Knows the VMM of a sandbox, None while there is none."""

    root: HostRoot
    node: NodeWatch
    vmm: Callable[[str], Vmm | None]

    def seen(self, state: AllocState, request: ContainerRequest) -> AllocState:
        """Return a state that knows where the memory of this request's VM is now."""
        sandbox_id = sandbox_of(request.pod)
        vmm = self.vmm(sandbox_id) if sandbox_id else None
        nodes = self.node.current().topology.nodes
        if vmm is None or len(nodes) < 2:
            return state
        home = nodes.get(_home(self.root, vmm.process.pid), EMPTY)
        known = {one: cpus for one, cpus in state.memory.items() if one in state.grants}
        return replace(state, memory={**known, request.pod.sandbox_id: home})


def _home(root: HostRoot, pid: int) -> int:
    """Return the node with more than half of what a process's own cgroup counts, -1 without one."""
    files, huge = CgroupFiles(root, "memory"), CgroupFiles(root, "hugetlb")
    for folder in files.folders(pid, pid) or ():
        with suppress(OSError, ParseError):
            sizes = {
                node: one.total
                for node, one in files.memory(folder, os.sysconf("SC_PAGE_SIZE")).items()
            }
            for node, one in huge.huge_pages(huge.folders(pid, pid) or (), folder).items():
                sizes[node] = sizes.get(node, 0) + one.total
            node = max(sizes, key=lambda one: sizes[one], default=-1)
            return node if node >= 0 and 2 * sizes[node] > sum(sizes.values()) else -1
    return -1


# Whether another NRI plugin sets cpusets on this node, judged by what becomes of containers (D14).
#
# NRI names no other plugin before its version 0.10. One that is asked before kata-pin shows itself
# by the cpusets that containers come with. One that is asked after it makes a creation fail that we
# adjusted: the next try is left alone, and only if that one succeeds, with a cpuset, was it a
# conflict. A creation that fails either way (a bad mount, no space) is no evidence, nor is one that
# succeeds without a cpuset where that was all we set: no other plugin has set one. What else
# another plugin sets cannot be seen before NRI 0.10, so a success without our other fields is a
# conflict of that container only, and suspends nothing.
#
# Users who create pods must not be able to switch the allocator off: one pod counts once, pods of
# only one namespace are no conflict, and all evidence expires.
#
# Lifetime: the daemon's; nothing of it survives a restart.

K = TypeVar("K")

PODS: Final = 3
"""How many pods in a row have to show another plugin before the allocator is suspended."""

NAMESPACES: Final = 2
"""Minimum number of namespaces with conflicts before a later plugin is assumed."""

EXPIRY_S: Final = 600.0
"""How long evidence counts, and how long a container whose creation failed is left alone."""

REMEMBERED: Final = 256
"""Most entries of each kind."""

CPUSET: Final = "cpuset"

BEFORE: Final = "one that is asked before kata-pin"
BEHIND: Final = "one that is asked after kata-pin, and sets the same"
SUSPECTED: Final = (
    "its creation failed after kata-pin set its resources: another NRI plugin may set the same"
)


class Name(NamedTuple):
    """What identifies a container across the tries to create it."""

    pod_uid: str
    namespace: str
    container: str

    @classmethod
    def of(cls, request: ContainerRequest) -> Name:
        """Return the name of a requested container."""
        return cls(request.pod.pod_uid, request.pod.namespace, request.name)


class PluginConflicts:
    """Records creations, and says which containers to leave alone."""

    def __init__(self, report: Callable[..., None], clock: Callable[[], float]) -> None:
        """`report` takes what is found, as that of NodeEvents; `clock` is monotonic, in seconds."""
        self._report = report
        self._clock = clock
        self._given: dict[str, tuple[float, str]] = {}
        self._conflicts: dict[str, tuple[float, str]] = {}
        self._failed: dict[Name, tuple[float, str]] = {}
        self._open: dict[str, tuple[Name, str]] = {}

    @property
    def present(self) -> tuple[str, ...]:
        """The other plugins that are known of, each by its place in NRI's order."""
        before = (BEFORE,) if self.given >= PODS else ()
        return (*before, *((BEHIND,) if self._behind else ()))

    @property
    def given(self) -> int:
        """How many pods came with cpusets lately, since the last one without."""
        return len(self._recent(self._given))

    @property
    def conflicts(self) -> int:
        """How many pods could only be created without our cpuset lately, since the last success."""
        return len(self._recent(self._conflicts))

    @property
    def _behind(self) -> bool:
        found = self._recent(self._conflicts)
        return len(found) >= PODS and len(set(found.values())) >= NAMESPACES

    def leaves_alone(self, request: ContainerRequest) -> bool:
        """Whether a container is not to be adjusted, because its creation might fail then."""
        return self._behind or Name.of(request) in self._recent(self._failed)

    def owner(self, request: ContainerRequest, *, foreign: bool) -> Refusal | None:
        """Return why a new container is left to another plugin, None if it is not.

        `foreign`: it came with a cpuset.
        """
        if foreign:
            return other_owner(None, (BEFORE,))
        if not self.leaves_alone(request):
            return None
        known = other_owner(None, self.present)
        return known or Refusal(RefusalKind.FOREIGN_PLUGIN, SUSPECTED)

    def arrived(self, request: ContainerRequest, *, with_cpuset: bool) -> None:
        """Record a new container, before it is adjusted."""
        if with_cpuset:
            self._note(self._given, request.pod.pod_uid, request.pod.namespace)
        else:
            self._given.clear()

    def answered(self, request: ContainerRequest, fields: str) -> None:
        """Record our answer to a creation: `created` or `ended` follows.

        `fields` are what we set, in words; empty: nothing.
        """
        name = Name.of(request)
        if fields or name in self._recent(self._failed):
            self._open[request.container_id] = name, fields

    def created(self, container_id: str, *, with_cpuset: bool) -> None:
        """Record that a creation has succeeded."""
        name, fields = self._open.pop(container_id, (None, ""))
        if name is None:
            return
        refused = self._recent(self._failed).get(name, CPUSET)
        if fields:
            self._conflicts.clear()
        if fields or (refused == CPUSET and not with_cpuset):
            self._failed.pop(name, None)
            return
        self._note(self._failed, name, refused)
        if with_cpuset:
            self._note(self._conflicts, name.pod_uid, name.namespace)
            text = "container %s was created with the cpuset of another NRI plugin, after its "
            text += "creation had failed with kata-pin's %s"
        else:
            text = "container %s was created without kata-pin's %s, after its creation had failed "
            text += "with it: another NRI plugin may set the same"
        self._report(NodeEventKind.PLUGIN_CONFLICT, f"allocator: {text}", container_id, refused)

    def ended(self, container_id: str) -> None:
        """Record the end of a container: its creation failed unless `created` came before."""
        name, fields = self._open.pop(container_id, (None, ""))
        if name is None:
            return
        if not fields:  # so what we set was not the reason
            self._failed.pop(name, None)
            return
        self._report(
            NodeEventKind.PLUGIN_CONFLICT,
            "allocator: creation of container %s failed after kata-pin set its %s; the next try is "
            "left alone",
            container_id,
            fields,
        )
        self._note(self._failed, name, fields)

    def reconnected(self) -> None:
        """Forget conflicts and unfinished creations; failed containers are left alone still."""
        self._conflicts.clear()
        self._open.clear()

    def _note(self, entries: dict[K, tuple[float, str]], key: K, text: str) -> None:
        entries.pop(key, None)
        entries[key] = self._clock(), text
        while len(entries) > REMEMBERED:
            del entries[next(iter(entries))]

    def _recent(self, entries: dict[K, tuple[float, str]]) -> dict[K, str]:
        """Return the entries that have not expired: namespaces, and of failures what was set."""
        since = self._clock() - EXPIRY_S
        return {key: text for key, (at, text) in entries.items() if at > since}


def set_fields(adjust: Cpuset, creation: AtCreation) -> str:
    """Return what an answer to a creation sets, in words; empty if nothing."""
    limits = adjust.limits
    fields = {
        CPUSET: adjust.confines,
        "CPU shares": limits.shares is not None,
        "CPU quota": limits.quota_us is not None,
        "CPU period": limits.period_us is not None,
        "memory limit": limits.memory is not None,
        "hugepage limits": creation.hugepages,
        "RDT class": creation.rdt_class,
        "block-I/O class": creation.blockio_class,
        "environment": creation.env,
        "mounts": creation.mounts,
        "devices": creation.devices,
        "annotations": creation.annotations,
    }
    return ", ".join(name for name, value in fields.items() if value)
