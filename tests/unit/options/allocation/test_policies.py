"""The policies over pools: which container gets what, what follows for others, refusals."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kata_pin.base.allocation import (
    FAIL_KEY,
    POLICY_KEY,
    AllocState,
    ContainerRequest,
    Decision,
    Refusal,
)
from kata_pin.base.config.alloc import Alloc, Fail
from kata_pin.base.cpuset import EMPTY
from kata_pin.base.errors import ConfigError
from kata_pin.base.placement import KubeletState
from kata_pin.base.settings import AllowRule, Eligibility
from kata_pin.base.values import CpuClass, RefusalKind
from kata_pin.options.allocation.policies import BUILTIN, create
from kata_pin.options.allocation.policy import Policy, other_owner
from tests.support.machines import Shape, halved, host
from tests.support.podspecs import container, pod
from tests.support.world import cpus

HOST = host(Shape(uppers=2, llcs=2, cores=2).cpus())
"""16 CPUs: 2 packages, each a node with 2 caches of 2 cores; siblings are n and n + 8."""

OPEN = Alloc(eligibility=Eligibility.RELAXED, allow=(AllowRule(namespace="shop"),))


def policy(name: str = "static", chosen: Alloc = OPEN) -> Policy:
    return create(name, HOST, chosen)


def wishing(
    cpu_class: str, millis: int = 2000, uid: str = "pod", name: str = "app", kata: bool = False
) -> ContainerRequest:
    """Return a container of a pod that chose a class by annotation."""
    return container(millis, pod(uid, annotations={POLICY_KEY: cpu_class}, kata=kata), name)


def after(chosen: Policy, *requests: ContainerRequest) -> AllocState:
    """Return the state in which these containers were served one after the other."""
    state = chosen.start()
    for request in requests:
        state = chosen.allocate(state, request).state
    return state


def told(decision: Decision) -> dict[str, str]:
    """Return the changed grants' CPUs."""
    return {grant.container_id: str(grant.cpus) for grant in decision.changed}


def test_pools_of_an_empty_node() -> None:
    """Reserved CPUs are in the shared pool unless strictly so; housekeeping has its own."""
    chosen = replace(OPEN, reserved=cpus("0,8"), housekeeping=cpus("1,9"))
    pools = policy(chosen=chosen).start()
    assert (pools.reserved, pools.housekeeping) == (cpus("0,8"), cpus("1,9"))
    assert pools.shared == cpus("0,2-8,10-15")
    strict = policy(chosen=replace(chosen, strict_reserved=True)).start()
    as_kubelets = replace(chosen, options={"strict-cpu-reservation": "true"})
    assert strict.shared == policy(chosen=as_kubelets).start().shared == cpus("2-7,10-15")


def test_isolated_cpus_are_left_alone() -> None:
    """What the kernel isolated is used only where the setting names it."""
    isolated = replace(HOST, isolated=cpus("4-7"))
    assert create("static", isolated, OPEN).start().cpus == cpus("0-3,8-15")
    listed = replace(OPEN, cpus=cpus("4-7"))
    assert create("static", isolated, listed).start().cpus == cpus("4-7")


def test_somewhere_everybody_has_to_run() -> None:
    """Settings that leave nothing for the shared pool, with what is online, do not stop a node."""
    state = policy(chosen=replace(OPEN, cpus=cpus("20-30"))).start()
    assert state.shared == cpus("0-15")
    served = policy(chosen=replace(OPEN, cpus=cpus("20-30"))).allocate(state, container(2000))
    assert served.refused is not None


def test_static_follows_the_kubelet() -> None:
    """Whole cores, lowest first; all grants of the shared pool change."""
    chosen = policy()
    state = after(chosen, container(500, pod("a", kata=False)))
    decision = chosen.allocate(state, container(2000, pod("b", kata=False)))
    assert told(decision) == {"a-app": "1-7,9-15", "b-app": "0,8"}
    assert decision.state.exclusive == decision.state.grants["b-app"].exclusive == cpus("0,8")
    assert {one.container_id for one in decision.changed} == {"a-app", "b-app"}


def test_reserved_cpus_are_not_given() -> None:
    """A reserved CPU is never exclusive and never chosen; the pool keeps it."""
    chosen = policy("annotation", replace(OPEN, reserved=cpus("0-3,8-11")))
    state = after(chosen, wishing("exclusive", 4000, "a"), wishing("share", 4000, "b"))
    assert state.exclusive == cpus("4-5,12-13")
    assert state.grants["b-app"].cpus == cpus("6-7,14-15")
    assert state.shared == cpus("0-3,6-11,14-15")


