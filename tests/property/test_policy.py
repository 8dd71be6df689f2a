"""Laws of placement, plan and drift over arbitrary sandboxes, hosts and settings."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from random import Random

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kata_pin.base.cpuset import EMPTY, CpuSet, HostTopology, union
from kata_pin.base.placement import Node, Placement
from kata_pin.base.sandbox import Container, GuestTopology, Role, Sandbox, Thread
from kata_pin.base.settings import (
    ExclusiveMode,
    Overhead,
    OverheadKind,
    PlacementSettings,
    VcpuMode,
)
from kata_pin.base.values import ContainerState, RoleSource, ThreadRole
from kata_pin.placement.drift import find_drift, is_narrower, make_plan
from kata_pin.placement.explain import explain
from kata_pin.placement.place import are_placed_alike, pairs
from tests.support.at_once import place
from tests.support.world import (
    after,
    exclusive,
    flat,
    kubelet,
    pause,
    repinned,
    sandbox,
    shared,
    smt_host,
    task,
    vcpus,
    without,
)

HOST_CPUS = 16

many = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])

sets = st.frozensets(st.integers(0, HOST_CPUS - 1), max_size=8).map(CpuSet)
some = sets.filter(bool)


@dataclass(frozen=True)
class World:
    """Everything that one placement depends on."""

    pod: Sandbox
    threads: list[Thread]
    node: Node

    def place(self, **kwargs: object) -> Placement:
        """Place with these keyword arguments."""
        return place(self.pod, self.threads, self.node, **kwargs)  # type: ignore[arg-type]


@st.composite
def hosts(draw: st.DrawFn) -> HostTopology:
    """Draw a host with or without SMT, with offline and isolated CPUs."""
    host = draw(st.sampled_from([flat(HOST_CPUS), smt_host()]))
    offline = draw(st.one_of(st.just(EMPTY), sets))
    isolated = draw(st.one_of(st.just(EMPTY), sets))
    return replace(without(host, str(offline)), isolated=isolated)


@st.composite
def pods(draw: st.DrawFn) -> Sandbox:
    """Draw up to five containers, some exclusive, some stopped, some without a cpuset."""
    containers: list[Container] = []
    if draw(st.booleans()):
        containers.append(pause(draw(st.one_of(st.none(), sets.map(str)))))
    for number in range(draw(st.integers(0, 4))):
        name = f"c{number}"
        kind = draw(st.integers(0, 3))
        one = shared(name, None) if kind == 0 else shared(name, str(draw(sets)))
        if kind > 1:
            one = exclusive(name, str(draw(some)))
        if draw(st.integers(0, 5)) == 0:
            one = replace(one, state=ContainerState.STOPPED)
        containers.append(one)
    guest = GuestTopology(
        threads=draw(st.sampled_from([1, 1, 2, 4])),
        numa=draw(st.dictionaries(st.integers(0, 15), st.integers(0, 1), max_size=8)),
        host_nodes=draw(
            st.dictionaries(
                st.integers(0, 1), st.sampled_from([CpuSet([0]), CpuSet([1]), CpuSet([0, 1])])
            )
        ),
    )
    return sandbox(*containers, guest=guest)


overheads = st.one_of(
    st.sampled_from([Overhead(kind) for kind in OverheadKind if kind not in {"reserve", "cpus"}]),
    st.integers(0, 5).map(lambda k: Overhead(OverheadKind.RESERVE, reserve=k)),
    sets.map(lambda cpus: Overhead(OverheadKind.CPUS, cpus=cpus)),
)


@st.composite
def nodes(draw: st.DrawFn) -> Node:
    """Draw settings and facts of a node."""
    return Node(
        topology=draw(hosts()),
        settings=PlacementSettings(
            vcpus=draw(st.sampled_from([VcpuMode.PAIR, VcpuMode.PAIR, *VcpuMode])),
            overhead=draw(overheads),
            overhead_roles=draw(
                st.dictionaries(st.sampled_from(list(ThreadRole)), overheads, max_size=2)
            ),
            exclusive=draw(st.sampled_from(list(ExclusiveMode))),
            housekeeping=draw(sets),
            stopped_counts=draw(st.booleans()),
        ),
        kubelet=draw(st.sampled_from([None, None, kubelet(), kubelet({"c0": "4-7"}, pod="8-11")])),
        release_mask=draw(sets),
        live_threads=draw(st.booleans()),
    )


@st.composite
def roles(draw: st.DrawFn) -> Role:
    """Draw a role; half are vCPUs, some of unknown index, some disputed."""
    kind = draw(st.sampled_from([*ThreadRole, *[ThreadRole.VCPU] * 6]))
    index = draw(st.one_of(st.none(), st.integers(0, 15))) if kind is ThreadRole.VCPU else None
    conflict = "two sources" if draw(st.integers(0, 9)) == 0 else ""
    return Role(kind, RoleSource.QMP, vcpu=index, conflict=conflict)


@st.composite
def thread_lists(draw: st.DrawFn) -> list[Thread]:
    """Draw threads with arbitrary masks and cpusets, the main thread among them."""
    threads: list[Thread] = []
    for number in range(draw(st.integers(0, 14))):
        seen = task(
            1000 + number,
            on=str(draw(some)),
            cpuset=str(draw(st.one_of(st.just(CpuSet(range(HOST_CPUS))), sets))),
        )
        threads.append(Thread(seen, draw(roles())))
    return threads


worlds = st.builds(World, pods(), thread_lists(), nodes())


@many
@given(worlds)
def test_applied_is_what_the_kernel_can_do(world: World) -> None:
    """Applied ⊆ cpuset ∩ online unless that is empty, and never empty while a CPU is online."""
    online = world.node.topology.online
    found = world.place()
    for one in world.threads:
        desired = found.desired.get(one.key)
        if desired is None:
            continue
        allowed = one.task.cpuset & online or online
        assert desired.applied <= allowed
        assert desired.applied or not online
        assert desired.step or desired.applied <= desired.wanted


@many
@given(worlds)
def test_pairs_are_disjoint_and_inside_their_container(world: World) -> None:
    """No pCPU is paired twice, and a pair is made of its own container's exclusive CPUs."""
    found = world.place()
    own = {claim.container_id: claim.exclusive for claim in found.mask.claims}
    taken = EMPTY
    for desired in found.desired.values():
        if desired.paired:
            assert desired.applied.isdisjoint(taken)
            assert desired.applied <= own[desired.container_id]
            taken |= desired.applied
    extra = found.mask.overhead_extra
    assert taken.isdisjoint(extra)


