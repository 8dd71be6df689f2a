"""From the daemon's documents to the node's objects in the cluster and to Events on pods."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Final

from kata_pin.base.cpuset import CpuSet, named_pcpus, union
from kata_pin.base.documents.measured import WatchDocument
from kata_pin.base.documents.state import Sandbox, State
from kata_pin.base.values import Mode, count
from kata_pin.options.cluster.values import (
    MAX_CPUS,
    MAX_NODES,
    MAX_POD_CPUS,
    MAX_PODS,
    MAX_TEXT,
    MAX_VIOLATIONS,
    Condition,
    FreeCpus,
    FreeSource,
    NodeStatus,
    PodEvent,
    PodPlacement,
    Violation,
    Zone,
)

_TIME: Final = "%Y-%m-%dT%H:%M:%SZ"
"""Times of documents."""

NOTE: Final = 1024
"""Longest note of an Event (events.k8s.io/v1), in bytes."""

BROKEN: Final = {"conflict": 0, "drift": 1, "no-vmm": 2, "unpinned": 3, "released": 4}
"""States of sandboxes, worst first; others are ok."""

_STATIC: Final = "static"

NOTHING_KNOWN: Final = NodeStatus(
    version="",
    mode="",
    online="",
    exclusive="",
    exclusive_count=0,
    free=(),
    free_by_node="",
    free_source="unclaimed",
    sandboxes=0,
    sandboxes_ok=0,
    pods=(),
    pods_omitted=0,
    violations=0,
    violation_list=(),
    last_audit=None,
    conditions=(),
)
"""The status of a node whose daemon never answered."""


def node_status(state: State, watch: WatchDocument | None) -> NodeStatus:
    """Return the status of the node's object; `watch` is None where the daemon has none.

    `conditions` has `Ready` without a time; the caller knows when it changed.
    """
    exclusive, free, source = _cpus(state)
    by_node = tuple(_by_node(state, free))
    found = [*_violations(state.sandboxes), *_foreign(watch)]
    worst = sorted(state.sandboxes, key=lambda one: (BROKEN.get(one.state, 9), one.pod, one.id))
    checked = [one.checked_s for one in state.sandboxes]
    return NodeStatus(
        version=clip(state.daemon.version),
        mode="act" if state.node.mode == Mode.ACT else "observe",
        online=_listed(CpuSet.parse(state.node.online)),
        exclusive=_listed(exclusive),
        exclusive_count=len(exclusive),
        free=by_node,
        free_by_node=" ".join(f"{one.node}:{one.count}" for one in by_node),
        free_source=source,
        sandboxes=len(state.sandboxes),
        sandboxes_ok=sum(one.state == "ok" for one in state.sandboxes),
        pods=tuple(map(_pod, worst[:MAX_PODS])),
        pods_omitted=max(0, len(worst) - MAX_PODS),
        violations=len(found),
        violation_list=tuple(found[:MAX_VIOLATIONS]),
        last_audit=_last_audit(state.time, checked),
        conditions=(ready(state),),
    )


def ready(state: State) -> Condition:
    """Return the condition of a node whose daemon answered, without the time of its change."""
    nri = state.daemon.nri
    unchecked = sum(one.checked_s is None for one in state.sandboxes)
    if unchecked:
        said = f"{count(unchecked, 'sandbox', 'sandboxes')} not checked yet"
        return Condition("Ready", "False", "FirstPass", said, "")
    if nri is not None and nri.connected_s is None:
        said = clip(f"not connected to the container runtime's NRI: {nri.problem}")
        return Condition("Ready", "False", "NotConnectedToRuntime", said, "")
    return Condition("Ready", "True", "Serving", "every sandbox was checked", "")


def _cpus(state: State) -> tuple[CpuSet, CpuSet, FreeSource]:
    """Return the node's exclusive pCPUs, its free ones, and what these are."""
    online = CpuSet.parse(state.node.online)
    exclusive = union(CpuSet.parse(one.exclusive) for one in state.sandboxes)
    exclusive = exclusive | CpuSet.parse(state.node.assigned)
    kubelet, allocation = state.node.kubelet, state.allocation
    if allocation is not None and not allocation.suspended:
        pools = allocation.pools
        exclusive = exclusive | CpuSet.parse(pools.exclusive) | CpuSet.parse(pools.taken)
        return exclusive, (CpuSet.parse(pools.shared) & online) - exclusive, "allocator"
    if kubelet is not None and kubelet.policy == _STATIC:
        default = CpuSet.parse(kubelet.default)
        return exclusive, (default & online) - exclusive, "kubelet"
    return exclusive, online - exclusive, "unclaimed"


def _by_node(state: State, free: CpuSet) -> Iterator[FreeCpus]:
    for node, cpus in islice(_nodes(state), MAX_NODES):
        yield FreeCpus(node, len(cpus & free), _listed(cpus & free))


def _nodes(state: State) -> Iterator[tuple[int, CpuSet]]:
    """Yield each NUMA node with its pCPUs."""
    nodes: dict[int, list[int]] = {}
    for place in state.node.cpus:
        nodes.setdefault(place.node, []).append(place.cpu)
    for node in sorted(nodes):
        yield node, CpuSet(nodes[node])


def _pod(sandbox: Sandbox) -> PodPlacement:
    return PodPlacement(
        pod=clip(sandbox.pod),
        sandbox=clip(sandbox.id),
        state=sandbox.state,
        exclusive=_listed(CpuSet.parse(sandbox.exclusive), MAX_POD_CPUS),
        shared=_listed(CpuSet.parse(sandbox.shared), MAX_POD_CPUS),
    )


