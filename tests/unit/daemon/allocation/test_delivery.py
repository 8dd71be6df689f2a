"""What is sent to the runtime, when, and what never is."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest

from kata_pin.daemon.allocation.delivery import Delivery, written
from kata_pin.errors import KataPinError
from kata_pin.model.alloc import AllocState, ContainerRequest, Grant, GrantKind
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.settings import CpuClass
from kata_pin.wire.nri.replies import Cpuset, Update
from tests.support.allotted import request
from tests.support.world import cpus

ALL = CpuSet(range(8))


def _grant(one: ContainerRequest, exclusive: str = "", shared: str | None = None) -> Grant:
    return Grant(
        one,
        "annotation",
        CpuClass.EXCLUSIVE if exclusive else CpuClass.NONE,
        exclusive=cpus(exclusive),
        shared=None if shared is None else cpus(shared),
    )


def _state(*grants: Grant, housekeeping: str = "") -> AllocState:
    state = AllocState(ALL, housekeeping=cpus(housekeeping))
    for grant in grants:
        state = state.with_grant(grant)
    return state


PLAIN = _grant(request("web", kata=False), shared="0-5")
OWN = _grant(request("db", cpus=2), exclusive="6-7")


def test_a_kata_container_without_a_quota_is_never_written_to() -> None:
    """Kata sizes a VM by a cpuset that comes without a quota: whatever it is granted, no cpuset."""
    for quota_us in (None, 0, -1):
        one = replace(OWN.request, quota_us=quota_us)
        assert not written(replace(OWN, request=one), _state(OWN))
    assert written(OWN, _state(OWN)) == Cpuset(cpus("6-7"))
    runc = replace(OWN.request, quota_us=None, pod=replace(OWN.request.pod, kata=False))
    assert written(replace(OWN, request=runc), _state(OWN)) == Cpuset(cpus("6-7"))


def test_overhead_has_a_place_in_an_exclusive_cpuset() -> None:
    """The VM's own CPUs and the housekeeping pool are in it; no VM is written to itself."""
    vm = replace(_grant(request("db"), exclusive="5"), kind=GrantKind.SANDBOX)
    vm = replace(vm, request=replace(vm.request, container_id="vm:s-db"))
    assert written(OWN, _state(OWN, vm)).cpus == cpus("5-7")
    assert written(OWN, _state(OWN, housekeeping="0")).cpus == cpus("0,6-7")
    shares = _grant(request("x", cpus=1), shared="1")
    assert written(shares, _state(shares, housekeeping="0")).cpus == cpus("1")
    assert not written(vm, _state(vm))


def test_memory_nodes_go_along() -> None:
    """Where the policy names memory nodes they are written beside the CPUs."""
    assert written(replace(OWN, mems=cpus("1")), _state(OWN)) == Cpuset(cpus("6-7"), cpus("1"))


def test_what_differs_is_sent_once() -> None:
    """A container that has another cpuset is updated in the next answer, and in no later one."""
    delivery, state = Delivery(), _state(PLAIN)
    delivery.has("c-web", Cpuset(ALL))
    assert delivery.pending(state) == {"c-web": Cpuset(cpus("0-5"))}
    assert delivery.next(state) == (Update("c-web", Cpuset(cpus("0-5"))),)
    assert delivery.pending(state) == {}
    assert delivery.next(state) == ()


def test_owners_leave_before_others_come() -> None:
    """Whose CPUs become fewer is told first; who had no cpuset at all had every CPU."""
    delivery, state = Delivery(), _state(PLAIN, OWN, _grant(request("new", kata=False), "", "0-5"))
    delivery.has("c-web", Cpuset(cpus("0-3")))
    delivery.has("c-db", Cpuset(cpus("4-7")))
    delivery.has("c-new", Cpuset())
    assert [one.container_id for one in delivery.next(state)] == ["c-db", "c-new", "c-web"]


def test_the_container_being_made_is_left_out() -> None:
    """It may not be in the list of updates: NRI fails the creation."""
    delivery, state = Delivery(), _state(PLAIN)
    delivery.has("c-web", Cpuset())
    assert delivery.next(state, but="c-web") == ()
    assert delivery.pending(state) == {"c-web": Cpuset(cpus("0-5"))}


def test_who_the_runtime_does_not_know_is_not_written_to() -> None:
    """Containers of other runtimes, those that are gone, and those without a grant."""
    delivery = Delivery()
    assert delivery.next(_state(PLAIN)) == ()
    delivery.has("c-web", Cpuset())
    delivery.gone("c-web")
    delivery.has("stranger", Cpuset(ALL))
    assert delivery.next(_state(PLAIN)) == ()
    delivery.has("c-web", Cpuset())
    delivery.clear()
    assert delivery.next(_state(PLAIN)) == ()


def test_what_the_runtime_tells_is_what_is_there() -> None:
    """A cpuset that somebody changed is pending again."""
    delivery, state = Delivery(), _state(PLAIN)
    delivery.has("c-web", Cpuset(cpus("0-5")))
    assert delivery.next(state) == ()
    delivery.has("c-web", Cpuset(cpus("0-3")))
    assert [update.cpuset.cpus for update in delivery.next(state)] == [cpus("0-5")]


