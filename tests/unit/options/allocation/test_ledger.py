"""What a runtime has reported, and what is sent to it.

tests/property/test_alloc_ledger.py has what is pending after any answers, pushes and reports.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from kata_pin.base.allocation import AllocState, ContainerRequest, Grant, Limits
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import KataPinError
from kata_pin.base.values import CpuClass, GrantKind
from kata_pin.options.allocation.ledger import Ledger, cpuset_for
from kata_pin.peers.nri.messages import MAX_CONTAINERS
from kata_pin.peers.nri.replies import Cpuset, Update
from tests.support.allotted import request
from tests.support.world import cpus

ALL = CpuSet(range(8))


def made(online: Callable[[], CpuSet] | None = None) -> Ledger:
    """Return an empty ledger; no time passes."""
    return Ledger(lambda: 0.0, online)


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
        assert not cpuset_for(replace(OWN, request=one), _state(OWN))
    assert cpuset_for(OWN, _state(OWN)) == Cpuset(cpus("6-7"))
    runc = replace(OWN.request, quota_us=None, pod=replace(OWN.request.pod, kata=False))
    assert cpuset_for(replace(OWN, request=runc), _state(OWN)) == Cpuset(cpus("6-7"))


def test_limits_are_sent_with_the_cpuset_and_alone() -> None:
    """To a Kata container without a quota too; pending until reported, and again if changed."""
    heavy = replace(PLAIN, limits=Limits(shares=512))
    kata = replace(OWN, limits=Limits(shares=4), request=replace(OWN.request, quota_us=None))
    assert cpuset_for(kata, _state(kata)) == Cpuset(limits=Limits(shares=4))
    ledger = made()
    name, cpuset = PLAIN.container_id, Cpuset(cpus("0-5"), limits=Limits(1024, 1000, 1000, 1 << 30))
    ledger.requested(PLAIN.request, "s")
    ledger.reported(name, cpuset)
    assert ledger.pending(_state(PLAIN)) == {}
    (update,) = ledger.updates(_state(heavy))
    assert update == Update(name, Cpuset(cpus("0-5"), limits=Limits(shares=512)))
    assert ledger.pending(_state(heavy)) == {}
    entry = ledger.get(name)
    assert entry is not None
    assert entry.confirmed == replace(cpuset, limits=Limits(512, 1000, 1000, 1 << 30))
    ledger.reported(name, cpuset)  # somebody else's shares
    assert list(ledger.pending(_state(heavy))) == [name]


def test_a_report_of_a_push_with_limits() -> None:
    """The runtime reports all limits of the container: the push is confirmed by it all the same."""
    heavy = replace(PLAIN, limits=Limits(shares=512))
    ledger, name = made(), PLAIN.container_id
    ledger.requested(PLAIN.request, "s")
    ledger.reported(name, Cpuset(cpus("0-5"), limits=Limits(1024, memory=1 << 30)))
    pushed = ledger.pending(_state(heavy))[name]
    with ledger.pushing(name, pushed):
        ledger.reported(name, Cpuset(cpus("0-5"), limits=Limits(512, memory=1 << 30)))
    assert ledger.pending(_state(heavy)) == {}
    with ledger.pushing(name, pushed):
        ledger.reported(name, Cpuset(cpus("0-5"), limits=Limits(77, memory=1 << 30)))
    assert list(ledger.pending(_state(heavy))) == [name]


def test_overhead_has_a_place_in_an_exclusive_cpuset() -> None:
    """The VM's own CPUs and the housekeeping pool are in it; no VM is written to itself."""
    vm = replace(_grant(request("db"), exclusive="5"), kind=GrantKind.SANDBOX)
    vm = replace(vm, request=replace(vm.request, container_id="vm:s-db"))
    assert cpuset_for(OWN, _state(OWN, vm)).cpus == cpus("5-7")
    assert cpuset_for(OWN, _state(OWN, housekeeping="0")).cpus == cpus("0,6-7")
    shares = _grant(request("x", cpus=1), shared="1")
    assert cpuset_for(shares, _state(shares, housekeeping="0")).cpus == cpus("1")
    assert not cpuset_for(vm, _state(vm))


def test_memory_nodes_go_along() -> None:
    """Where the policy names memory nodes they are written beside the CPUs."""
    assert cpuset_for(replace(OWN, mems=cpus("1")), _state(OWN)) == Cpuset(cpus("6-7"), cpus("1"))