def _violations(sandboxes: Sequence[Sandbox]) -> Iterator[Violation]:
    for kind in ("conflict", "drift", "no-vmm"):
        for one in sandboxes:
            if one.state == kind:
                yield Violation(kind, clip(one.pod), clip(one.id), clip(_problem(one)))


def _problem(sandbox: Sandbox) -> str:
    match sandbox.state:
        case "conflict":
            notes = (one.text for one in sandbox.notes if one.code == "conflict-exclusive")
            return next(notes, "an exclusive pCPU is shared")
        case "drift":
            moved = sum(one.state == "drift" for one in sandbox.threads)
            which = count(moved, "thread is", "threads are")
            return f"{which} not on the expected pCPUs"
        case _:
            return sandbox.vmm_problem or "no VMM process was found"


def _foreign(watch: WatchDocument | None) -> Iterator[Violation]:
    """Yield one violation per sandbox that has foreign tasks on its exclusive pCPUs now."""
    found: dict[tuple[str, str], list[int]] = {}
    for one in () if watch is None else watch.pcpus:
        if one.episode_s is not None:
            found.setdefault((one.sandbox, one.pod), []).append(one.cpu)
    for (sandbox, pod), cpus in found.items():
        text = f"foreign tasks run on exclusive {named_pcpus(CpuSet(cpus))}"
        yield Violation("foreign-tasks", clip(pod), clip(sandbox), clip(text))


# ---- Events ----------------------------------------------------------------------------------


def pod_events(state: State, watch: WatchDocument | None, *, since: float) -> tuple[PodEvent, ...]:
    """Return what is to be reported on pods now, at most one per kind and sandbox.

    Refused allocations count from the Unix time `since` on; other kinds hold now.
    """
    pods = {one.id: one for one in state.sandboxes}
    found: dict[tuple[str, str], PodEvent] = {}
    for one in (*_violations(state.sandboxes), *_foreign(watch)):
        known = pods.get(one.sandbox)
        if known is None or one.kind not in _REASONS:
            continue
        reason, action, remedy = _REASONS[one.kind]
        event = PodEvent(
            reason, one.sandbox, known.pod, known.pod_uid, _note(one.message, remedy), action
        )
        found.setdefault((event.kind, event.sandbox), event)
    for refused in () if state.allocation is None else state.allocation.refused:
        if _unix(refused.time) < since:
            continue
        text = f"{refused.container}: {refused.message}"
        remedy = "the container was not created" if refused.strict else "it runs in the shared pool"
        event = PodEvent(
            "CPUAllocationRefused", refused.id, refused.pod, refused.pod_uid,
            _note(text, remedy), "AllocatingCPUs",
        )  # fmt: skip
        found[event.kind, event.sandbox] = event
    return tuple(one for one in found.values() if _names_a_pod(one))


_REASONS: Final = {
    "conflict": (
        "ExclusiveCPUConflict",
        "PlacingThreads",
        "kata-pin moves neither pod; give one of the two other CPUs",
    ),
    "foreign-tasks": (
        "CPUIsolationBroken",
        "WatchingCPUs",
        "kubectl kata-pin prove names the tasks",
    ),
}
"""Reason, action and advice of the Events of violations."""


def _names_a_pod(event: PodEvent) -> bool:
    namespace, slash, name = event.pod.partition("/")
    return bool(slash and namespace not in {"", "-"} and name and event.pod_uid)


def _note(text: str, remedy: str) -> str:
    said, most = clip(text, NOTE).encode(), NOTE - len(remedy) - 2
    if len(said) > most:
        said = said[: most - 3].rstrip(b".") + b"..."
    return f"{said.decode(errors='ignore')}; {remedy}"


# ---- texts -----------------------------------------------------------------------------------


def clip(text: str, limit: int = MAX_TEXT) -> str:
    """Return a text of at most so many characters, each of which UTF-8 has."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _listed(cpus: CpuSet, limit: int = MAX_CPUS) -> str:
    """Return a cpu list that the object may hold: whole ranges only, perhaps not all of them."""
    text = str(cpus)
    return text if len(text) <= limit else text[:limit].rpartition(",")[0]


def _unix(text: str) -> float:
    """Return a time of a document as seconds since 1970; 0 if it is none."""
    try:
        return datetime.strptime(text, _TIME).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return 0.0


def _last_audit(now: str, checked: Sequence[float | None]) -> str | None:
    """Return when the sandbox that was checked longest ago was checked; None: one never was."""
    ages = [one for one in checked if one is not None]
    if len(ages) < len(checked):
        return None
    when = datetime.fromtimestamp(_unix(now) - max(ages, default=0.0), tz=UTC)
    return when.strftime(_TIME)


# From the daemon's state to the zones of a NodeResourceTopology object.


def topology_zones(state: State) -> tuple[Zone, ...]:
    """Return the NUMA nodes with the pCPUs that our allocator may give; empty where it does not.

    Who else allocates (the kubelet) has writers of such objects of its own.
    """
    allocation = state.allocation
    if allocation is None or allocation.suspended:
        return ()
    pools, online = allocation.pools, CpuSet.parse(state.node.online)
    allocatable = online - CpuSet.parse(pools.reserved)
    available = (allocatable & CpuSet.parse(pools.shared)) - CpuSet.parse(pools.exclusive)
    return tuple(
        Zone(node, len(cpus & online), len(cpus & allocatable), len(cpus & available))
        for node, cpus in _nodes(state)
    )
