"""The allocator with a real registry: what is stored, what follows, when it is suspended."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kata_pin.config.alloc import Fail
from kata_pin.config.tree import Config, Mode
from kata_pin.daemon.allocation import pass_view
from kata_pin.daemon.allocation.allocator import Allocator
from kata_pin.daemon.allocation.plugin_conflicts import EXPIRY_S, PODS, PluginConflicts
from kata_pin.daemon.store.containers import Registry
from kata_pin.daemon.store.grants import AllocStore
from kata_pin.daemon.store.node_events import NodeEvents
from kata_pin.errors import StateError
from kata_pin.model.alloc import AllocState, PodRequest, PodSpec, RefusalKind, Running
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.node import KubeletState
from kata_pin.model.sandbox import Container, ContainerState
from kata_pin.model.settings import CpuClass
from tests.support.allotted import Host, Moves, allocator, looking, request
from tests.support.world import cpus, flat, without

ASIDE = "another NRI plugin decides the cpusets of this node: one that is asked before kata-pin"
STATIC = KubeletState("static", cpus("0-3"))


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    one = Registry(str(tmp_path / "registry.db"), boot_id="b")
    yield one
    one.close()


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def moves() -> Moves:
    return Moves()


@pytest.fixture
def begun(registry: Registry, host: Host, moves: Moves) -> Allocator:
    one = allocator(registry, host, moves)
    moves.requested.clear()
    return one


def stored(registry: Registry) -> AllocState | None:
    return AllocStore(registry).read()


def test_a_decision_is_stored_and_told(begun: Allocator, registry: Registry, moves: Moves) -> None:
    """Grants are in the registry, and every sandbox whose CPUs changed gets a pass."""
    begun.admit(request("web"))
    begun.admit(request("db", "exclusive", cpus=2))
    grant = begun.state.get("c-db")
    assert grant is not None
    assert len(grant.exclusive) == 2
    assert stored(registry) == begun.state
    assert moves.requested[-1][0] == {"s-web", "s-db"}
    begun.release(["c-db"], "test")
    assert begun.state.exclusive == CpuSet()
    assert stored(registry) == begun.state
    assert moves.requested[-1][0] >= {"s-web"}


def test_a_restart_finds_the_same(begun: Allocator, registry: Registry, host: Host) -> None:
    """Another daemon over the same registry, killed or not, holds the same state."""
    for number in range(3):
        begun.admit(request(f"db{number}", "exclusive", cpus=1))
    moved = Moves()
    again = allocator(registry, host, moved)
    assert again.state == begun.state
    assert moved.requested == []


def test_nothing_of_a_failed_transaction_stays(begun: Allocator, registry: Registry) -> None:
    """A record that cannot be written takes the decision of the same event back."""
    before = begun.state

    def event() -> None:
        with begun.grants.together():
            begun.admit(request("db", "exclusive", cpus=2))
            assert begun.state != before
            raise StateError("no room")

    with pytest.raises(StateError):
        event()
    assert begun.state == before
    assert stored(registry) == before


def test_nobody_hears_of_what_is_not_stored(
    begun: Allocator, moves: Moves, caplog: pytest.LogCaptureFixture
) -> None:
    """Notes, refusals and passes follow the transaction, and only one that holds."""

    def event(*, full: bool) -> None:
        with begun.grants.together():
            begun.admit(request("typo", "shared", cpus=1))
            begun.admit(request("db", "exclusive", cpus=64))
            assert (moves.requested, begun.news.refusals, begun.notes) == ([], {}, ())
            if full:
                raise StateError("no room")

    with caplog.at_level(logging.WARNING):
        with pytest.raises(StateError):
            event(full=True)
        assert (moves.requested, begun.news.refusals, begun.notes) == ([], {}, ())
        assert caplog.text == ""
        event(full=False)
    assert len(moves.requested) == 2
    assert begun.news.refusals.total() == len(begun.notes) == 1
    begun.admit(request("late"))
    assert len(moves.requested) == 3


def test_decision_and_record_are_one_transaction(
    begun: Allocator, registry: Registry, tmp_path: Path
) -> None:
    """A reader of the file meanwhile sees both or none."""

    def seen() -> tuple[bool, bool]:
        copy = Registry.copy_of(str(tmp_path / "registry.db"), boot_id="b")
        state = AllocStore(copy).read()
        known = (copy.container("c-db") is not None, bool(state and state.get("c-db")))
        copy.close()
        return known

    with begun.grants.together():
        begun.admit(request("db", "exclusive", cpus=2))
        registry.record(Container("c-db", "s-db"), stamp_ns=1, pid=0)
        assert seen() == (False, False)
    assert seen() == (True, True)


def test_off_by_default(registry: Registry, host: Host) -> None:
    """Without a policy nothing is decided, shown or stored."""
    off = allocator(registry, host, policy="none")
    off.admit(request("db", "exclusive", cpus=2))
    recorded = (Container("c", "s", cpus=cpus("1")),)
    view = pass_view.view(off, recorded)
    assert (view.containers, view.pool, off.on) == (recorded, CpuSet(), False)
    assert stored(registry) is None
    assert off.notes == ()


@pytest.mark.parametrize("why", ["kubelet", "observe"])
def test_it_is_suspended(registry: Registry, host: Host, why: str) -> None:
    """While the kubelet is static, or kata-pin observes, nothing is refused or granted."""
    if why == "kubelet":
        host.kubelet = STATIC
    else:
        host.config = Config(mode=Mode.OBSERVE)
    one = allocator(registry, host, fail=Fail.STRICT)
    decision = one.admit(request("db", "exclusive", cpus=2))
    assert (decision.refused, decision.state.grants) == (None, {})
    assert not one.decides
    assert why in one.suspended
    recorded = (Container("c", "s", cpus=cpus("1")), Container("d", "s"))
    assert pass_view.view(one, recorded).containers == recorded
    assert pass_view.view(one, recorded).pool == CpuSet()
    assert [note.code for note in one.notes] == ["alloc-suspended"]


def test_it_comes_back_when_the_kubelet_lets_go(begun: Allocator, host: Host) -> None:
    """A checkpoint that becomes static takes grants out of force; they come back with its end."""
    begun.admit(request("db", "exclusive", cpus=2))
    mine = (Container("c-db", "s-db", cpus=cpus("0-7")),)
    given = pass_view.view(begun, mine).containers[0].cpus
    assert given is not None
    assert len(given) == 2
    host.kubelet = STATIC
    assert pass_view.view(begun, mine).containers == mine
    host.kubelet = None
    assert pass_view.view(begun, mine).containers[0].cpus == given


def test_another_plugin_is_left_alone(begun: Allocator) -> None:
    """Another plugin's cpuset is not replaced; after some in a row nothing is decided."""
    for number in range(PODS):
        assert begun.decides
        begun.admit(request(f"web{number}"), foreign=True)
    assert "another NRI plugin" in begun.suspended
    assert begun.state.grants == {}
    begun.admit(request("db", "exclusive", cpus=2))
    assert begun.decides
    assert begun.state.get("c-db") is not None