@many
@given(worlds)
def test_mask_is_split_into_its_parts(world: World) -> None:
    """Exclusive and shared split the mask, the pause container's extra is beside it."""
    mask = world.place().mask
    if mask.mask is None:
        assert not mask.exclusive | mask.shared | mask.overhead_extra
    else:
        assert mask.exclusive | mask.shared == mask.mask
        assert mask.exclusive.isdisjoint(mask.shared)
        assert mask.overhead_extra.isdisjoint(mask.mask)
        assert union(claim.exclusive for claim in mask.claims) == mask.exclusive


@many
@given(worlds)
def test_the_plan_leaves_no_drift(world: World) -> None:
    """Applying the plan leaves nothing to do, and it touches only what drifts or is narrower."""
    found = world.place()
    plan = make_plan(found, world.threads)
    targets = {action.key: action.target for action in plan}
    assert all(action.before != action.target for action in plan)
    now = [
        one._replace(task=repinned(one.task, targets.get(one.key, one.task.affinity)))
        for one in world.threads
    ]
    if world.node.topology.online:
        assert find_drift(found, now) == ()
        assert make_plan(found, now) == ()
    drifting = {drift.key for drift in find_drift(found, world.threads)}
    narrower = {
        task.key
        for task, _role in world.threads
        if task.key in targets and is_narrower(task, found.desired[task.key])
    }
    assert drifting == targets.keys() - narrower or not world.node.topology.online


@many
@given(worlds, st.randoms(use_true_random=False))
def test_order_of_threads_does_not_matter(world: World, random: Random) -> None:
    """The placement of shuffled, doubled threads is the same, notes included."""
    shuffled = [*world.threads, *world.threads[:2]]
    random.shuffle(shuffled)
    assert dataclasses.replace(world, threads=shuffled).place() == world.place()


@many
@given(worlds)
def test_unchanged_input_changes_nothing(world: World) -> None:
    """Once a placement stands, the next pass decides the same (with the registry's pairs)."""
    first = world.place()
    standing = after(first, world.threads)
    second = dataclasses.replace(world, threads=standing).place(kept=pairs(first))
    assert second == first
    assert make_plan(second, standing) == () or not world.node.topology.online


@many
@given(worlds)
def test_explain_always_has_words(world: World) -> None:
    """Every thread and every note appears in the explanation, whatever the world."""
    found = world.place()
    text = "\n".join(explain(world.pod, world.threads, found, world.node))
    assert all(f"(tid {one.key.tid}," in text for one in world.threads)
    assert all(note.code in text for note in found.notes)


def roomy(draw: st.DrawFn, *, spare: int) -> tuple[Sandbox, list[int]]:
    """Draw containers with disjoint exclusive CPUs and at least as many vCPU indexes."""
    cpus = draw(st.permutations(range(2, HOST_CPUS)))
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    containers: list[Container] = [shared("s", "0-1")] if draw(st.booleans()) else []
    used = 0
    for number, size in enumerate(sizes):
        own = CpuSet(cpus[used : used + size])
        containers.append(exclusive(f"c{number}", str(own)))
        used += size
    count = used + spare + draw(st.integers(0, 3))
    indexes = draw(
        st.lists(st.integers(0, 31), min_size=count, max_size=count, unique=True).map(sorted)
    )
    return sandbox(*containers), indexes


