"""CPUs that others gave exclusively: none is granted, changes are followed, conflicts reported."""

from __future__ import annotations

import logging

import pytest
from msgspec.structs import replace

from kata_pin.base.allocation import AllocState, Holder
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.documents.answers import NodeEventKind
from kata_pin.base.placement import KubeletState, Node
from kata_pin.base.sandbox import Container
from kata_pin.base.settings import ExclusiveMode, PlacementSettings
from kata_pin.base.values import ContainerState, CpuClass, HolderSource
from kata_pin.options.allocation import option as pass_view
from kata_pin.options.allocation.allocator import Allocator
from kata_pin.options.allocation.holders import Holders
from kata_pin.options.allocation.ledger import Ledger
from kata_pin.options.allocation.policies import BUILTIN
from kata_pin.options.allocation.report import allocation_report
from kata_pin.peers.nri.replies import Cpuset
from kata_pin.records.containers import Registry
from kata_pin.records.history import MESSAGE_IDS
from tests.support.allotted import Host, Moves, allocator, looking, ordered, request
from tests.support.world import cpus, flat


@pytest.fixture
def host() -> Host:
    return Host()


def container(name: str, cpuset: str, *, exclusive: bool = True) -> Container:
    """Return a container to which its runtime's caller gave CPUs: `ctr run --cpuset-cpus`."""
    size = len(cpus(cpuset))
    return Container(
        f"c-{name}",
        f"s-{name}",
        cpus=cpus(cpuset),
        quota_us=size * 100_000 if exclusive else None,
        period_us=100_000,
        shares=None if exclusive else 102,
        name="app",
        pod_name=name,
        pod_namespace="shop",
        pod_uid=f"uid-{name}",
        source="hook:createRuntime",
        recorded_ns=1,
    )


def record(registry: Registry, one: Container, stamp: int = 1) -> None:
    assert registry.record(replace(one, recorded_ns=stamp), stamp_ns=stamp)


def own(begun: Allocator, name: str) -> CpuSet:
    grant = begun.state.get(f"c-{name}")
    assert grant is not None
    return grant.own


@pytest.mark.parametrize("policy", BUILTIN)
@pytest.mark.parametrize("cpu_class", [CpuClass.SHARE, CpuClass.EXCLUSIVE])
def test_recorded_exclusive_cpus_are_nobody_elses(
    registry: Registry, host: Host, policy: str, cpu_class: CpuClass
) -> None:
    """What `show` calls exclusive is not given out, whichever policy decides, nor in the pool."""
    record(registry, container("theirs", "0-1"))
    begun = allocator(registry, host, policy=policy)
    begun.admit(ordered(request("ours", cpus=2), cpu_class))
    begun.admit(request("pooled"))
    assert len(own(begun, "ours")) == 2
    assert own(begun, "ours").isdisjoint(cpus("0-1"))
    for grant in begun.state.grants.values():
        assert grant.cpus.isdisjoint(cpus("0-1"))
    assert begun.state.shared.isdisjoint(cpus("0-1"))


def test_shared_cpusets_are_not_taken(registry: Registry, host: Host) -> None:
    """A cpuset that nothing says to be exclusive stays in the pool, as before."""
    record(registry, container("theirs", "0-1", exclusive=False))
    assert allocator(registry, host).state.shared == cpus("0-7")


def test_pods_come_and_go(registry: Registry, host: Host) -> None:
    """The pool gets narrower and wider with others' pods; who waited for CPUs gets them."""
    moves = Moves()
    begun = allocator(registry, host, moves, shared_minimum=1)
    begun.admit(request("pooled"))
    theirs = container("theirs", "2-5")
    record(registry, theirs)
    begun.follow_host()
    assert begun.state.shared == cpus("0-1,6-7")
    assert begun.state.grants["c-pooled"].cpus == cpus("0-1,6-7")
    assert moves.requested[-1][0] == {"s-pooled"}  # its threads leave
    begun.admit(ordered(request("waits", cpus=4), CpuClass.EXCLUSIVE))
    assert not own(begun, "waits")
    record(registry, replace(theirs, state=ContainerState.DELETED), 2)
    begun.follow_host()
    assert len(own(begun, "waits")) == 4
    assert not begun.state.taken


