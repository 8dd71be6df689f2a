"""Bringing a state in line with what runs: lost state, other hosts, offline CPUs."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kata_pin.base.allocation import POLICY_KEY, AllocState, ContainerRequest, RunningContainer
from kata_pin.base.config.alloc import Alloc
from kata_pin.base.cpuset import EMPTY, HostTopology
from kata_pin.base.placement import KubeletState
from kata_pin.base.settings import AllowRule, Eligibility
from kata_pin.base.values import CpuClass, GrantKind
from kata_pin.options.allocation.policies import BUILTIN, create
from kata_pin.options.allocation.policy import Policy
from kata_pin.options.allocation.supposed import as_kubelet, taken_over
from kata_pin.peers.kubelet.checkpoint import dump_checkpoint, parse_checkpoint
from tests.support.machines import Shape, host
from tests.support.podspecs import container, pod
from tests.support.world import cpus

HOST = host(Shape(uppers=2, llcs=2, cores=2).cpus())
"""16 CPUs: 2 packages, each a node with 2 caches of 2 cores; siblings are n and n + 8."""

OPEN = Alloc(
    eligibility=Eligibility.RELAXED, allow=(AllowRule(namespace="shop"),), shared_minimum=2
)


def offline(text: str) -> HostTopology:
    """Return the host without these CPUs."""
    return host([cpu for cpu in HOST.cpus if cpu.cpu not in cpus(text)])


def wishing(cpu_class: str, millis: int = 2000, uid: str = "pod") -> ContainerRequest:
    return container(millis, pod(uid, annotations={POLICY_KEY: cpu_class}, kata=False))


def filled(*requests: ContainerRequest, name: str = "annotation") -> AllocState:
    """Return the state in which these containers were served one after the other."""
    policy = create(name, HOST, OPEN)
    state = policy.start()
    for request in requests:
        state = policy.allocate(state, request).state
    return state


def seen(state: AllocState) -> list[RunningContainer]:
    """Return what runs by a state."""
    return [
        RunningContainer(grant.request, grant.cpus)
        for grant in state.grants.values()
        if grant.kind is GrantKind.CONTAINER
    ]


THREE = (wishing("exclusive", 2000, "x"), wishing("share", 2000, "s"), wishing("none", 500, "n"))


@pytest.mark.parametrize("name", BUILTIN)
def test_nothing_happened(name: str) -> None:
    """A state that is right stays, and nothing is written."""
    state = filled(*THREE, name=name)
    decision = create(name, HOST, OPEN).reconcile(state, seen(state))
    assert decision.state == state
    assert decision.changed == ()


@pytest.mark.parametrize("lost", [False, True])
def test_a_vms_own_cpus_cost_no_container_its_own(lost: bool) -> None:
    """A VM that had to use the pool does so again, before a container served later falls back."""
    chosen = replace(OPEN, shared_minimum=5, own_cpus=2)
    policy = create("annotation", HOST, chosen)
    kata = container(500, pod("k", annotations={POLICY_KEY: "exclusive"}))
    state = policy.allocate(policy.start(), kata).state
    state = policy.allocate(state, wishing("exclusive", 6000, "r")).state
    state = policy.change(state, replace(kata, cpu_millis=4000, quota_us=400_000)).state
    assert sorted(len(one.exclusive) for one in state.grants.values()) == [0, 4, 6]
    decision = policy.reconcile(AllocState() if lost else state, seen(state))
    exclusive = {name: grant.exclusive for name, grant in state.grants.items()}
    assert {x.container_id: x.exclusive for x in decision.state.grants.values()} == exclusive


def test_a_shrink_serves_who_waits() -> None:
    """CPUs that a container gives up go to those that wait, so that a restart finds nothing to do.

    Both serve it at the cost of its own VM's CPUs.
    """
    chosen = replace(OPEN, shared_minimum=5, own_cpus=2)
    policy = create("annotation", HOST, chosen)
    of = pod("k", annotations={POLICY_KEY: "exclusive"})
    large = wishing("exclusive", 6000, "r")
    state = policy.start()
    for one in (container(1000, of), large, container(6000, of, "waits")):
        state = policy.allocate(state, one).state
    exclusive = {name: len(grant.exclusive) for name, grant in state.grants.items()}
    assert exclusive == {"k-app": 1, "vm-k": 2, "r-app": 6, "k-waits": 0}
    state = policy.change(state, replace(large, cpu_millis=4000, quota_us=400_000)).state
    exclusive = {name: len(grant.exclusive) for name, grant in state.grants.items()}
    assert exclusive == {"k-app": 1, "vm-k": 0, "r-app": 4, "k-waits": 6}
    assert policy.reconcile(state, seen(state)).state == state


def test_the_same_change_again_changes_nothing() -> None:
    """A container of the pool stays in its zone, even if one that waited took CPUs of it."""
    policy = create("topology", HOST, replace(OPEN, eligibility=Eligibility.KUBELET))
    first = wishing("exclusive", 2000, "a")
    state = policy.allocate(policy.start(), first).state
    state = policy.allocate(state, wishing("exclusive", 14000, "b")).state
    assert state.grants["b-app"].exclusive == EMPTY
    less = replace(first, cpu_millis=500, quota_us=50_000)
    state = policy.change(state, less).state
    assert len(state.grants["b-app"].exclusive) == 14
    assert policy.change(state, less).state is state


@pytest.mark.parametrize("name", BUILTIN)
def test_lost_state(name: str) -> None:
    """Without a state, containers keep the CPUs they are seen on, and nothing is written."""
    state = filled(*THREE, wishing("exclusive", 4000, "y"), name=name)
    policy = create(name, HOST, OPEN)
    decision = policy.reconcile(AllocState(), list(reversed(seen(state))))
    held = {one: grant.exclusive for one, grant in decision.state.grants.items()}
    assert held == {one: grant.exclusive for one, grant in state.grants.items()}
    assert decision.changed == ()


def test_ended_meanwhile() -> None:
    """Containers that no longer run lose their CPUs; the shared pool gets them."""
    state = filled(*THREE)
    decision = create("annotation", HOST, OPEN).reconcile(state, seen(state)[1:])
    assert set(decision.state.grants) == {"s-app", "n-app"}
    assert [grant.container_id for grant in decision.changed] == ["n-app"]
    assert decision.state.shared == cpus("0-15")


def test_began_meanwhile() -> None:
    """A container without a grant is served after those that had CPUs already."""
    state = filled(*THREE)
    fresh = RunningContainer(wishing("exclusive", 2000, "z"), cpus("0-15"))
    decision = create("annotation", HOST, OPEN).reconcile(state, [fresh, *seen(state)])
    assert decision.state.grants["x-app"].exclusive == cpus("0,8")
    assert decision.state.grants["z-app"].exclusive == cpus("2,10")
    assert {grant.container_id for grant in decision.changed} == {"z-app", "n-app"}


def test_what_a_container_gives_up_is_free() -> None:
    """A container resized meanwhile keeps a part; the rest is free for later ones."""
    state = filled(wishing("exclusive", 12000, "a"))
    running = [
        RunningContainer(wishing("exclusive", 2000, "a"), state.grants["a-app"].cpus),
        RunningContainer(wishing("exclusive", 12000, "z"), None),
    ]
    after = create("annotation", HOST, OPEN).reconcile(state, running).state
    assert len(after.grants["a-app"].exclusive) == 2
    assert len(after.grants["z-app"].exclusive) == 12


def test_offline_cpu_is_replaced_by_the_nearest() -> None:
    """An exclusive CPU that went offline is replaced; the others of the container stay."""
    state = filled(*THREE)
    decision = create("annotation", offline("8"), OPEN).reconcile(state, seen(state))
    assert decision.state.grants["x-app"].exclusive >= cpus("0")
    assert len(decision.state.grants["x-app"].exclusive) == 2
    assert decision.state.grants["s-app"].cpus == cpus("1,9")
    assert decision.refused is None


def test_growing_takes_no_claimed_cpu() -> None:
    """A container that lost a CPU does not get one of another container served later."""
    state = filled(wishing("exclusive", 2000, "a"), wishing("exclusive", 2000, "b"))
    decision = create("annotation", offline("8"), OPEN).reconcile(state, seen(state))
    assert decision.state.grants["b-app"].exclusive == cpus("1,9")
    assert decision.state.grants["a-app"].exclusive.isdisjoint(cpus("1,9"))


def test_too_few_cpus_left() -> None:
    """On a host that shrank the later ones fall back to the shared pool."""
    state = filled(*(wishing("exclusive", 4000, f"p{n}") for n in range(3)))
    decision = create("annotation", offline("4-7,12-15"), OPEN).reconcile(state, seen(state))
    classes = [grant.cpu_class for grant in decision.state.grants.values()]
    assert classes == [CpuClass.EXCLUSIVE, CpuClass.NONE, CpuClass.NONE]
    assert decision.state.grants["p2-app"].cpus == decision.state.shared == cpus("2-3,10-11")


def test_waiting_containers_are_served_when_cpus_come_back() -> None:
    """What did not fit before is tried again."""
    small = create("annotation", offline("4-7,12-15"), OPEN)
    state = filled(*(wishing("exclusive", 4000, f"p{n}") for n in range(3)))
    state = small.reconcile(state, seen(state)).state
    state = create("annotation", HOST, OPEN).reconcile(state, seen(state)).state
    assert all(grant.exclusive for grant in state.grants.values())


def test_older_containers_come_first() -> None:
    """An older container does not go without for a claim that cannot be served either."""
    chosen = replace(OPEN, max_sharers=2)
    full = create("annotation", HOST, chosen)
    state = full.start()
    for size, uid in ((2000, "c"), (4000, "a"), (14000, "b")):
        state = full.allocate(state, wishing("share", size, uid)).state
    state = full.release(state, "c-app").state
    assert state.grants["a-app"].cpus == cpus("1-2,9-10")
    small = create("annotation", offline("2,4-7,12-15"), chosen)
    after = small.reconcile(state, seen(state)).state
    assert after.grants["b-app"].cpu_class is CpuClass.NONE
    assert len(after.grants["a-app"].bound) == 4
    assert after.grants["a-app"].bound >= cpus("1,9-10")
    assert small.reconcile(after, seen(after)).changed == ()


def test_minimum_holds_beside_vms() -> None:
    """A VM's own CPUs that are given up for its container do not hide a pool too small."""
    chosen = replace(OPEN, own_cpus=2, housekeeping=cpus("1,9"), shared_minimum=5)
    full = create("static", HOST, chosen)
    state = full.allocate(full.start(), container(2000, pod("a"))).state
    small = create("static", offline("4-7,12-15"), chosen)
    after = small.reconcile(state, seen(state)).state
    assert after.shared == cpus("0,2-3,8,10-11")
    assert small.reconcile(after, seen(after)).changed == ()