def test_share_may_be_used_by_others_exclusive_by_nobody() -> None:
    """The shared pool keeps what a share container chose and loses what is exclusive."""
    chosen = policy("annotation")
    state = after(chosen, wishing("none", 1000, "n"))
    shared = chosen.allocate(state, wishing("share", 2000, "s"))
    assert told(shared) == {"s-app": "0,8"}
    exclusive = chosen.allocate(shared.state, wishing("exclusive", 2000, "x"))
    assert told(exclusive) == {"n-app": "0,2-8,10-15", "x-app": "1,9"}
    assert shared.state.grants["n-app"].cpus == cpus("0-15")


def test_share_containers_choose_different_cpus() -> None:
    """As many share containers may choose a CPU as the setting says, least chosen first."""
    one = policy("annotation")
    full = [wishing("share", 8000, f"p{n}") for n in range(3)]
    state = after(one, *full[:2])
    assert state.grants["p0-app"].cpus.isdisjoint(state.grants["p1-app"].cpus)
    refused = one.allocate(state, full[2]).refused
    assert refused is not None
    assert refused.kind is RefusalKind.NOT_ENOUGH_CPUS
    two = policy("annotation", replace(OPEN, max_sharers=2))
    third = two.allocate(after(two, *full[:2]), full[2])
    assert third.refused is None
    assert len(third.state.grants["p2-app"].cpus) == 8
    fourth = two.allocate(third.state, wishing("share", 8000, "p3"))
    assert fourth.refused is None
    assert two.allocate(fourth.state, wishing("share", 1000, "p4")).refused is not None


def test_story_none_to_share() -> None:
    """Crane's story 1: a running pod chooses share; it alone changes, and goes on running."""
    chosen = policy("annotation")
    state = after(chosen, wishing("none", 2000, "a"), wishing("none", 500, "b"))
    decision = chosen.change(state, wishing("share", 2000, "a"))
    assert told(decision) == {"a-app": "0,8"}
    assert decision.state.shared == cpus("0-15")


def test_story_exclusive_to_share() -> None:
    """Crane's story 2: a running pod shares its CPUs; it keeps them, all others get them too."""
    chosen = policy("annotation")
    state = after(chosen, wishing("exclusive", 2000, "a"), wishing("none", 500, "b"))
    assert state.grants["b-app"].cpus == cpus("1-7,9-15")
    decision = chosen.change(state, wishing("share", 2000, "a"))
    assert told(decision) == {"b-app": "0-15"}
    assert decision.state.grants["a-app"].cpus == cpus("0,8")
    back = chosen.change(decision.state, wishing("exclusive", 2000, "a"))
    assert told(back) == {"b-app": "1-7,9-15"}
    assert back.state.grants["a-app"].exclusive == cpus("0,8")


def test_share_does_not_become_exclusive_where_another_shares_it() -> None:
    """Two share containers on the same CPUs: neither can take them for itself; it gets others."""
    chosen = policy("annotation", replace(OPEN, max_sharers=2, cpus=cpus("0-3,8-11")))
    state = after(chosen, *(wishing("share", 4000, f"p{n}") for n in range(3)))
    assert state.grants["p2-app"].cpus == state.grants["p0-app"].cpus
    refused = chosen.change(state, wishing("exclusive", 4000, "p2"))
    assert refused.refused is not None
    assert refused.state is state


@pytest.mark.parametrize("name", BUILTIN)
def test_removal_returns_the_cpus(name: str) -> None:
    """The CPUs of an exclusive container return to the pool, and every shared container hears."""
    chosen = policy(name)
    shared = [container(500, pod(f"s{n}", kata=False)) for n in range(3)]
    state = after(chosen, *shared, wishing("exclusive", 12000, "x"))
    decision = chosen.release(state, "x-app")
    assert {one.container_id for one in decision.changed} == {"s0-app", "s1-app", "s2-app"}
    assert decision.state.shared == cpus("0-15")
    assert chosen.release(decision.state, "x-app").changed == ()


@pytest.mark.parametrize("name", BUILTIN)
def test_nothing_changed_nothing_listed(name: str) -> None:
    """The same request again, and an unknown container's end, change nothing."""
    chosen = policy(name)
    request = wishing("exclusive", 2000, "a")
    state = after(chosen, request, wishing("none", 500, "b"))
    for again in (
        chosen.allocate(state, request),
        chosen.change(state, request),
        chosen.release(state, "unknown"),
    ):
        assert again.changed == ()
        assert again.state == state