def test_a_conflict_is_reported_and_nothing_moved(
    registry: Registry, host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    """CPUs already granted stay; the conflict is logged once, shown, and its end is logged."""
    begun = allocator(registry, host)
    begun.admit(ordered(request("ours", cpus=2), CpuClass.EXCLUSIVE))
    had = own(begun, "ours")
    theirs = container("theirs", str(CpuSet([had.first])))
    record(registry, theirs)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            begun.follow_host()
    found = [one for one in caplog.records if "exclusive to shop/theirs" in one.getMessage()]
    assert len(found) == 1
    fields = found[0].__dict__["journal"]
    assert fields["MESSAGE_ID"] == MESSAGE_IDS[NodeEventKind.EXCLUSIVE_CONFLICT]
    assert (fields["CPUS"], fields["HOLDER"]) == (str(had.first), "c-theirs")
    assert own(begun, "ours") == had
    assert [note.code for note in begun.notes] == ["alloc-conflict"]
    assert "(inferred: CPU quota equals 1 CPU)" in begun.notes[0].text
    again = allocator(registry, host)  # a restart moves nothing either
    assert own(again, "ours") == had
    begun.admit(ordered(request("more", cpus=2), CpuClass.EXCLUSIVE))
    assert own(begun, "more").isdisjoint(had)
    caplog.clear()
    record(registry, replace(theirs, state=ContainerState.DELETED), 2)
    with caplog.at_level(logging.INFO):
        begun.follow_host()
    assert "conflict ended" in caplog.text
    assert begun.notes == ()


def test_cpus_of_another_plugin(registry: Registry, host: Host) -> None:
    """CPUs of a container that another NRI plugin gave a cpuset are taken, over a reconnect too."""
    begun = allocator(registry, host)
    plugins, ledger = request("plugins", cpus=2, kata=False), begun.ledger
    ledger.connected()
    ledger.requested(plugins, "s-plugins")
    begun.admit(plugins, foreign=True)
    assert begun.state.get(plugins.container_id) is None
    ledger.reported(plugins.container_id, Cpuset(cpus("0-1")))
    ledger.leave_alone(plugins.container_id)
    begun.follow_host()
    begun.admit(ordered(request("ours", cpus=2), CpuClass.EXCLUSIVE))
    assert own(begun, "ours") == cpus("2-3")
    assert begun.holders == (
        Holder(
            "c-plugins",
            "shop/plugins",
            "app",
            cpus("0-1"),
            HolderSource.PLUGIN,
            "another NRI plugin gave it cpuset 0-1",
        ),
    )
    ledger.disconnected()  # nothing reports its end now
    begun.follow_host()
    assert begun.state.taken == cpus("0-1")
    ledger.connected()
    begun.follow_host()
    assert not begun.state.taken


def test_what_the_runtime_reports_is_ours_to_decide(registry: Registry, host: Host) -> None:
    """A container with a cpuset that NRI reports is in our pools: its own record takes nothing."""
    record(registry, container("ours", "0-1"))
    begun = allocator(registry, host)
    assert begun.state.taken == cpus("0-1")  # until the runtime is connected
    begun.ledger.connected()
    begun.ledger.requested(request("ours", cpus=2), "s-ours")
    begun.follow_host()
    assert not begun.state.taken


def test_the_administrators_word(registry: Registry, host: Host) -> None:
    """`exclusive: always` takes a cpuset that nothing else would call exclusive."""
    record(registry, container("theirs", "0-1", exclusive=False))
    placement = PlacementSettings(exclusive=ExclusiveMode.ALWAYS)
    host.settings = placement
    begun = allocator(registry, host)
    assert begun.state.taken == cpus("0-1")
    assert [one.source for one in begun.holders] == [HolderSource.ADMINISTRATOR]
    host.settings = PlacementSettings()  # a reload
    begun.follow_host()
    assert not begun.state.taken


def test_the_kubelets_entries_are_shown(registry: Registry, host: Host) -> None:
    """With the static policy the checkpoint says who has which CPUs, recorded or not."""
    record(registry, container("known", "2-3", exclusive=False))
    entries = {"uid-known": {"app": cpus("2-3")}, "uid-runc": {"db": cpus("4-5")}}
    host.kubelet = KubeletState("static", cpus("0-1,6-7"), entries)
    begun = allocator(registry, host)
    report = allocation_report(begun)
    assert report is not None
    assert report.suspended
    assert report.pools.taken == "2-5"
    assert [(one.pod, one.name, one.cpus, one.source) for one in report.holders] == [
        ("shop/known", "app", "2-3", "kubelet"),
        ("uid-runc", "db", "4-5", "kubelet"),
    ]


def test_a_pass_knows_better_than_the_record(registry: Registry, host: Host) -> None:
    """The cpuset that a pass believes counts, until the record changes."""
    one = container("theirs", "0-1")
    record(registry, one)
    begun = allocator(registry, host)
    pass_view.view(begun, [replace(one, cpus=cpus("4-5"))])
    assert begun.state.taken == cpus("4-5")
    begun.follow_host()
    assert begun.state.taken == cpus("4-5")
    record(registry, replace(one, cpus=cpus("6-7")), 2)
    begun.follow_host()
    assert begun.state.taken == cpus("6-7")


def test_the_pool_is_never_empty(registry: Registry, host: Host) -> None:
    """Where others took everything, containers of the pool share it; none gets CPUs of its own."""
    record(registry, container("theirs", "0-7"))
    begun = allocator(registry, host)
    begun.admit(ordered(request("ours", cpus=2), CpuClass.EXCLUSIVE))
    assert not own(begun, "ours")
    assert begun.state.grants["c-ours"].cpus == cpus("0-7")


def test_records_are_judged_only_when_they_change(
    registry: Registry, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass costs no reading of records that are as they were."""
    for number in range(20):
        record(registry, container(f"n{number}", "0-1", exclusive=False))
    begun = allocator(registry, host)
    for name in ("containers", "sandboxes"):
        monkeypatch.setattr(Registry, name, lambda *_: pytest.fail("read again"))
    for _ in range(5):
        begun.follow_host()


def test_without_a_daemon(registry: Registry, host: Host) -> None:
    """A command without a daemon leaves the grants as they are, and keeps others' CPUs out."""
    begun = allocator(registry, host)
    begun.admit(ordered(request("ours", cpus=2), CpuClass.EXCLUSIVE))
    record(registry, container("theirs", "4-5"))
    seen = looking(registry, host)
    view = pass_view.view(seen, [container("other", "6-7", exclusive=False)])
    assert view.pool == cpus("2-3,6-7")
    report = allocation_report(seen)
    assert report is not None
    assert (report.pools.shared, report.pools.taken) == ("2-3,6-7", "4-5")
    assert own(seen, "ours") == own(begun, "ours")


def test_dra_claims_are_taken(registry: Registry) -> None:
    """A claim whose container has no record, and one that is a recorded container's cpuset."""
    registry.record(Container("c-x", "s-x", cpus=cpus("2-3"), name="app", pod_name="x"), stamp_ns=1)
    here = Node(flat(8), claims={"one": cpus("2-3"), "two": cpus("6")})
    held = Holders(registry).current(here, AllocState(), Ledger(lambda: 0.0))
    assert [(one.container_id, str(one.cpus), one.source.text) for one in held] == [
        ("c-x", "2-3", "DRA claim"),
        ("claim/two", "6", "DRA claim"),
    ]
