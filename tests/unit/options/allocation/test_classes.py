"""Classes by the administrator's rules; a running container keeps what it was created with."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kata_pin.base.allocation import (
    BLOCKIO_KEY,
    NOTHING_MORE,
    RDT_KEY,
    AllocState,
    AtCreation,
    Decision,
    Grant,
    Refusal,
)
from kata_pin.base.config.alloc import Alloc
from kata_pin.base.settings import AllowRule, AssignRule
from kata_pin.base.values import RefusalKind
from kata_pin.options.allocation.demand import kept_creation, with_classes
from tests.support.podspecs import container, pod
from tests.support.world import cpus

SETTINGS = Alloc(
    allow=(
        AllowRule(namespace="shop", rdt=frozenset({"gold", "silver"})),
        AllowRule(handler="runc", blockio=frozenset({"fast"})),
    ),
    assign=(
        AssignRule(namespace="shop", blockio="slow"),
        AssignRule(namespace="sh*", rdt="bronze", blockio="fast"),
    ),
)


def decision(grant: Grant) -> Decision:
    return Decision(AllocState(cpus("0-3")).with_grant(grant), (grant,))


def made(
    annotations: dict[str, str] | None = None,
    *,
    kata: bool = False,
    creation: AtCreation = NOTHING_MORE,
    namespace: str = "shop",
) -> tuple[Grant, Decision]:
    of = replace(pod("web", kata=kata, annotations=annotations or {}), namespace=namespace)
    one = container(1000, of)
    grant = Grant(one, "x", shared=cpus("0"), creation=creation, reasons=("why",))
    found = with_classes(decision(grant), one.container_id, SETTINGS)
    return found.state.grants[one.container_id], found


def test_the_first_rule_that_names_one() -> None:
    """Each kind for itself; the decision's change has the same grant."""
    grant, found = made()
    assert grant.creation == AtCreation(rdt_class="bronze", blockio_class="slow")
    assert found.changed == (grant,)
    assert grant.reasons == (
        "why",
        "RDT class bronze by alloc.assign",
        "block-I/O class slow by alloc.assign",
    )
    assert made(namespace="bank")[0].creation == NOTHING_MORE


def test_an_annotation_that_a_rule_allows() -> None:
    """It takes precedence over what is assigned, and only where the rule's pod pattern fits."""
    grant, found = made({RDT_KEY: "gold", BLOCKIO_KEY: "fast"})
    assert grant.creation == AtCreation(rdt_class="gold", blockio_class="slow")
    (note,) = found.notes
    assert note.text == (
        f"annotation {BLOCKIO_KEY} of pod {grant.request.pod.title}: no allow rule permits "
        "'fast': ignored"
    )


@pytest.mark.parametrize("value", ["platinum", "GOLD", "../gold", "gold\n", "x" * 300])
def test_an_annotation_that_no_rule_allows(value: str) -> None:
    """It has no effect but a note, which shows a part of it, safely."""
    grant, found = made({RDT_KEY: value})
    assert grant.creation.rdt_class == "bronze"
    (note,) = found.notes
    assert repr(value[:40]) in note.text
    assert len(note.text) < 200
    assert made({RDT_KEY: value}, namespace="bank")[0].creation == NOTHING_MORE


def test_no_class_for_a_kata_vm() -> None:
    """Kata removes both; the reason is shown."""
    grant, _ = made({RDT_KEY: "gold"}, kata=True)
    assert grant.creation == NOTHING_MORE
    assert "no RDT class: runtimes' classes have no effect on a Kata VM" in grant.reasons


def test_a_policys_choice_and_an_earlier_instance() -> None:
    """It stays if a rule names it for the pod, and nothing is assigned; else it is dropped."""
    chosen = AtCreation(rdt_class="silver", env=(("A", "b"),))
    assert made(creation=chosen)[0].creation == replace(
        chosen, rdt_class="bronze", blockio_class="slow"
    )
    assert made(creation=chosen, namespace="bank")[0].creation == replace(chosen, rdt_class="")
    grant, _ = made()
    again = with_classes(decision(grant), grant.container_id, SETTINGS).state
    assert again.grants[grant.container_id] == grant  # the reasons are not repeated


def test_a_refused_container_gets_nothing() -> None:
    """The state stays the one before."""
    grant, _ = made()
    refused = replace(
        decision(grant), refused=Refusal(RefusalKind.NOT_ENOUGH_CPUS, "no", strict=True)
    )
    assert with_classes(refused, grant.container_id, SETTINGS) is refused
    assert with_classes(refused, "unknown", SETTINGS) is refused


def test_what_runs_keeps_what_it_was_created_with() -> None:
    """A policy that changes it for a running container, or for one that it adopts, is overruled."""
    gold, silver = AtCreation(rdt_class="gold"), AtCreation(rdt_class="silver")
    one, two = (
        Grant(container(1000, pod(name, kata=False)), "x", shared=cpus("0")) for name in "ab"
    )
    before = AllocState(cpus("0-3")).with_grant(replace(one, creation=gold))
    changed = (replace(one, creation=silver, shared=cpus("1")), replace(two, creation=silver))
    after = Decision(before.with_grant(changed[0]).with_grant(changed[1]), changed)
    kept = kept_creation(before, after)
    assert [grant.creation for grant in kept.state.grants.values()] == [gold, NOTHING_MORE]
    assert kept.changed == tuple(kept.state.grants.values())
    new = kept_creation(before, after, two.container_id)
    assert [grant.creation for grant in new.state.grants.values()] == [gold, silver]
    assert kept_creation(kept.state, Decision(kept.state)).state is kept.state