@pytest.mark.parametrize("name", BUILTIN)
def test_resize_keeps_and_grows_to_the_nearest(name: str) -> None:
    """A larger request keeps its CPUs and gets their neighbours; a smaller keeps whole cores."""
    chosen = policy(name)
    state = after(
        chosen,
        wishing("exclusive", 2000, "a"),
        wishing("exclusive", 2000, "b"),
        wishing("exclusive", 2000, "c"),
    )
    assert state.grants["a-app"].exclusive == cpus("0,8")
    state = chosen.release(state, "b-app").state
    grown = chosen.change(state, wishing("exclusive", 4000, "a")).state
    assert grown.grants["a-app"].exclusive == cpus("0-1,8-9")
    wide = chosen.change(grown, wishing("exclusive", 5000, "a")).state
    assert wide.grants["a-app"].exclusive == cpus("0-1,3,8-9")
    small = chosen.change(wide, wishing("exclusive", 2000, "a")).state
    assert small.grants["a-app"].exclusive == cpus("0,8")


def test_resize_that_does_not_fit_changes_nothing() -> None:
    """A running container loses nothing by a request that cannot be served, strict or not."""
    chosen = policy("static", replace(OPEN, fail=Fail.STRICT))
    state = after(chosen, wishing("", 4000, "a"))
    decision = chosen.change(state, wishing("", 16000, "a"))
    assert decision.state is state
    assert decision.refused is not None
    assert not decision.refused.strict


def test_change_of_an_unknown_container_allocates() -> None:
    """A container that was never seen is taken in."""
    chosen = policy("annotation")
    assert told(chosen.change(chosen.start(), wishing("share"))) == {"pod-app": "0,8"}


def test_an_unknown_container_that_runs_is_not_refused() -> None:
    """Taken in under `strict` without the CPUs it wants: it runs, so it has the shared pool."""
    chosen = policy("annotation", replace(OPEN, fail=Fail.STRICT))
    decision = chosen.change(chosen.start(), wishing("exclusive", 64000, "a"))
    assert decision.refused is not None
    assert not decision.refused.strict
    assert decision.state.grants["a-app"].cpus == decision.state.shared


def test_shared_minimum() -> None:
    """By default one core stays shared; a setting can ask for more."""
    assert policy().allocate(policy().start(), container(14000, pod(kata=False))).refused is None
    refused = policy().allocate(policy().start(), container(15000, pod(kata=False))).refused
    assert refused is not None
    assert refused.kind is RefusalKind.SHARED_MINIMUM
    wide = policy(chosen=replace(OPEN, shared_minimum=4))
    assert wide.allocate(wide.start(), container(13000, pod(kata=False))).refused is not None
    narrow = policy(chosen=replace(OPEN, shared_minimum=1))
    assert narrow.allocate(narrow.start(), container(15000, pod(kata=False))).refused is None


@pytest.mark.parametrize("name", BUILTIN)
def test_best_effort_runs_in_the_shared_pool(name: str) -> None:
    """Too few CPUs: the pod starts in the shared pool, and the refusal has the reason."""
    chosen = policy(name)
    state = after(chosen, wishing("exclusive", 12000, "a"))
    decision = chosen.allocate(state, wishing("exclusive", 5000, "b"))
    assert decision.refused is not None
    assert not decision.refused.strict
    assert decision.refused.kind is RefusalKind.NOT_ENOUGH_CPUS
    assert decision.state.grants["b-app"].cpu_class is CpuClass.NONE
    assert decision.state.grants["b-app"].cpus == decision.state.shared
    assert decision.refused.message in decision.state.grants["b-app"].reasons


@pytest.mark.parametrize("name", BUILTIN)
def test_who_waits_is_served_when_cpus_return(name: str) -> None:
    """Containers in the shared pool for lack of CPUs get them when others end, oldest first."""
    chosen = policy(name)
    state = after(
        chosen,
        wishing("exclusive", 8000, "a"),
        wishing("exclusive", 4000, "b"),
        wishing("exclusive", 8000, "c"),
        wishing("exclusive", 6000, "d"),
        container(500, pod("e", kata=False)),
    )
    assert {one for one, grant in state.grants.items() if grant.exclusive} == {"a-app", "b-app"}
    first = chosen.release(state, "b-app").state
    assert {one for one, grant in first.grants.items() if grant.exclusive} == {"a-app", "d-app"}
    second = chosen.release(first, "a-app")
    assert len(second.state.grants["c-app"].exclusive) == 8
    assert second.state.grants["d-app"].exclusive == first.grants["d-app"].exclusive
    assert [one.container_id for one in second.changed] == ["c-app"]