def test_what_a_vm_gives_back_serves_who_waits() -> None:
    """A pod that wants nothing exclusive any more makes room at the same time."""
    chosen = replace(OPEN, own_cpus=2)
    full = create("annotation", HOST, chosen)
    other = pod("b", annotations={POLICY_KEY: "exclusive"})
    state = full.start()
    for request in (wishing("exclusive", 6000, "a"), container(2000, other)):
        state = full.allocate(state, request).state
    state = full.change(state, wishing("exclusive", 10000, "a")).state
    pooled = replace(other, annotations={POLICY_KEY: "none"})
    running = [
        RunningContainer(wishing("exclusive", 14000, "a"), state.grants["a-app"].cpus),
        RunningContainer(container(2000, pooled), state.grants["b-app"].cpus),
    ]
    after = full.reconcile(state, running).state
    assert len(after.grants["a-app"].exclusive) == 14


def test_contradicting_observations() -> None:
    """Two unknown containers on the same CPUs: one keeps them, the other gets others."""
    running = [
        RunningContainer(wishing("exclusive", 2000, uid), cpus("3,11")) for uid in ("a", "b")
    ]
    state = create("annotation", HOST, OPEN).reconcile(AllocState(), running).state
    assert state.grants["a-app"].exclusive == cpus("3,11")
    assert state.grants["b-app"].exclusive.isdisjoint(cpus("3,11"))