def test_a_vm_is_widened_before_it_is_narrowed() -> None:
    """CPUs that a VM leaves stay in its cpuset for one answer, so that its threads move first."""
    delivery, state = Delivery(), _state(OWN)
    delivery.has("c-db", Cpuset(cpus("4-5")))
    sent = [[update.cpuset.cpus for update in delivery.next(state)] for _ in range(3)]
    assert sent == [[cpus("4-7")], [cpus("6-7")], []]


def test_a_vm_is_not_widened_by_what_is_offline() -> None:
    """CPUs that went offline cannot be written; what is left online of the old ones stays."""
    online = cpus("0-4,6-7")
    delivery, state = Delivery(lambda: online), _state(OWN)
    delivery.has("c-db", Cpuset(cpus("4-5")))
    sent = [[update.cpuset.cpus for update in delivery.next(state)] for _ in range(3)]
    assert sent == [[cpus("4,6-7")], [cpus("6-7")], []]
    delivery.has("c-db", Cpuset(cpus("5")))
    sent = [[update.cpuset.cpus for update in delivery.next(state)] for _ in range(2)]
    assert sent == [[cpus("6-7")], []]


def test_a_part_or_more_is_one_step() -> None:
    """Narrowing and widening alone need no step between, nor does a container without a VM."""
    for there in ("5-7", "6", ""):
        delivery = Delivery()
        delivery.has("c-db", Cpuset(cpus(there)))
        assert [one.cpuset.cpus for one in delivery.next(_state(OWN))] == [cpus("6-7")]
    delivery = Delivery()
    delivery.has("c-web", Cpuset(cpus("6-7")))
    assert [one.cpuset.cpus for one in delivery.next(_state(PLAIN))] == [cpus("0-5")]


def test_undecided_memory_nodes_do_not_wait() -> None:
    """Memory nodes that a container has and nobody decided are no difference."""
    delivery = Delivery()
    delivery.has("c-web", Cpuset(cpus("0-5"), cpus("0")))
    assert delivery.next(_state(PLAIN)) == ()


def test_a_cgroup_that_allows_more_is_updated_again() -> None:
    """What an update left undone, or somebody wrote, is seen and sent once more."""
    delivery, state = Delivery(), _state(PLAIN, OWN)
    delivery.has("c-web", Cpuset(cpus("0-5")), pid=7)
    delivery.has("c-db", Cpuset(cpus("6-7")), pid=8)
    places = {7: ("/pods/c-web", cpus("0-5")), 8: ("/pods/c-db", ALL)}
    assert delivery.verify(state, places.__getitem__) == []
    places[7] = ("/pods/c-web", ALL)
    assert delivery.verify(state, places.__getitem__) == ["c-web"]
    assert [one.container_id for one in delivery.next(state)] == ["c-web"]


def test_what_is_no_sign_of_anything() -> None:
    """Fewer CPUs, another process of that number, a process that is gone, an update that is due."""
    delivery, state = Delivery(), _state(PLAIN)
    delivery.has("c-web", Cpuset(cpus("0-6")), pid=7)
    for place in (
        *(("/pods/c-web", cpus("3")), ("/pods/other", ALL), ("", CpuSet())),
        ("/pods/c-web", cpus("0-6")),
    ):
        assert delivery.verify(state, lambda _pid, place=place: place) == []  # type: ignore[misc]
    delivery.gone("c-web")
    assert delivery.verify(state, lambda _pid: ("/pods/c-web", ALL)) == []


def test_what_is_pushed_is_in_no_answer() -> None:
    """It stays pending until it is known how it went, and no answer repeats it meanwhile."""
    delivery, state = Delivery(), _state(PLAIN)
    delivery.has("c-web", Cpuset(ALL))
    now = Cpuset(cpus("0-5"))
    with delivery.under_way("c-web", now):
        assert delivery.is_under_way("c-web", now)
        assert not delivery.is_under_way("c-web", Cpuset(ALL))
        assert delivery.pending(state) == {"c-web": now}
        assert delivery.next(state) == ()
    assert not delivery.is_under_way("c-web", now)
    assert delivery.pending(state) == {}


def test_a_push_that_failed_is_pending_again() -> None:
    """The next answer has it."""
    delivery, state = Delivery(), _state(PLAIN)
    delivery.has("c-web", Cpuset(ALL))
    with pytest.raises(KataPinError), delivery.under_way("c-web", Cpuset(cpus("0-5"))):
        raise KataPinError("no")
    assert delivery.next(state) == (Update("c-web", Cpuset(cpus("0-5"))),)