@pytest.mark.parametrize("by_pod", [True, False])
def test_strict_refuses_and_leaves_no_trace(by_pod: bool) -> None:
    """Strict, by node or by pod: nothing is given and nothing changes."""
    chosen = policy("annotation", OPEN if by_pod else replace(OPEN, fail=Fail.STRICT))
    state = after(chosen, wishing("exclusive", 12000, "a"))
    notes = {POLICY_KEY: "exclusive", **({FAIL_KEY: "strict"} if by_pod else {})}
    request = container(4000, pod("b", annotations=notes))
    decision = chosen.allocate(state, request)
    assert decision.refused is not None
    assert decision.refused.strict
    assert decision.state is state
    assert decision.changed == ()


def test_strict_does_not_concern_who_asks_for_nothing() -> None:
    """Containers of the shared pool start on a full strict node."""
    chosen = policy("static", replace(OPEN, fail=Fail.STRICT))
    state = after(chosen, wishing("", 14000, "a"))
    assert chosen.allocate(state, container(500, pod("b"))).refused is None


def test_init_container_hands_its_cpus_on() -> None:
    """The next container of the pod gets the init container's CPUs; the rest returns at once."""
    chosen = policy()
    owner = pod(kata=False)
    state = after(chosen, container(2000, pod("other", kata=False)))
    state = chosen.allocate(state, container(4000, owner, "init", init=True)).state
    assert state.grants["pod-init"].exclusive == cpus("1-2,9-10")
    state = chosen.release(state, "other-app").state
    state = chosen.allocate(state, container(2000, owner, "app")).state
    assert state.get("pod-init") is None
    assert state.grants["pod-app"].exclusive == cpus("1,9")
    assert state.exclusive == cpus("1,9")


def test_sidecar_keeps_its_cpus() -> None:
    """What is not an init container that ends stays as it is when the next one comes."""
    chosen = policy()
    owner = pod(kata=False)
    state = after(chosen, container(2000, owner, "sidecar"), container(2000, owner, "app"))
    assert len(state.exclusive) == 4


def test_containers_of_a_pod_are_close_together() -> None:
    """`topology`: a pod's second container is in the cache of the first, another pod elsewhere."""
    chosen = policy("topology")
    a, b = pod("a", kata=False), pod("b", kata=False)
    state = after(
        chosen,
        container(2000, a, "one"),
        container(4000, b, "one"),
        container(2000, a, "two"),
    )
    assert state.grants["a-one"].exclusive == cpus("0,8")
    assert state.grants["a-two"].exclusive == cpus("1,9")
    assert state.grants["b-one"].exclusive == cpus("2-3,10-11")


def test_fraction_is_near_the_exclusive_part() -> None:
    """`topology`: the fraction of a mixed container is the shared pool of its own node."""
    chosen = policy("topology")
    grant = after(chosen, container(2500, pod("a", kata=False))).grants["a-app"]
    assert grant.exclusive == cpus("0,8")
    assert grant.shared == cpus("1-3,9-11")
    assert grant.cpus == cpus("0-3,8-11")


def test_zone_too_small_is_not_kept_to() -> None:
    """`topology`: followers of a node whose shared CPUs are gone use the whole pool."""
    chosen = policy("topology")
    state = after(chosen, container(1500, pod("a", kata=False)))
    first = container(1000, pod("b", kata=False), limit=0)
    state = chosen.allocate(state, first).state
    assert state.grants["b-app"].zone == cpus("4-7,12-15")
    state = chosen.allocate(state, wishing("exclusive", 8000, "c")).state
    assert state.exclusive >= cpus("4-7,12-15")
    assert state.grants["b-app"].cpus == state.shared


def test_zone_that_is_nearly_full_is_not_kept_to() -> None:
    """`topology`: two CPUs left of a node are not enough for a request of three."""
    chosen = policy("topology")
    burst = container(3000, pod("b", kata=False), limit=0)
    state = after(chosen, burst)
    assert state.grants["b-app"].cpus == cpus("0-3,8-11")
    state = chosen.allocate(state, wishing("exclusive", 6000, "c")).state
    assert state.shared & cpus("0-3,8-11") == cpus("3,11")
    assert state.grants["b-app"].cpus == state.shared


