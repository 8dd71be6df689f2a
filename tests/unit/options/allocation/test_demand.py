"""What a container is to get: eligibility, annotations, allow rules, orders."""

from __future__ import annotations

import pytest

from kata_pin.base.allocation import (
    CRANE_KEY,
    FAIL_KEY,
    POLICY_KEY,
    ContainerRequest,
    Qos,
    millis_of_shares,
)
from kata_pin.base.config.alloc import Alloc, Fail
from kata_pin.base.settings import AllowRule, Eligibility
from kata_pin.base.values import CpuClass
from kata_pin.options.allocation.demand import (
    annotated_demand,
    chosen_class,
    static_demand,
    strict,
    topology_demand,
)
from tests.support.podspecs import container, pod

KUBELET = Alloc()
RELAXED = Alloc(eligibility=Eligibility.RELAXED)
OPEN = Alloc(eligibility=Eligibility.RELAXED, allow=(AllowRule(namespace="shop"),))


@pytest.mark.parametrize(
    ("millis", "qos", "whole"),
    [
        (1000, Qos.GUARANTEED, 1),
        (4000, Qos.GUARANTEED, 4),
        (1500, Qos.GUARANTEED, 0),
        (500, Qos.GUARANTEED, 0),
        (0, Qos.GUARANTEED, 0),
        (2000, Qos.BURSTABLE, 0),
        (2000, Qos.BEST_EFFORT, 0),
    ],
)
def test_kubelets_rule(millis: int, qos: Qos, whole: int) -> None:
    """Guaranteed pods' containers with a whole number of CPUs get them, others none."""
    demand = static_demand(container(millis, pod(qos=qos)), KUBELET)
    assert demand.whole == whole
    assert demand.cpu_class is (CpuClass.EXCLUSIVE if whole else CpuClass.NONE)
    assert demand.reasons


@pytest.mark.parametrize(
    ("millis", "limit", "whole"),
    [
        (2000, 2000, 2),
        (2000, 3000, 0),
        (2000, 0, 0),
        (0, 2000, 2),
        (2500, 2500, 0),
        (0, 0, 0),
    ],
    ids=["equal", "burstable", "no limit", "request from limit", "fraction", "nothing"],
)
def test_cranes_relaxed_rule(millis: int, limit: int, whole: int) -> None:
    """Only the container counts: whole CPUs, limit equal to request; its pod may be burstable."""
    request = container(millis, pod(qos=Qos.BURSTABLE), limit=limit)
    assert static_demand(request, RELAXED).whole == whole


def test_quantities_are_compared_as_numbers() -> None:
    """`1` is `1000m`, whatever period the quota is written with; no limit is no limit."""
    for quota, period in [(100_000, 100_000), (50_000, 50_000), (20_000, 20_000)]:
        request = ContainerRequest("c", pod(), "c", 1000, quota_us=quota, period_us=period)
        assert request.limit_millis == 1000
    assert ContainerRequest("c", pod(), quota_us=499, period_us=1500).limit_millis == 333
    assert ContainerRequest("c", pod(), quota_us=-1).limit_millis == 0
    assert ContainerRequest("c", pod(), quota_us=1, period_us=0).limit_millis == 0