def test_a_suspension_ends_by_itself(begun: Allocator, caplog: pytest.LogCaptureFixture) -> None:
    """Beside another plugin, until nothing was seen of it for a while: both are logged."""
    seconds = 0.0
    begun.conflicts = PluginConflicts(NodeEvents(), lambda: seconds)
    with caplog.at_level(logging.WARNING):
        for number in range(PODS):
            begun.admit(request(f"web{number}"), foreign=True)
        for _ in range(2):
            begun.follow_host()
        assert [note.code for note in begun.notes] == ["alloc-suspended"]
        seconds = EXPIRY_S
        begun.follow_host()
    assert begun.suspended == ""
    said = [one.getMessage() for one in caplog.records]
    assert said == [f"allocator: suspended: {ASIDE}", "allocator: deciding again"]


def test_a_strict_container_is_tried_again(registry: Registry, host: Host) -> None:
    """A strict container is adjusted again while a plugin is only suspected."""
    one = allocator(registry, host, fail=Fail.STRICT)
    wants = request("db", "exclusive", cpus=2)
    one.conflicts.answered(wants, "cpuset")
    one.conflicts.ended(wants.container_id)
    assert one.admit(request("db")).state.grants == {}
    assert one.admit(wants).refused is None
    assert len(one.state.exclusive) == 2