def test_no_zone_for_who_fits_in_none() -> None:
    """`topology`: a request above what any node has left uses the whole pool from the start."""
    big = container(12000, pod("b", kata=False), limit=0)
    grant = after(policy("topology"), big).grants["b-app"]
    assert (grant.zone, grant.cpus) == (EMPTY, cpus("0-15"))


def test_zone_is_kept() -> None:
    """`topology`: a container goes on using its node when another one has become idler."""
    chosen = policy("topology")
    state = after(
        chosen,
        container(2500, pod("a", kata=False), limit=0),
        container(1500, pod("b", kata=False), limit=0),
    )
    assert state.grants["b-app"].cpus == cpus("4-7,12-15")
    state = chosen.release(state, "a-app").state
    request = state.grants["b-app"].request
    assert chosen.change(state, request).changed == ()
    grown = chosen.change(state, replace(request, cpu_millis=1600)).state
    assert grown.grants["b-app"].cpus == cpus("4-7,12-15")


def test_memory_nodes_alone_are_a_change() -> None:
    """A grant with the same CPUs and other memory nodes is listed."""
    request = wishing("exclusive", 2000, "a")
    state = after(policy("topology"), request)
    pinned = policy("topology", replace(OPEN, pin_memory=True)).change(state, request)
    assert told(pinned) == {"a-app": "0,8"}


def test_memory_nodes() -> None:
    """With the setting, grants of own CPUs name their nodes; without it, and shared, none."""
    chosen = policy("topology", replace(OPEN, pin_memory=True))
    state = after(chosen, wishing("exclusive", 10000, "a"), container(500, pod("b")))
    assert state.grants["a-app"].mems == cpus("0-1")
    assert state.grants["b-app"].mems == EMPTY
    assert after(policy("topology"), wishing("exclusive")).grants["pod-app"].mems == EMPTY


def test_full_pcpus_only() -> None:
    """Whole cores or nothing: an odd number, and cores in part use, are refused with a reason."""
    chosen = policy(chosen=replace(OPEN, options={"full-pcpus-only": "true"}, reserved=cpus("0")))
    odd = chosen.allocate(chosen.start(), container(3000, pod(kata=False)))
    assert odd.refused is not None
    assert odd.refused.kind is RefusalKind.ALIGNMENT
    state = after(chosen, container(4000, pod("a", kata=False)))
    assert state.exclusive == cpus("1-2,9-10") or state.exclusive == cpus("2-3,10-11")
    many = chosen.allocate(chosen.start(), container(15000 + 1000, pod(kata=False)))
    assert many.refused is not None
    assert many.refused.kind is RefusalKind.NOT_ENOUGH_CPUS


def test_full_pcpus_only_counts_single_cpus_as_the_kubelet_does() -> None:
    """A reserved CPU's sibling is in no whole core, but counts when packages are ordered."""
    two = host(Shape(uppers=2, cores=4).cpus())
    options = {"full-pcpus-only": "true"}
    chosen = create("static", two, Alloc(reserved=cpus("0"), options=options))
    first, second = container(6000, pod("a", kata=False)), container(2000, pod("b", kata=False))
    state = after(chosen, first, second)
    assert state.exclusive == cpus("1-4,9-12")
    state = chosen.release(state, "a-app").state
    request = container(2000, pod("c", kata=False))
    assert chosen.allocate(state, request).state.grants["c-app"].exclusive == cpus("5,13")
    taken = [one.taken for one in chosen.candidates(state, request)]
    assert cpus("5,13") in taken


def test_full_pcpus_only_with_unequal_cores() -> None:
    """A core with one thread offline is no reason to hand out half of another one."""
    chosen = create(
        "topology", halved(), replace(OPEN, options={"full-pcpus-only": "true"}, shared_minimum=1)
    )
    state = after(chosen, wishing("exclusive", 2000, "a"))
    assert state.exclusive == cpus("1,4")
    second = chosen.allocate(state, wishing("exclusive", 2000, "b"))
    assert second.refused is None
    assert second.state.exclusive == cpus("1-2,4-5")
    odd = chosen.allocate(chosen.start(), wishing("exclusive", 1000, "c")).refused
    assert odd is not None
    assert odd.kind is RefusalKind.ALIGNMENT