@pytest.mark.parametrize("cpu_list", ["0-15", "3", "0,3,11", "20-21", ""])
def test_observed_cpus_that_can_not_be_its_own(cpu_list: str) -> None:
    """Another number of CPUs than it is to have, or CPUs that are not there, mean nothing."""
    running = [RunningContainer(wishing("exclusive", 2000), cpus(cpu_list))]
    state = create("annotation", HOST, OPEN).reconcile(AllocState(), running).state
    assert state.grants["pod-app"].exclusive == cpus("0,8")


def test_lost_state_of_vms() -> None:
    """A Kata container's cpuset contains its VM's CPUs and housekeeping too: nothing moves."""
    chosen = replace(OPEN, housekeeping=cpus("7,15"), own_cpus=1)
    policy = create("topology", HOST, chosen)
    state = policy.start()
    for uid in ("a", "b"):
        state = policy.allocate(state, container(3000, pod(uid))).state
    running = [
        RunningContainer(
            one.request, one.cpus | state.grants[f"vm-{one.pod_uid}"].cpus | cpus("7,15")
        )
        for one in state.grants.values()
        if one.kind is GrantKind.CONTAINER
    ]
    after = policy.reconcile(AllocState(), running).state
    for one in running:
        vm = after.grants[one.request.pod.sandbox_id]
        assert after.grants[one.request.container_id].cpus | vm.cpus == (one.cpus or EMPTY) - cpus(
            "7,15"
        )


