"""What is shown of the allocator: by the daemon, and by a command that looks without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from kata_pin.base.allocation import AllocState, Grant
from kata_pin.base.config.alloc import Alloc
from kata_pin.base.config.tree import Config, Nri, NriEnabled
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.documents.pools import Push, PushFailure
from kata_pin.base.sandbox import Container
from kata_pin.base.values import ContainerState
from kata_pin.follow.reports import NriIntake
from kata_pin.guest.manager import Guests
from kata_pin.options.allocation.allocator import Allocator
from kata_pin.options.allocation.ledger import RetryState
from kata_pin.options.allocation.option import LAST, Allocation
from kata_pin.options.allocation.push import Pusher
from kata_pin.options.allocation.report import METRICS, allocation_report
from kata_pin.peers.cri import CriClient
from kata_pin.peers.nri.replies import Cpuset
from kata_pin.records.containers import Registry
from kata_pin.rights.calls import DIRECT
from kata_pin.service import offline
from kata_pin.service.options import Serving, compose, nri_plugin
from kata_pin.service.runtime_dir import boot_id
from tests.support.allotted import Host, Moves, allocator, looking, request, settings
from tests.support.world import cpus, flat

"""No sandbox gets a pass."""


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    one = Registry(str(tmp_path / "registry.db"), boot_id=boot_id())
    yield one
    one.close()


def pusher_of(one: Allocator, cri: str = "") -> Pusher:
    """Return what would push, with no runtime."""
    return Pusher(one, settings(), passes=Moves(), cri=CriClient(cri) if cri else None)


def test_pools_and_grants(registry: Registry) -> None:
    """Who has what, what the runtime is told, what is pending, and why."""
    one = allocator(registry, Host())
    one.admit(request("web", kata=False))
    one.admit(request("db", "exclusive", cpus=2))
    for name in ("c-web", "c-db"):
        one.ledger.reported(name, Cpuset(CpuSet(range(8))))
    shown = allocation_report(one, ["orders: line 1"])
    assert shown is not None
    own = shown.pools.exclusive
    assert CpuSet.parse(own) | CpuSet.parse(shown.pools.shared) == CpuSet(range(8))
    web, db, vm = sorted(shown.grants, key=lambda grant: (grant.kind, grant.id != "c-web"))
    assert (db.cpu_class, db.exclusive, db.cpuset, db.sandbox) == (
        *("exclusive", own),
        *(own, "s-db"),
    )
    assert (web.pending, web.sandbox) == (shown.pools.shared, "")
    assert (vm.id, vm.kind, vm.cpuset) == ("vm:s-db", "sandbox", "")
    assert shown.problems == ("orders: line 1",)


def test_how_cpusets_are_sent(registry: Registry) -> None:
    """By which way, why not by another, and what does not work; unknown without a daemon."""
    one = allocator(registry, Host())
    found = allocation_report(one)
    assert found is not None
    assert found.push is None
    pusher = pusher_of(one, cri="/run/c.sock")
    pusher._runtime = RetryState(1, 0.0, "no socket")
    one.ledger.reported("c-web", Cpuset())
    one.ledger.failed("c-web", Cpuset(), "busy")
    found = allocation_report(one, (), pusher)
    assert found is not None
    failed = (PushFailure("c-web", "busy"),)
    assert found.push == Push("cri", "NRI is not connected", "no socket", failed)


def test_metrics(registry: Registry) -> None:
    """Pools, classes, what waits and who was refused."""
    one = allocator(registry, Host())
    one.admit(request("web", kata=False))
    one.ledger.reported("c-web", Cpuset())
    one.admit(request("db", "exclusive", cpus=2))
    one.admit(request("much", "exclusive", cpus=64))
    one.admit(request("theirs"), foreign=True)
    pusher = pusher_of(one)
    pusher.sent.update({("nri", True): 3, ("cri", False): 1})
    values: dict[str, Any] = {
        row.name.removeprefix("kata_pin_alloc_"): row.value(pusher) for row in METRICS
    }
    assert values["deciding"] == 1
    assert values["cpus"].items() >= {"exclusive": 2, "shared": 6}.items()
    assert values["containers"].items() >= {"none": 2, "exclusive": 1}.items()
    assert values["pending"] == 1
    assert values["refusals_total"]["not-enough-cpus"] == 1
    assert values["rival_pods"] == {"before": 1, "after": 0}
    assert values["pushes_total"]["nri", "done"] == 3
    assert values["pushes_total"]["cri", "failed"] == 1


def test_without_a_daemon(registry: Registry, tmp_path: Path) -> None:
    """The grants are those of the registry; nothing is known of what is pending."""
    one = allocator(registry, Host())
    one.admit(request("web"))
    assert looking(registry, Host()).state == one.state
    config = Config(runtime_dir=str(tmp_path), alloc=Alloc(policy="annotation"))
    shown = offline.state(config).allocation
    assert shown is not None
    assert [grant.id for grant in shown.grants] == ["c-web", "vm:s-web"]
    assert {grant.pending for grant in shown.grants} == {None}
    assert shown.suspended == ""
    assert offline.state(Config(runtime_dir=str(tmp_path))).allocation is None


@pytest.mark.parametrize(("nri", "kept"), [("auto", {"c-db", "c-web"}), ("no", {"c-db"})])
def test_grants_of_an_earlier_daemon(registry: Registry, nri: str, kept: set[str]) -> None:
    """Who has no record, and without NRI who is no sandbox's, has nothing any more."""
    one = allocator(registry, Host())
    for asked in (request("db"), request("lost"), request("over"), request("web", kata=False)):
        one.admit(asked)
    registry.adopt(Container("c-db", "s-db"))
    registry.adopt(Container("c-over", "s-over", state=ContainerState.STOPPED))
    config = Config(alloc=settings(), nri=Nri(enabled=NriEnabled(nri)))
    serving = Serving(cast("Guests", None), None, cast("NriIntake", None), lambda _: None)
    shown = Allocation(compose(config, registry), serving).state()["allocation"]
    assert {grant.id for grant in shown.grants if grant.kind == "container"} == kept


def test_who_decides_is_the_last_plugin(registry: Registry) -> None:
    """Unless the setting says otherwise, or nothing is decided."""
    for policy, chosen, index in (
        ("annotation", Nri().index, LAST),
        ("annotation", "50", "50"),
        ("none", Nri().index, Nri().index),
    ):
        config = Config(alloc=Alloc(policy=policy), nri=Nri(index=chosen))
        intake = cast("NriIntake", None)
        plugin = nri_plugin(config, intake, DIRECT)
        assert plugin is not None
        Allocation(
            compose(config, registry),
            Serving(cast("Guests", None), plugin, intake, lambda _: None),
        )
        assert plugin.index == index


def test_what_is_offline_is_not_sent(registry: Registry) -> None:
    """A VM's cpuset is widened by those of its old CPUs only that the node has online now."""
    one = allocator(registry, Host(flat(4)))
    state = AllocState().with_grant(Grant(request("db", cpus=1), "order", exclusive=cpus("0")))
    one.ledger.reported("c-db", Cpuset(cpus("3-4")))
    assert one.ledger.pending(state) == {"c-db": Cpuset(cpus("0,3"))}