def test_who_else_decides() -> None:
    """The kubelet's static policy and other plugins are owners; policy none is not."""
    static = other_owner(KubeletState("static", cpus("0-3")))
    assert static is not None
    assert static.kind is RefusalKind.KUBELET_STATIC
    plugin = other_owner(KubeletState("none", EMPTY), ("10-balloons",))
    assert plugin is not None
    assert plugin.kind is RefusalKind.FOREIGN_PLUGIN
    assert "10-balloons" in plugin.message
    assert other_owner(None) is None
    assert other_owner(KubeletState("none", EMPTY)) is None


@pytest.mark.parametrize("strict", [True, False])
def test_decline(strict: bool) -> None:
    """While another decides nothing changes; only containers with chosen CPUs are refused."""
    chosen = policy("annotation", replace(OPEN, fail=Fail.STRICT if strict else Fail.BEST_EFFORT))
    state = after(chosen, wishing("exclusive", 2000, "a"))
    refusal = Refusal(RefusalKind.KUBELET_STATIC, "the kubelet decides")
    innocent = chosen.decline(state, container(2000, pod("b")), refusal)
    assert innocent.refused is None
    asked = chosen.decline(state, wishing("exclusive", 2000, "c"), refusal)
    assert asked.refused == replace(refusal, strict=strict)
    assert innocent.state is asked.state is state


@pytest.mark.parametrize("name", ["static", "topology"])
def test_no_innocent_pod_fails_where_the_kubelet_decides(name: str) -> None:
    """A strict node whose kubelet is static: Guaranteed pods are the kubelet's, none is refused."""
    chosen = policy(name, replace(OPEN, fail=Fail.STRICT))
    refusal = other_owner(KubeletState("static", cpus("0-7")))
    assert refusal is not None
    assert chosen.decline(chosen.start(), container(2000, pod("b")), refusal).refused is None
    insists = container(2000, pod("c", annotations={FAIL_KEY: "strict"}))
    told_so = chosen.decline(chosen.start(), insists, refusal).refused
    assert told_so is not None
    assert told_so.strict


def test_candidates_of_the_kubelets_choice() -> None:
    """Each step's units in order with their keys; together they took what is granted."""
    chosen = policy()
    state = after(chosen, container(1000, pod("a", kata=False)))
    request = container(3000, pod("b", kata=False))
    told_of = chosen.candidates(state, request)
    granted = chosen.allocate(state, request).state.grants["b-app"].exclusive
    assert {one.level for one in told_of} == {"node", "package", "core", "cpu"}
    taken = EMPTY
    for one in told_of:
        assert taken.isdisjoint(one.taken)
        taken |= one.taken
    assert taken == granted
    cores = [dict(one.keys)["available"] for one in told_of if one.level == "core"][:4]
    assert cores == [1, 2, 2, 2]


def test_candidates_end_where_the_request_is_served() -> None:
    """Steps that were not needed are not listed."""
    chosen = policy(chosen=replace(OPEN, shared_minimum=1))
    told_of = chosen.candidates(chosen.start(), container(8000))
    assert [(one.level, one.unit) for one in told_of if one.taken] == [("node", 0)]
    assert {one.level for one in told_of} == {"node"}


def test_candidates_of_who_gets_none() -> None:
    """A container without CPUs of its own has one candidate, the shared pool."""
    chosen = policy()
    (only,) = chosen.candidates(chosen.start(), container(500))
    assert (only.level, only.cpus) == ("pool", cpus("0-15"))


def test_distributed_candidates() -> None:
    """With distribute-cpus-across-numa the candidates are nodes."""
    chosen = policy(chosen=replace(OPEN, options={"distribute-cpus-across-numa": "true"}))
    request = container(10000, pod(kata=False))
    told_of = chosen.candidates(chosen.start(), request)
    assert [len(one.taken) for one in told_of] == [5, 5]
    too_many = container(17000, pod(kata=False))
    assert chosen.candidates(chosen.start(), too_many) == ()


def test_unknown_policies_and_third_ones() -> None:
    """An unknown name is an error; another package's policy has its name, ours keep theirs."""
    with pytest.raises(ConfigError, match="balloons"):
        create("balloons", HOST, OPEN)
    third = {"balloons": BUILTIN["topology"], "static": BUILTIN["topology"]}
    assert create("balloons", HOST, OPEN, third).name == "topology"
    assert create("static", HOST, OPEN, third).name == "static"
    assert all(isinstance(create(name, HOST, OPEN), Policy) for name in BUILTIN)


def test_options_are_checked() -> None:
    """An unknown option of the kubelet is an error when the policy is made."""
    with pytest.raises(ConfigError, match="full-cpus"):
        policy(chosen=replace(OPEN, options={"full-cpus": "true"}))