def test_settings_changed() -> None:
    """CPUs that are reserved from now on are released; the container gets others."""
    state = filled(*THREE)
    policy = create("annotation", HOST, replace(OPEN, reserved=cpus("0,8")))
    after = policy.reconcile(state, seen(state)).state
    assert after.exclusive.isdisjoint(cpus("0,8"))
    assert len(after.grants["x-app"].exclusive) == 2


def beside_a_gap() -> tuple[Policy, AllocState]:
    """Return a VM with CPUs of its own, when CPUs nearer to its container have become free."""
    chosen = replace(OPEN, own_cpus=2, housekeeping=cpus("6-7,14-15"))
    policy = create("topology", HOST, chosen)
    state = policy.start()
    for request in (wishing("exclusive", 2000, "x"), container(2000, pod("a"))):
        state = policy.allocate(state, request).state
    state = policy.release(state, "x-app").state
    assert state.grants["a-app"].exclusive == cpus("1,9")
    assert state.grants["vm-a"].exclusive == cpus("2,10")
    return policy, state


def test_own_cpus_of_vms_stay() -> None:
    """A VM keeps its own CPUs."""
    policy, state = beside_a_gap()
    decision = policy.reconcile(state, seen(state))
    assert decision.changed == ()
    assert decision.state == state


def test_own_cpus_of_vms_stay_beside_shared_containers() -> None:
    """A VM keeps its own CPUs also where a container without exclusive ones is its pod's first."""
    chosen = replace(OPEN, own_cpus=2)
    policy = create("topology", HOST, chosen)
    owner = pod("a")
    state = policy.start()
    log = container(500, owner, "log")
    for request in (log, wishing("exclusive", 2000, "x"), container(2000, owner)):
        state = policy.allocate(state, request).state
    state = policy.release(state, "x-app").state
    decision = policy.reconcile(state, seen(state))
    assert decision.state == state
    assert decision.changed == ()


def test_own_cpus_of_vms_are_found_again() -> None:
    """Of what a Kata container is seen on, what is not its own is its VM's."""
    policy, state = beside_a_gap()
    running = [replace(one, cpus=cpus("1-2,6-7,9-10,14-15")) for one in seen(state)]
    after = policy.reconcile(AllocState(), running).state
    assert {one: grant.exclusive for one, grant in after.grants.items()} == {
        "a-app": cpus("1,9"),
        "vm-a": cpus("2,10"),
    }


def test_unconfined_containers_are_told() -> None:
    """A container that nothing confines is given its CPUs, also where its grant is old."""
    state = filled(*THREE)
    running = [replace(one, cpus=None) for one in seen(state)]
    decision = create("annotation", HOST, OPEN).reconcile(AllocState(), running)
    assert len(decision.changed) == 3


def test_kubelets_checkpoint_and_back() -> None:
    """Our state survives the kubelet's format; a node changes over without moving anybody."""
    state = filled(wishing("exclusive", 2000, "x"), wishing("none", 500, "n"), THREE[1])
    written = dump_checkpoint(as_kubelet(state))
    kubelet = parse_checkpoint(written)
    assert kubelet.static
    assert kubelet.entries == {"x": {"app": cpus("0,8")}}
    assert kubelet.default == state.shared
    taken = taken_over(kubelet, create("static", HOST, OPEN))
    assert taken.entries == kubelet.entries


def test_checkpoint_of_a_node_with_housekeeping() -> None:
    """CPUs that are not exclusive are in the default set: together it is the whole host."""
    chosen = replace(OPEN, housekeeping=cpus("7,15"), own_cpus=1)
    policy = create("static", HOST, chosen)
    state = policy.allocate(policy.start(), container(2000, pod("a"))).state
    kubelet: KubeletState = as_kubelet(state)
    assert kubelet.default | state.exclusive == cpus("0-15")
    assert set(kubelet.entries["a"]) == {"app", "vm-a"}
    assert EMPTY not in kubelet.entries["a"].values()


def test_who_waits_comes_after_who_has() -> None:
    """CPUs that fell to the younger of two stay there: a second look changes nothing."""
    settings = replace(OPEN, shared_minimum=5, own_cpus=2)
    policy = create("static", HOST, settings)
    older, younger = container(2000, pod("a", kata=False)), container(2000, pod("b"))
    state = policy.start()
    for request in (older, younger):
        state = policy.allocate(state, request).state
    fewer = create("static", offline("4-7,12-15"), settings)
    first = fewer.reconcile(state, seen(state)).state
    assert [bool(first.grants[one.container_id].exclusive) for one in (older, younger)] == [
        False,
        True,
    ]
    again = fewer.reconcile(first, seen(first))
    assert again.changed == ()
    assert again.state.exclusive == first.exclusive