@st.composite
def roomy_worlds(draw: st.DrawFn, spare: int = 0) -> World:
    """Draw a world in which every exclusive CPU can be paired, with arbitrary observed masks."""
    pod, indexes = roomy(draw, spare=spare)
    threads = [one._replace(task=repinned(one.task, draw(some))) for one in vcpus(*indexes)]
    return World(pod, threads, Node(draw(st.sampled_from([flat(HOST_CPUS), smt_host()]))))


@many
@given(worlds | roomy_worlds() | roomy_worlds(spare=1), st.booleans(), st.data())
def test_what_is_relevant_decides_alone(world: World, keep: bool, data: st.DataObject) -> None:
    """Threads with other affinities, but the same relevant parts, have the same placement."""
    topology = world.node.topology
    kept = pairs(world.place()) if keep else {}
    lost = data.draw(st.sampled_from([(), (HOST_CPUS,)]))
    kept = {key: data.draw(st.sampled_from([cpu, *lost])) for key, cpu in kept.items()}
    masks = st.sets(st.integers(0, HOST_CPUS - 1), min_size=1, max_size=2).map(CpuSet)
    moved = [one._replace(task=repinned(one.task, data.draw(masks))) for one in world.threads]
    found = world.place(kept=kept)
    if are_placed_alike(world.threads, moved, topology, found, kept):
        assert dataclasses.replace(world, threads=moved).place(kept=kept) == found


@many
@given(roomy_worlds())
def test_every_exclusive_cpu_is_paired_with_the_last_vcpus(world: World) -> None:
    """n >= x: where nobody holds a pair, the last x vCPUs by index are paired one to one."""
    free = [t._replace(task=repinned(t.task, CpuSet(range(HOST_CPUS)))) for t in world.threads]
    found = dataclasses.replace(world, threads=free).place()
    x = len(found.mask.exclusive)
    paired = {one.role.vcpu for one in world.threads if found.desired[one.key].paired}
    assert paired == {one.role.vcpu for one in world.threads[-x:]}
    assert (
        union(one.applied for one in found.desired.values() if one.paired) == found.mask.exclusive
    )
    assert len(pairs(found)) == x


@many
@given(roomy_worlds())
def test_observed_pairs_stand_without_a_registry(world: World) -> None:
    """After the registry was lost, the pairs that stand are the pairs that are decided."""
    standing = after(world.place(), world.threads)
    again = dataclasses.replace(world, threads=standing).place()
    assert make_plan(again, standing) == ()


@many
@given(roomy_worlds(), st.integers(0, 40))
def test_a_new_vcpu_moves_no_pair_it_need_not(world: World, index: int) -> None:
    """A hotplugged vCPU takes a pair from nobody but vCPU 0, which becomes surplus."""
    assume(index not in {one.role.vcpu for one in world.threads})
    before = pairs(world.place())
    standing = after(world.place(), world.threads)
    # born with the mask of another thread, as QEMU's threads are
    newborn = vcpus(index, on=str(standing[0].task.affinity))
    found = dataclasses.replace(world, threads=[*standing, *newborn]).place(kept=before)
    now = pairs(found)
    assert all(now[key] == cpu for key, cpu in before.items() if key in now)
    first = min((*world.threads, *newborn), key=lambda one: one.role.vcpu or 0)
    assert before.keys() - now.keys() <= {first.key}


@many
@given(roomy_worlds())
def test_an_unplugged_vcpu_moves_no_other_pair(world: World) -> None:
    """When the highest vCPU goes, the others keep their pairs while there are vCPUs enough."""
    assume(len(world.threads) > len(world.place().mask.exclusive))
    before = pairs(world.place())
    left = after(world.place(), world.threads)[:-1]
    now = pairs(dataclasses.replace(world, threads=left).place(kept=before))
    gone = world.threads[-1].key
    assert all(now[key] == cpu for key, cpu in before.items() if key != gone)


@many
@given(roomy_worlds(spare=3), some)
def test_a_new_container_moves_no_pair(world: World, wanted: CpuSet) -> None:
    """A container that joins with CPUs of its own leaves every standing pair alone."""
    first = world.place()
    own = CpuSet(list(wanted - (first.mask.mask or EMPTY))[:3])
    assume(own)
    before = pairs(first)
    joined = replace(world.pod, containers=(*world.pod.containers, exclusive("new", str(own))))
    standing = after(first, world.threads)
    now = pairs(World(joined, standing, world.node).place(kept=before))
    assert all(now[key] == cpu for key, cpu in before.items())
    assert len(now) == len(before) + len(own)


@many
@given(roomy_worlds(), st.integers(0, 2))
def test_a_leaving_container_moves_no_pair(world: World, number: int) -> None:
    """When a container leaves, vCPUs that stay paired on CPUs that stay exclusive keep them."""
    before = pairs(world.place())
    standing = after(world.place(), world.threads)
    rest = tuple(one for one in world.pod.containers if one.id != f"c{number}")
    found = World(replace(world.pod, containers=rest), standing, world.node).place(kept=before)
    now = pairs(found)
    for key, cpu in before.items():
        if key in now and cpu in found.mask.exclusive:
            assert now[key] == cpu