def test_a_vm_is_not_widened_by_what_is_offline() -> None:
    """CPUs that went offline cannot be written; what is left online of the old ones stays."""
    online = cpus("0-4,6-7")
    ledger, state = made(lambda: online), _state(OWN)
    ledger.reported("c-db", Cpuset(cpus("4-5")))
    sent = [[update.cpuset.cpus for update in ledger.updates(state)] for _ in range(3)]
    assert sent == [[cpus("4,6-7")], [cpus("6-7")], []]
    ledger.reported("c-db", Cpuset(cpus("5")))
    sent = [[update.cpuset.cpus for update in ledger.updates(state)] for _ in range(2)]
    assert sent == [[cpus("6-7")], []]


def test_undecided_memory_nodes_do_not_wait() -> None:
    """Memory nodes that a container has and no policy decided are no difference."""
    ledger = made()
    ledger.reported("c-web", Cpuset(cpus("0-5"), cpus("0")))
    assert ledger.updates(_state(PLAIN)) == ()


def test_a_cgroup_that_allows_more_is_updated_again() -> None:
    """What an update left undone, or another program wrote, is found and sent again."""
    ledger, state = made(), _state(PLAIN, OWN)
    ledger.reported("c-web", Cpuset(cpus("0-5")), pid=7)
    ledger.reported("c-db", Cpuset(cpus("6-7")), pid=8)
    places: dict[int | str, tuple[str, CpuSet]] = {7: ("/pods/c-web", cpus("0-5"))}
    assert ledger.misplaced(state, places.__getitem__) == []
    places[7] = ("/pods/c-web", ALL)
    assert ledger.misplaced(state, places.__getitem__) == ["c-web"]
    assert [one.container_id for one in ledger.updates(state)] == ["c-web"]


def test_what_is_no_sign_of_anything() -> None:
    """Fewer CPUs, another process of that number, a process that is gone, an update that is due."""
    ledger, state = made(), _state(PLAIN)
    ledger.reported("c-web", Cpuset(cpus("0-6")), pid=7)
    for place in (
        *(("/pods/c-web", cpus("3")), ("/pods/other", ALL), ("", CpuSet())),
        ("/pods/c-web", cpus("0-6")),
    ):
        assert ledger.misplaced(state, lambda _pid, place=place: place) == []  # type: ignore[misc]
    ledger.ended("c-web")
    assert ledger.misplaced(state, lambda _pid: ("/pods/c-web", ALL)) == []


def test_a_vms_cgroup_is_that_of_all_its_containers() -> None:
    """Kata's with a cpuset, once they run: none of them has to have all of its CPUs."""
    other = request("log", cpus=1)
    pod = replace(other.pod, sandbox_id=OWN.request.pod.sandbox_id)
    both = OWN, _grant(replace(other, pod=pod), exclusive="5")
    ledger, state = made(), _state(*both)
    for grant, had in zip(both, ("6-7", "5"), strict=True):
        ledger.requested(grant.request, "s-db")
        ledger.reported(grant.container_id, Cpuset(cpus(had)), pid=7, runs=True)
    place = {"s-db": ("/pods/kata_s-db", cpus("5-7"))}
    assert ledger.misplaced(state, lambda one: place[str(one)]) == []
    place["s-db"] = ("/other", ALL)
    assert ledger.misplaced(state, lambda one: place[str(one)]) == []
    place["s-db"] = ("/pods/kata_s-db", ALL)
    assert ledger.misplaced(state, lambda one: place[str(one)]) == ["c-db", "c-log"]
    assert ledger.updates(state) == (
        Update("c-db", Cpuset(cpus("6-7"))),
        Update("c-log", Cpuset(cpus("5"))),
    )


def test_a_container_of_katas_that_does_not_run_yet_is_in_no_cgroup() -> None:
    """Kata confines the VM when it makes the container; one without a cpuset confines nothing."""
    ledger, state = made(), _state(OWN)
    ledger.requested(OWN.request, "s-db")
    ledger.reported("c-db", Cpuset(cpus("6-7")), pid=7)
    assert ledger.misplaced(state, lambda _: ("/pods/kata_s-db", ALL)) == []
    ledger.reported("c-db", Cpuset(), runs=True)
    assert ledger.misplaced(state, lambda _: ("/pods/kata_s-db", ALL)) == []
    ledger.reported("c-db", Cpuset(cpus("6-7")))
    assert ledger.misplaced(state, lambda _: ("/pods/kata_s-db", ALL)) == ["c-db"]


def test_owners_leave_before_others_come() -> None:
    """Narrowed cpusets come first; a container without a cpuset had every CPU."""
    ledger, state = made(), _state(PLAIN, OWN, _grant(request("new", kata=False), "", "0-5"))
    ledger.reported("c-web", Cpuset(cpus("0-3")))
    ledger.reported("c-db", Cpuset(cpus("4-7")))
    ledger.reported("c-new", Cpuset())
    assert [one.container_id for one in ledger.updates(state)] == ["c-db", "c-new", "c-web"]