@pytest.mark.parametrize("told", ["0-7", "0-3", ""])
def test_the_runtimes_word_counts_more_than_a_pushs_end(told: str) -> None:
    """What it tells of a container while it is pushed is what the container has, or has no more."""
    delivery, state = Delivery(), _state(PLAIN)
    delivery.has("c-web", Cpuset(ALL))
    with delivery.under_way("c-web", Cpuset(cpus("0-5"))):
        delivery.gone("c-web")
        if told:
            delivery.has("c-web", Cpuset(cpus(told)))
    assert delivery.pending(state) == ({"c-web": Cpuset(cpus("0-5"))} if told else {})


@pytest.mark.parametrize("fails", [False, True])
def test_an_answer_overtakes_a_push(fails: bool) -> None:
    """A newer cpuset does not wait for a push that hangs; it is sent once more afterwards."""
    delivery = Delivery()
    delivery.has("c-web", Cpuset(ALL))
    newer = _state(replace(PLAIN, shared=cpus("0-3")))
    with contextlib.suppress(KataPinError), delivery.under_way("c-web", Cpuset(cpus("0-5"))):
        assert delivery.next(_state(PLAIN)) == ()
        assert delivery.next(newer) == (Update("c-web", Cpuset(cpus("0-3"))),)
        assert delivery.next(newer) == ()
        if fails:
            raise KataPinError("no answer")
    assert delivery.pending(newer) == {"c-web": Cpuset(cpus("0-3"))}
    with delivery.under_way("c-web", Cpuset(cpus("0-3"))):
        pass
    assert delivery.pending(newer) == {}


@pytest.mark.parametrize("last", ["0-3", "0-5", "0-7"])
def test_an_overtaken_push_of_which_the_runtime_tells(last: str) -> None:
    """What it tells while the push goes on may be over when that ends: it is sent once more."""
    delivery = Delivery()
    newer = _state(replace(PLAIN, shared=cpus("0-3")))
    delivery.has("c-web", Cpuset(ALL))
    with delivery.under_way("c-web", Cpuset(cpus("0-5"))):
        delivery.next(newer)
        delivery.has("c-web", Cpuset(cpus(last)))
    assert delivery.pending(newer) == {"c-web": Cpuset(cpus("0-3"))}
    delivery.has("c-web", Cpuset(cpus("0-3")))
    assert delivery.pending(newer) == {}


def test_an_overtaken_push_across_connections() -> None:
    """A container that is gone meanwhile stays so; one that is told anew is sent its cpuset."""
    delivery = Delivery()
    newer = _state(replace(PLAIN, shared=cpus("0-3")))
    for told in (False, True):
        delivery.has("c-web", Cpuset(ALL))
        with delivery.under_way("c-web", Cpuset(cpus("0-5"))):
            delivery.next(newer)
            delivery.clear()
            if told:
                delivery.has("c-web", Cpuset(cpus("0-3")))
        assert set(delivery.pending(newer)) == ({"c-web"} if told else set())
        assert delivery.knows("c-web") == told


@pytest.mark.parametrize("fails", [False, True])
def test_a_last_cpuset_overtakes_a_push(fails: bool) -> None:
    """What is given back goes out once more after a push that it overtook, and then no more."""
    delivery, last = Delivery(), Cpuset(ALL)
    delivery.has("c-web", Cpuset(cpus("0-3")))
    with contextlib.suppress(KataPinError), delivery.under_way("c-web", Cpuset(cpus("0-1"))):
        delivery.part("c-web", last)
        assert delivery.next(AllocState()) == (Update("c-web", last),)
        delivery.has("c-web", last)
        if fails:
            raise KataPinError("no answer")
    assert delivery.parts("c-web")
    assert delivery.next(AllocState()) == (Update("c-web", last),)
    assert not delivery.parts("c-web")
    assert delivery.next(AllocState()) == ()


@pytest.mark.parametrize("told", [False, True])
def test_a_last_cpuset_outlives_an_earlier_push(told: bool) -> None:
    """The end of a push that began before, of which the runtime may tell, is not what was meant."""
    delivery, last = Delivery(), Cpuset(ALL)
    delivery.has("c-web", Cpuset(cpus("0-3")))
    with delivery.under_way("c-web", Cpuset(cpus("0-1"))):
        delivery.part("c-web", last)
        if told:
            delivery.has("c-web", Cpuset(cpus("0-1")))
    assert delivery.pending(AllocState()) == {"c-web": last}
    with delivery.under_way("c-web", last):
        pass
    assert not delivery.parts("c-web")


def test_one_container_alone() -> None:
    """The answer to a container's own update can be asked for that container only."""
    delivery, state = Delivery(), _state(PLAIN, OWN)
    for name in ("c-web", "c-db"):
        delivery.has(name, Cpuset(ALL))
    assert [one.container_id for one in delivery.next(state, only="c-db")] == ["c-db"]
    assert set(delivery.pending(state)) == {"c-web"}


def test_a_push_outlives_a_connection() -> None:
    """The runtime goes away and comes back while a push ends: its word counts."""
    delivery, state = Delivery(), _state(PLAIN)
    delivery.has("c-web", Cpuset(ALL))
    with delivery.under_way("c-web", Cpuset(cpus("0-5"))):
        delivery.clear()
    assert delivery.next(state) == ()
