"""Idle states and frequency that pods ask for, and what is said where they do not get them."""

from __future__ import annotations

from typing import Any

import pytest

from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.base.values import QuietLevel
from kata_pin.options.quiet.decide import (
    C_STATES_KEY,
    GOVERNOR_KEY,
    idle_limits,
    power_goals,
    power_problems,
    power_wish,
    wanted_power,
)
from kata_pin.options.quiet.values import (
    Exactly,
    FrequencyPolicy,
    Observed,
    QuietClaim,
    QuietState,
    TunableKey,
)
from kata_pin.rights.broker.tunables import TunableKind

FULL = QuietState(CpuSet({4, 5}), full=CpuSet({4, 5}))


@pytest.mark.parametrize(
    ("value", "idle"),
    [
        ("enable", "0"),
        ("disable", "n/a"),
        ("max_latency:10", "10"),
        ("max_latency:007", "7"),
        *(("max_latency:0", ""), ("max_latency:-1", ""), ("max_latency:", ""), ("10", "")),
        *(("max_latency:9999999999", ""), ("n/a", ""), ("disable\n", ""), ("", "")),
    ],
)
def test_values_of_c_states(value: str, idle: str) -> None:
    """As CRI-O takes them; any other is named, with what is valid."""
    found = power_wish({C_STATES_KEY: value}, level=QuietLevel.FULL, allowed=True, crio=False)
    assert found.idle == idle
    if not idle:
        (problem,) = found.problems
        assert C_STATES_KEY in problem
        assert repr(value) in problem
        assert "max_latency:MICROSECONDS" in problem


@pytest.mark.parametrize(
    ("level", "allowed", "crio", "governor", "why"),
    [
        (QuietLevel.FULL, True, False, "performance", ""),
        (QuietLevel.IRQ, True, False, "", "it needs quiet: full, not irq"),
        (QuietLevel.FULL, False, False, "", "no rule of alloc.allow"),
        (QuietLevel.IRQ, False, True, "performance", ""),
    ],
    ids=["full", "level", "rule", "CRI-O's own"],
)
def test_who_may_ask(level: QuietLevel, allowed: bool, crio: bool, governor: str, why: str) -> None:
    """Never more than the setting; what CRI-O does anyway needs no rule of ours."""
    asked = {GOVERNOR_KEY: "performance"}
    found = power_wish(asked, level=level, allowed=allowed, crio=crio)
    assert found.governor == governor
    assert [one for one in found.problems if why in one] == list(found.problems)
    assert bool(found.problems) is bool(why)


def test_what_a_governor_may_not_be_called() -> None:
    """No path, and nothing longer than the kernel's names."""
    for value in ("../x", "a" * 16, "Performance", ""):
        found = power_wish({GOVERNOR_KEY: value}, level=QuietLevel.FULL, allowed=True, crio=False)
        assert not found.governor
        assert GOVERNOR_KEY in found.problems[0]


def _policy(name: str, cpus: set[int], governor: str = "powersave") -> FrequencyPolicy:
    return FrequencyPolicy(name, CpuSet(cpus), governor, frozenset({"powersave", "performance"}))


def _limits(**values: str) -> list[Observed]:
    return [
        Observed(TunableKey(TunableKind.IDLE_LIMIT, cpu.removeprefix("c")), "", value)
        for cpu, value in values.items()
    ]


def _governors(*policies: FrequencyPolicy) -> list[Observed]:
    return [
        Observed(TunableKey(TunableKind.GOVERNOR, one.name), "", one.governor) for one in policies
    ]


def _claim(cpus: set[int], **fields: Any) -> QuietClaim:
    own = CpuSet(cpus)
    return QuietClaim("p", own, own, EMPTY, own)._replace(**fields)


def test_a_pod_wins_over_the_settings() -> None:
    """For its own pCPUs alone; the pods beside it have what the settings say."""
    claims = [_claim({4}, idle="n/a", governor="powersave"), _claim({5})]
    policies = {one.name: one for one in (_policy("4", {4}), _policy("5", {5}))}
    seen = [*_limits(c3="0", c4="0", c5="0"), *_governors(*policies.values())]
    wanted = wanted_power(FULL, claims, "20", "performance")
    assert {key.name: goal for key, goal in power_goals(seen[:3], wanted, policies)} == {
        "4": Exactly("n/a"),
        "5": Exactly("20"),
    }
    assert {key.name: goal for key, goal in power_goals(seen[3:], wanted, policies)} == {
        "4": Exactly("powersave"),
        "5": Exactly("performance"),
    }
    assert not [*power_problems(claims[0], idle_limits(seen), wanted, policies)]


def test_pods_that_share_a_frequency_policy() -> None:
    """Set if both want the same governor; else it stays, and both pods say so."""
    policies = {"4": _policy("4", {4, 5})}
    seen = _governors(*policies.values())
    both = [_claim({4}, governor="performance"), _claim({5}, governor="performance")]
    wanted = wanted_power(FULL, both, "leave", "leave")
    assert [goal for _, goal in power_goals(seen, wanted, policies)] == [Exactly("performance")]
    torn = [_claim({4}, governor="performance"), _claim({5}, governor="powersave")]
    wanted = wanted_power(FULL, torn, "leave", "leave")
    assert not [*power_goals(seen, wanted, policies)]
    for claim, other in zip(torn, ("5", "4"), strict=True):
        (why,) = power_problems(claim, idle_limits(seen), wanted, policies)
        assert f"also covers pCPUs {other} of others" in why


def test_an_unknown_governor_is_refused_with_the_list() -> None:
    """The annotation, the pCPUs, and what there is."""
    policies = {"4": _policy("4", {4})}
    claim = _claim({4}, governor="turbo")
    seen = _governors(*policies.values())
    wanted = wanted_power(FULL, [claim], "leave", "leave")
    assert not [*power_goals(seen, wanted, policies)]
    (why,) = power_problems(claim, idle_limits(seen), wanted, policies)
    assert why == (
        "pCPUs 4: annotation cpu-freq-governor.crio.io: no governor 'turbo'; available: "
        "performance, powersave"
    )


def test_a_node_without_any_of_it() -> None:
    """A pod that asks is told; settings alone are no reason for a warning there."""
    asking = _claim({4}, idle="20", governor="performance")
    wanted = wanted_power(FULL, [asking], "20", "performance")
    found = [*power_problems(asking, {}, wanted, {})]
    assert [one for one in found if "pm_qos" in one]
    assert [one for one in found if "no frequency control (cpufreq)" in one]
    assert not [*power_problems(_claim({4}), {}, wanted, {})]


def test_what_crio_sets_is_left_and_verified() -> None:
    """Neither its values nor those of the settings are written there."""
    claim = _claim({4, 5}, idle="n/a", governor="performance", crio_power=True)
    policies = {"4": _policy("4", {4}, "performance"), "5": _policy("5", {5})}
    seen = [*_limits(c4="n/a", c5="0"), *_governors(*policies.values())]
    wanted = wanted_power(FULL, [claim], "20", "performance")
    assert not [*power_goals(seen, wanted, policies)]
    limit, governor = power_problems(claim, idle_limits(seen), wanted, policies)
    assert limit.endswith("CRI-O sets pm_qos_resume_latency_us to n/a, but pCPUs 5 have 0")
    assert governor.endswith("CRI-O sets the governor to performance, but pCPUs 5 have powersave")