def test_who_asked_is_told_and_who_did_not_is_not(
    registry: Registry, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    """Beside another plugin only a container that asked for its own CPUs is refused."""
    one = allocator(registry, host, fail=Fail.STRICT)
    assert one.admit(request("web"), foreign=True).refused is None
    with caplog.at_level(logging.WARNING):
        refused = one.admit(request("db", "exclusive", cpus=2), foreign=True).refused
    assert refused is not None
    assert (refused.kind, refused.strict) == (RefusalKind.FOREIGN_PLUGIN, True)
    assert "shop/db app: creation refused" in caplog.text
    assert one.news.refusals == {RefusalKind.FOREIGN_PLUGIN: 1}
    assert one.news.refused[0].container_id == "c-db"


def test_not_enough_cpus(begun: Allocator) -> None:
    """A container that cannot be served runs in the shared pool, and that is shown."""
    decision = begun.admit(request("db", "exclusive", cpus=64))
    assert decision.refused is not None
    assert not decision.refused.strict
    assert begun.news.refused[0].refusal.kind is RefusalKind.NOT_ENOUGH_CPUS
    mine = (Container("c-db", "s-db"),)
    assert pass_view.view(begun, mine).containers[0].cpus == CpuSet(range(8))


def test_a_refusal_is_told_once(begun: Allocator) -> None:
    """A container retried in each pass is reported again only after it was served."""
    begun.set_orders({"shop/db": CpuClass.EXCLUSIVE})
    one = Container("c1", "s1", pod_name="db", pod_namespace="shop", pod_uid="u1", name="app")
    pass_view.view(begun, (one,))
    much = replace(one, quota_us=6_400_000, period_us=100_000, shares=65_536)
    for _ in range(3):
        pass_view.view(begun, (much,))
    assert begun.news.refusals.total() == 1
    fits = replace(one, quota_us=200_000, period_us=100_000, shares=2048)
    pass_view.view(begun, (fits,))
    assert len(begun.state.exclusive) == 2
    pass_view.view(begun, (much,))
    assert begun.news.refusals.total() == 2


def test_strict_refuses_nobody_who_runs(
    registry: Registry, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    """Found running, without NRI: it is in the shared pool with a grant, reported once."""
    one = allocator(registry, host, fail=Fail.STRICT)
    one.set_orders({"shop/db": CpuClass.EXCLUSIVE})
    record = Container("c1", "s1", pod_name="db", pod_namespace="shop", pod_uid="u1", name="app")
    much = replace(record, quota_us=6_400_000, period_us=100_000, shares=65_536)
    with caplog.at_level(logging.WARNING):
        views = [pass_view.view(one, (much,)) for _ in range(3)]
    assert {view.containers[0].cpus for view in views} == {CpuSet(range(8))}
    assert stored(registry) == one.state
    assert one.news.refusals == {RefusalKind.NOT_ENOUGH_CPUS: 1}
    assert [refused.refusal.strict for refused in one.news.refused] == [False]
    assert caplog.text.count("runs in the shared pool") == 1


def test_a_policy_that_nobody_has(registry: Registry, host: Host) -> None:
    """A wrong setting does not stop the daemon: it is logged, and nothing is decided."""
    one = allocator(registry, host, policy="crane")
    assert "unknown policy 'crane'" in one.suspended
    assert one.admit(request("db", "exclusive", cpus=2)).state.grants == {}


def test_an_offline_cpu(begun: Allocator, host: Host, moves: Moves) -> None:
    """A CPU that goes is replaced at the next look, and the sandbox gets a pass."""
    begun.admit(request("db", "exclusive", cpus=2))
    had = begun.state.exclusive
    host.topology = without(flat(8), str(had.first))
    moves.requested.clear()
    begun.follow_host()
    assert had.first not in begun.state.cpus
    assert len(begun.state.exclusive) == 2
    assert any("s-db" in told for told, _ in moves.requested)


def test_what_could_not_be_stored_is_decided_again(
    begun: Allocator, registry: Registry, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk while CPUs go offline: with the next event they are in no grant."""
    begun.admit(request("db", "exclusive", cpus=2))
    held = begun.state.exclusive
    host.topology = without(flat(8), str(held.first))

    def full(_store: AllocStore, _state: AllocState) -> None:
        raise StateError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(AllocStore, "write", full)
        with pytest.raises(StateError):
            begun.follow_host()
        assert begun.state.exclusive == held
    begun.follow_host()
    assert begun.state.exclusive <= host.topology.online
    assert stored(registry) == begun.state


def test_lost_state_is_rebuilt_from_what_runs(begun: Allocator) -> None:
    """Containers that run on CPUs that can be theirs keep them."""
    begun.reconcile([Running(request("db", "exclusive", cpus=2), cpus("4-5")), *_shared()])
    assert begun.state.exclusive == cpus("4-5")


def _shared() -> list[Running]:
    return [Running(request("web", kata=False), cpus("0-7"))]


def test_a_pass_admits_what_no_event_told(begun: Allocator) -> None:
    """A container that hooks recorded gets CPUs, which wait for its next instance."""
    one = Container("c1", "s1", name="app", pod_name="db", pod_namespace="shop")
    begun.set_orders({"shop/db": CpuClass.EXCLUSIVE})
    asks = replace(one, quota_us=100_000, period_us=100_000, shares=1024)
    given = pass_view.view(begun, (asks,)).containers[0].cpus
    assert given is not None
    assert len(given) == 1
    assert pass_view.view(begun, (asks,)).allocated == {"c1": given}
    assert begun.state.exclusive == given
    pass_view.view(begun, (replace(asks, state=ContainerState.STOPPED),))
    assert begun.state.exclusive == given
    next_one = replace(asks, id="c2")
    assert pass_view.view(begun, (next_one,)).allocated == {"c2": given}
    begun.release_sandbox("s1")
    assert begun.state.exclusive == CpuSet()


def test_a_record_that_tells_more_later(begun: Allocator) -> None:
    """A container of which only its name was known gets what it asks for once that is recorded."""
    begun.set_orders({"shop/db": CpuClass.EXCLUSIVE})
    nameless = Container("c1", "s1")
    pass_view.view(begun, (nameless,))
    bare = replace(nameless, pod_name="db", pod_namespace="shop", pod_uid="u1", name="app")
    pass_view.view(begun, (bare,))
    assert begun.state.exclusive == CpuSet()
    sized = replace(bare, quota_us=200_000, period_us=100_000, shares=2048)
    assert len(pass_view.view(begun, (sized,)).containers[0].cpus or ()) == 2
    had = begun.state.exclusive
    pass_view.view(begun, (bare,))  # says nothing
    assert begun.state.exclusive == had
    begun.ledger.connected()  # the runtime itself tells sizes
    pass_view.view(begun, (replace(sized, quota_us=300_000, shares=3072),))
    assert begun.state.exclusive == had


def test_a_container_that_is_its_own_sandbox(begun: Allocator, moves: Moves) -> None:
    """Without pods a container's id is its sandbox's: it and its VM have a grant each."""
    alone = Container("c1", "c1", quota_us=200_000, period_us=100_000, shares=2048)
    begun.set_orders({"c1": CpuClass.EXCLUSIVE})
    given = pass_view.view(begun, (alone,)).containers[0].cpus
    assert given is not None
    assert begun.state.exclusive == given
    assert len(given) == 2
    assert moves.requested[-1][0] == {"c1"}
    begun.release_sandbox("c1")
    assert begun.state.grants == {}


def test_a_pass_leaves_a_foreign_cpuset(begun: Allocator) -> None:
    """A recorded cpuset without a grant is another program's: it stays, and so does the record."""
    mine = (Container("c1", "s1", cpus=cpus("2")),)
    assert pass_view.view(begun, mine).containers == mine
    assert begun.state.get("c1") is None


def test_a_sandbox_that_is_over(begun: Allocator) -> None:
    """What its containers had is in the shared pool again."""
    begun.admit(request("db", "exclusive", cpus=2))
    begun.release_sandbox("s-db")
    assert begun.state.exclusive == CpuSet()
    assert begun.state.get("c-db") is None


def test_what_is_left_comes_to_others_with_the_pass(begun: Allocator, moves: Moves) -> None:
    """Others get a container's former CPUs when a pass over it has ended."""
    begun.admit(request("web"))
    begun.admit(request("db", "exclusive", cpus=4))
    moves.requested.clear()
    begun.change(request("db", "exclusive", cpus=2), "test")
    gone = begun.grants.held_back
    assert len(gone) == 2
    web, now = begun.state.get("c-web"), begun.now.get("c-web")
    assert web is not None
    assert now is not None
    assert web.cpus == now.cpus | gone
    moves.requested.clear()
    begun.grants.left("s-web")
    assert begun.grants.held_back == gone
    begun.grants.left("s-db")
    assert begun.now == begun.state
    assert moves.requested == [(frozenset({"s-web"}), "handed over")]


def test_two_moves_before_one_pass(begun: Allocator) -> None:
    """CPUs that went from an owner to the pool and to another owner are held back for the first."""
    begun.admit(request("db", "exclusive", cpus=2))
    begun.change(request("db", "none", cpus=2), "test")
    assert begun.grants.held_back == CpuSet()
    assert begun.now is begun.state
    begun.admit(request("web", "exclusive", cpus=4))
    assert len(begun.grants.held_back) == 2
    assert begun.now is begun.now
    begun.grants.left("s-db")
    assert begun.grants.held_back == CpuSet()


def test_an_owner_that_ends_holds_nothing_back(begun: Allocator, moves: Moves) -> None:
    """The end of a sandbox that had not left yet releases its CPUs to others."""
    begun.admit(request("web"))
    begun.admit(request("db", "exclusive", cpus=4))
    begun.change(request("db", "exclusive", cpus=2), "test")
    moves.requested.clear()
    begun.release_sandbox("s-db")
    assert begun.grants.held_back == CpuSet()
    assert moves.requested[-1][0] == {"s-web"}


def test_a_failed_transaction_leaves_nothing_to_be_left(begun: Allocator) -> None:
    """What is undone is not waited for."""
    begun.admit(request("db", "exclusive", cpus=4))

    def event() -> None:
        with begun.grants.together():
            begun.change(request("db", "exclusive", cpus=2), "test")
            assert begun.grants.held_back
            raise StateError("no room")

    with pytest.raises(StateError):
        event()
    assert begun.grants.held_back == CpuSet()


def test_orders_change_who_runs(begun: Allocator, moves: Moves) -> None:
    """none to share, exclusive to share, and back, without recreating the container."""
    begun.admit(request("web", cpus=2))
    moves.requested.clear()
    for cpu_class in (CpuClass.SHARE, CpuClass.EXCLUSIVE, CpuClass.SHARE):
        begun.set_orders({"shop/web": cpu_class})
        grant = begun.state.get("c-web")
        assert grant is not None
        assert grant.cpu_class is cpu_class
        assert len(grant.own) == 2
    assert begun.state.shared == CpuSet(range(8))
    begun.set_orders({})
    grant = begun.state.get("c-web")
    assert grant is not None
    assert grant.cpu_class is CpuClass.NONE
    assert moves.requested[0] == (frozenset({"s-web"}), "override")


def test_orders_that_change_nothing_write_nothing(begun: Allocator, moves: Moves) -> None:
    """The same overrides again, or those of other pods, move no container."""
    begun.admit(request("web", cpus=2))
    begun.set_orders({"shop/web": CpuClass.SHARE})
    moves.requested.clear()
    begun.set_orders({"shop/web": CpuClass.SHARE, "shop/other": CpuClass.EXCLUSIVE})
    assert moves.requested == []


def test_a_sandbox_is_ordered_by_its_id(begun: Allocator) -> None:
    """Where no Kubernetes names pods the sandbox's id does."""
    begun.set_orders({"s1": CpuClass.SHARE})
    bare = replace(request("web"), pod=PodRequest("uid"))
    assert begun.newest(bare, "s1").pod.ordered is CpuClass.SHARE
    assert begun.newest(request("web"), "s2").pod.ordered is None


def test_annotations_change_who_runs(begun: Allocator) -> None:
    """Annotations that the API server lists count, for the pods in the list."""
    begun.admit(request("web", cpus=2))
    begun.admit(request("db", "share", cpus=2))
    begun.set_specs({"uid-web": PodSpec({"cpu-policy.kata-pin.io": "exclusive"})})
    classes = {one.pod_uid: one.cpu_class for one in begun.grants.containers()}
    assert classes == {"uid-web": CpuClass.EXCLUSIVE, "uid-db": CpuClass.SHARE}


def test_who_only_looks_decides_nothing(begun: Allocator, registry: Registry, host: Host) -> None:
    """A command without a daemon sees the grants as they are stored, and gives none."""
    begun.admit(request("db", "exclusive", cpus=2))
    one = looking(registry, host)
    mine = (Container("c-db", "s-db"), Container("c-new", "s-db"))
    view = pass_view.view(one, mine)
    assert view.containers[0].cpus == begun.state.exclusive
    assert view.containers[1] == mine[1]
    assert one.suspended == ""
    assert one.state == begun.state
    host.kubelet = STATIC
    assert pass_view.view(one, mine).containers == mine


def test_an_unreadable_row_is_none(begun: Allocator, registry: Registry, host: Host) -> None:
    """A damaged state counts as lost, and the daemon starts."""
    begun.admit(request("db", "exclusive", cpus=2))
    registry.run("UPDATE alloc SET state = '{'")
    assert looking(registry, host).state == AllocState()
    again = allocator(registry, host)
    assert again.state.cpus == CpuSet(range(8))


def test_notes_are_said_once(begun: Allocator, caplog: pytest.LogCaptureFixture) -> None:
    """A typo in an annotation is a warning, not one in each pass, and stays to be shown."""
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            typo = request("web", "shared", cpus=2)
            begun.admit(replace(typo, container_id=f"c{number}"))
    assert caplog.text.count("'shared' is not none, share or exclusive") == 1
    assert len(begun.notes) == 1


def test_annotations_leave_overrides_alone(begun: Allocator) -> None:
    """Also one by sandbox id, which is not known of another runtime's pod without NRI."""
    begun.set_orders({"s-db": CpuClass.EXCLUSIVE})
    asked = begun.newest(request("db", cpus=2, kata=False), "s-db")
    begun.admit(asked)
    exclusive = begun.state.exclusive
    assert exclusive
    begun.set_specs({})
    assert begun.state.exclusive == exclusive
