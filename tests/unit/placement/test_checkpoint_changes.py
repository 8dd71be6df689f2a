"""Whom a new checkpoint of the kubelet is about."""

from __future__ import annotations

from msgspec.structs import replace

from kata_pin.base.placement import KubeletState
from kata_pin.placement.drift import touched
from tests.support.world import cpus

BEFORE = KubeletState(
    "static",
    cpus("0-3"),
    entries={"a": {"c1": cpus("4")}, "b": {"c1": cpus("5")}},
    pod_entries={"p": cpus("6-7")},
)


def test_only_the_pods_that_differ() -> None:
    """An entry that is another, one that is gone, a pod's own set; the rest is left alone."""
    now = replace(BEFORE, entries={"a": {"c1": cpus("4")}, "b": {"c1": cpus("8")}})
    assert touched(BEFORE, now) == (frozenset({"b"}), False)
    assert touched(BEFORE, replace(BEFORE, entries={"a": BEFORE.entries["a"]})) == (
        frozenset({"b"}),
        False,
    )
    assert touched(BEFORE, replace(BEFORE, pod_entries={"p": cpus("6")})) == (
        frozenset({"p"}),
        False,
    )
    assert touched(BEFORE, replace(BEFORE)) == (frozenset(), False)


def test_a_default_set_or_policy_that_differs_is_about_everybody() -> None:
    """Shared containers have the default set, and entries mean nothing without the policy."""
    assert touched(BEFORE, replace(BEFORE, default=cpus("0-2"))) == (frozenset(), True)
    assert touched(BEFORE, replace(BEFORE, policy="none")) == (frozenset(), True)


def test_a_checkpoint_that_comes_or_goes() -> None:
    """All of its pods, and everybody else."""
    assert touched(None, BEFORE) == (frozenset({"a", "b", "p"}), True)
    assert touched(BEFORE, None) == (frozenset({"a", "b", "p"}), True)
    assert touched(None, None) == (frozenset(), False)
