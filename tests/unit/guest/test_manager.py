"""What passes mean for a guest's keeper, and what is said of a container's guest CPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kata_pin.base.config.tree import Config, Guest, LiveConfig
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.placement import Cause, Report, outcome_of
from kata_pin.base.sandbox import GuestMap
from kata_pin.base.values import GuestState, Proof
from kata_pin.guest.cpus import GuestPlan, GuestView, Sent
from kata_pin.guest.keeper import Agents, Keeper
from kata_pin.guest.manager import Guests, _Planned
from kata_pin.records.containers import Registry
from kata_pin.records.pins import Pins
from tests.support.at_once import place
from tests.support.world import exclusive, node, sandbox, vcpus

POD = sandbox(exclusive("c1", "4"))
THREADS = tuple(vcpus(0))


class NotingKeeper(Keeper):
    """A keeper that notes what it is told, and shows what a test says."""

    def __init__(self) -> None:
        self.told: list[tuple[bool, bool]] = []
        self.proof = Proof.FITS

    def update(self, *_: Any, again: bool = True, insist: bool = False) -> None:
        self.told.append((again, insist))

    def view(self, plan: GuestPlan) -> GuestView:
        return GuestView(plan, GuestState.APPLIED, sent={"c1": Sent(CpuSet({1}), self.proof)})


@pytest.fixture
def keeper() -> NotingKeeper:
    return NotingKeeper()


@pytest.fixture
def guests(tmp_path: Path, keeper: NotingKeeper) -> Iterator[Guests]:
    """The guests of a node with one sandbox, whose keeper is `keeper`."""
    agents = SimpleNamespace(shared=lambda _: None, settings=Guest, live=LiveConfig(Config()))
    sandboxes: Any = SimpleNamespace(known_vmm=lambda _: POD.vmm)
    with closing(Registry(str(tmp_path / "registry.db"), boot_id="boot")) as registry:
        one = Guests(
            cast("Agents", agents), registry, Pins(registry), cast("Any", None), sandboxes, print
        )
        one._keepers[POD.id] = keeper
        yield one


def test_passes_for_the_same_events_reset_a_guest_once(
    guests: Guests, keeper: NotingKeeper
) -> None:
    """A pass that is repeated because it was not sure is no new event of Kata's."""
    report = Report(POD.id, THREADS, place(POD, THREADS, node()))
    for reasons, at in (("hook:poststart", 1.0), ("hook:poststart", 1.0), ("hook:poststart", 2.0)):
        cause = Cause((reasons,), at)
        guests.passed(outcome_of(POD, report, cause, released=False))
    assert [again for again, _ in keeper.told] == [True, False, True]


@pytest.mark.parametrize(
    ("proof", "cpus"), [(Proof.FITS, CpuSet({1})), (Proof.NONE, CpuSet({1})), (Proof.BROKEN, None)]
)
def test_guest_cpus_that_do_not_hold_are_not_known(
    guests: Guests, keeper: NotingKeeper, proof: Proof, cpus: CpuSet | None
) -> None:
    """What a container was sent is what it uses, unless that was seen to be otherwise."""
    assert guests.cpus_of(POD.id, "c1") is None
    keeper.proof = proof
    guests._plans[POD.id] = _Planned(None, None, GuestPlan(GuestMap(POD.id)))
    assert guests.cpus_of(POD.id, "c1") == cpus
    assert guests.cpus_of(POD.id, "c2") is None