def test_a_part_or_more_is_one_step() -> None:
    """Narrowing and widening alone need no step between, nor does a container without a VM."""
    for there in ("5-7", "6", ""):
        ledger = made()
        ledger.reported("c-db", Cpuset(cpus(there)))
        assert [one.cpuset.cpus for one in ledger.updates(_state(OWN))] == [cpus("6-7")]
    ledger = made()
    ledger.reported("c-web", Cpuset(cpus("6-7")))
    assert [one.cpuset.cpus for one in ledger.updates(_state(PLAIN))] == [cpus("0-5")]


def test_one_container_alone() -> None:
    """The answer to a container's own update can be asked for that container only."""
    ledger, state = made(), _state(PLAIN, OWN)
    for name in ("c-web", "c-db"):
        ledger.reported(name, Cpuset(ALL))
    assert [one.container_id for one in ledger.updates(state, only="c-db")] == ["c-db"]
    assert set(ledger.pending(state)) == {"c-web"}


@pytest.mark.parametrize("fails", [False, True])
def test_an_answer_overtakes_a_push(fails: bool) -> None:
    """A newer cpuset does not wait for a push that hangs; it is sent once more afterwards."""
    ledger = made()
    ledger.reported("c-web", Cpuset(ALL))
    newer = _state(replace(PLAIN, shared=cpus("0-3")))
    with contextlib.suppress(KataPinError), ledger.pushing("c-web", Cpuset(cpus("0-5"))):
        assert ledger.updates(_state(PLAIN)) == ()
        assert ledger.updates(newer) == (Update("c-web", Cpuset(cpus("0-3"))),)
        assert ledger.updates(newer) == ()
        if fails:
            raise KataPinError("no answer")
    assert ledger.pending(newer) == {"c-web": Cpuset(cpus("0-3"))}
    with ledger.pushing("c-web", Cpuset(cpus("0-3"))):
        pass
    assert ledger.pending(newer) == {}


def test_an_overtaken_push_across_connections() -> None:
    """A container that has ended stays so; one that is reported again is sent its cpuset."""
    ledger = made()
    newer = _state(replace(PLAIN, shared=cpus("0-3")))
    for told in (False, True):
        ledger.reported("c-web", Cpuset(ALL))
        with ledger.pushing("c-web", Cpuset(cpus("0-5"))):
            ledger.updates(newer)
            ledger.disconnected()
            if told:
                ledger.reported("c-web", Cpuset(cpus("0-3")))
        assert set(ledger.pending(newer)) == ({"c-web"} if told else set())
        assert ledger.knows("c-web") == told


@pytest.mark.parametrize("fails", [False, True])
def test_a_last_cpuset_overtakes_a_push(fails: bool) -> None:
    """A last cpuset is sent again after a push that it overtook, and then no more."""
    ledger, last = made(), Cpuset(ALL)
    ledger.reported("c-web", Cpuset(cpus("0-3")))
    with contextlib.suppress(KataPinError), ledger.pushing("c-web", Cpuset(cpus("0-1"))):
        ledger.restore("c-web", last)
        assert ledger.updates(AllocState()) == (Update("c-web", last),)
        ledger.reported("c-web", last)
        if fails:
            raise KataPinError("no answer")
    assert ledger.is_restoring("c-web")
    assert ledger.updates(AllocState()) == (Update("c-web", last),)
    assert not ledger.is_restoring("c-web")
    assert ledger.updates(AllocState()) == ()


def test_who_is_told() -> None:
    """Until its end, or a disconnection; a container left to another plugin stays so."""
    known = made()
    for name in ("a", "b"):
        known.requested(request(name), "s-1")
    known.requested(request("c"), "s-2")
    known.leave_alone("c-b")
    known.leave_alone("c-unknown")
    known.requested(request("b", cpus=2), "s-1")
    assert [one.container_id for one, _, _ in known.requests()] == ["c-a", "c-c"]
    assert known.of_sandbox("s-1") == ["c-a", "c-b"]
    known.ended("c-a")
    assert known.get("c-a") is None
    known.disconnected()
    assert list(known.requests()) == []


def test_a_runtime_that_tells_too_many() -> None:
    """Containers beyond the limit of Synchronize are not recorded; known ones are followed."""
    known = made()
    one = request("a")
    for number in range(MAX_CONTAINERS + 1):
        known.requested(replace(one, container_id=f"c-{number}"), "s")
    known.requested(replace(request("a", cpus=2), container_id="c-0"), "s")
    found = {one.container_id: one.cpu_millis for one, _, _ in known.requests()}
    assert len(found) == MAX_CONTAINERS
    assert found["c-0"] == 2000