def test_request_from_shares() -> None:
    """The request is found again from the shares that the kubelet made of it, up to 256 CPUs."""
    for millis in [2, 3, 10, 250, 999, 1000, 1001, 1500, 2000, 64_000, 256_000]:
        assert millis_of_shares(millis * 1024 // 1000) == millis


@pytest.mark.parametrize("value", ["none", "share", "exclusive"])
@pytest.mark.parametrize("key", [POLICY_KEY, CRANE_KEY])
def test_annotation_chooses(key: str, value: str) -> None:
    """Both keys take Crane's three values."""
    demand = annotated_demand(container(2000, pod(annotations={key: value})), OPEN)
    assert demand.cpu_class == value
    assert demand.whole == (0 if value == "none" else 2)
    assert not demand.notes
    assert key in demand.reasons[0]


def test_without_annotation_none() -> None:
    """A pod that chose nothing is in the shared pool, eligible or not."""
    assert annotated_demand(container(2000), OPEN).cpu_class is CpuClass.NONE


def test_own_key_wins() -> None:
    """Our key counts where both are there, also if its value is not accepted."""
    both = {CRANE_KEY: "exclusive", POLICY_KEY: "share"}
    assert annotated_demand(container(2000, pod(annotations=both)), OPEN).cpu_class == "share"
    both[POLICY_KEY] = "yes"
    assert annotated_demand(container(2000, pod(annotations=both)), OPEN).cpu_class == "none"


@pytest.mark.parametrize("value", ["shared", "Exclusive", "", "exclusive ", "x" * 5000])
def test_unknown_value_is_none_with_a_reason(value: str) -> None:
    """A typo neither binds nor excludes; the reason names key, pod and value, shortened."""
    demand = annotated_demand(container(2000, pod(annotations={POLICY_KEY: value})), OPEN)
    assert demand.cpu_class is CpuClass.NONE
    (note,) = demand.notes
    assert note.code == "unknown-cpu-policy"
    assert POLICY_KEY in note.text
    assert "shop/pod" in note.text
    assert len(note.text) < 200


@pytest.mark.parametrize(
    ("rule", "allowed"),
    [
        (AllowRule(namespace="shop"), True),
        (AllowRule(namespace="sh*"), True),
        (AllowRule(namespace="shop", handler="kata"), True),
        (AllowRule(handler="kata*"), True),
        (AllowRule(namespace="bank"), False),
        (AllowRule(namespace="shop", handler="runc"), False),
        (AllowRule(namespace="shop", classes=frozenset({CpuClass.SHARE})), False),
    ],
)
def test_allow_rules(rule: AllowRule, allowed: bool) -> None:
    """An annotation needs a rule for its namespace and handler and for what it asks."""
    chosen = chosen_class(pod(annotations={POLICY_KEY: "exclusive"}), Alloc(allow=(rule,)))
    assert chosen.cpu_class == ("exclusive" if allowed else "none")
    assert [note.code for note in chosen.notes] == ([] if allowed else ["cpu-policy-not-allowed"])


def test_nobody_is_allowed_by_default() -> None:
    """Without rules no annotation gives CPUs, but `none` needs no rule."""
    for value in ("share", "exclusive", "none"):
        demand = annotated_demand(container(2000, pod(annotations={POLICY_KEY: value})), RELAXED)
        assert demand.cpu_class is CpuClass.NONE
        assert bool(demand.notes) == (value != "none")


def test_not_eligible_is_told() -> None:
    """A chosen class without a whole number of CPUs has no effect, with the reason."""
    demand = annotated_demand(container(1500, pod(annotations={POLICY_KEY: "share"})), OPEN)
    assert demand.cpu_class is CpuClass.NONE
    assert [note.code for note in demand.notes] == ["not-eligible"]
    assert "1500m" in demand.notes[0].text


def test_order_of_the_administrator() -> None:
    """An order wins over the annotation, needs no rule and no Kubernetes."""
    ordered = pod(annotations={POLICY_KEY: "exclusive"}, qos=Qos.BURSTABLE, ordered=CpuClass.SHARE)
    demand = annotated_demand(container(0, ordered, limit=2000), KUBELET)
    assert (demand.cpu_class, demand.whole) == (CpuClass.SHARE, 2)


def test_static_knows_no_annotations() -> None:
    """The policy `static` gives what the kubelet would."""
    request = container(2000, pod(annotations={POLICY_KEY: "none"}))
    assert static_demand(request, OPEN).whole == 2


@pytest.mark.parametrize(
    ("millis", "annotation", "expected"),
    [
        (2000, None, (CpuClass.EXCLUSIVE, 2, 0)),
        (2500, None, (CpuClass.EXCLUSIVE, 2, 500)),
        (500, None, (CpuClass.NONE, 0, 0)),
        (2500, "exclusive", (CpuClass.EXCLUSIVE, 2, 500)),
        (2500, "share", (CpuClass.NONE, 0, 0)),
        (2000, "share", (CpuClass.SHARE, 2, 0)),
        (2000, "none", (CpuClass.NONE, 0, 0)),
        (2000, "typo", (CpuClass.NONE, 0, 0)),
    ],
)
def test_topology_mixes(
    millis: int, annotation: str | None, expected: tuple[CpuClass, int, int]
) -> None:
    """Whole CPUs exclusively and a fraction beside them; an annotation can choose otherwise."""
    chosen = {POLICY_KEY: annotation} if annotation else {}
    demand = topology_demand(container(millis, pod(annotations=chosen)), OPEN)
    assert (demand.cpu_class, demand.whole, demand.fraction_millis) == expected


@pytest.mark.parametrize(
    ("node", "annotation", "expected"),
    [
        (False, None, False),
        (False, "strict", True),
        (False, "best-effort", False),
        (True, "best-effort", True),
        (True, None, True),
        (False, "whatever", False),
    ],
)
def test_fail_policy(node: bool, annotation: str | None, expected: bool) -> None:
    """A pod can be stricter than its node, never less strict; nonsense is noted and ignored."""
    owner = pod(annotations={FAIL_KEY: annotation} if annotation else {})
    chosen = Alloc(fail=Fail.STRICT if node else Fail.BEST_EFFORT)
    assert strict(container(2000, owner), chosen) is expected
    codes = [note.code for note in annotated_demand(container(2000, owner), chosen).notes]
    assert codes == (["unknown-fail-policy"] if annotation == "whatever" else [])
