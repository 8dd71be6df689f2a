"""What a grant carries beside CPUs: values in bounds, rules' classes only, no Kata VM resized."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from kata_pin.base.allocation import (
    NO_LIMITS,
    NOTHING_MORE,
    AtCreation,
    Decision,
    Device,
    Grant,
    Limits,
    Mount,
)
from kata_pin.base.config.alloc import Alloc
from kata_pin.base.settings import AllowRule, AssignRule, Eligibility
from kata_pin.base.values import GrantKind
from kata_pin.options.allocation.adjustments import wrong_adjustment
from kata_pin.options.allocation.checked_policy import ExpectedGrants, Invariants
from kata_pin.options.allocation.policies import create
from tests.support.podspecs import container, pod
from tests.support.world import cpus, flat

SETTINGS = Alloc(
    eligibility=Eligibility.RELAXED,
    allow=(AllowRule(rdt=frozenset({"gold"})),),
    assign=(AssignRule(namespace="shop", blockio="fast"),),
    mount_sources=("/run/hints",),
    devices=("/dev/vfio", "/dev/hints0", "/srv/dev"),
    annotation_keys=("hints.example.com/cpus", "plain", "cdi.k8s.io/x"),
)
HINTS = Device("/dev/hints0", "c", 240, 7)
GROUP = Device("/dev/vfio/12", "c", 511, 12)
DISK = Device("/dev/vfio/disk", "b", 259, 0, 0o444, "r")
PLAIN = container(1000, pod("web", kata=False))
KATA = container(1000, pod("vm"))


def wrong(limits: Limits = NO_LIMITS, creation: AtCreation = NOTHING_MORE, **fields: Any) -> str:
    known: dict[str, Any] = {"request": PLAIN, "policy": "x", "shared": cpus("0")}
    return wrong_adjustment(Grant(limits=limits, creation=creation, **(known | fields)), SETTINGS)


EVERYTHING = AtCreation(
    (("2MB", 0), ("1GB", 1 << 30)),
    "gold",
    "fast",
    (("HINT", "a=b c"),),
    (Mount("/hints", "/run/hints"), Mount("/more", "/run/hints/x")),
    (HINTS, GROUP, DISK),
    (("hints.example.com/cpus", "0-3"), ("plain", "")),
)


@pytest.mark.parametrize(
    ("limits", "creation"),
    [
        (Limits(2, 1000, 1000, 4 << 20), AtCreation()),
        (Limits(1 << 18, -1, 1_000_000, 1 << 40), EVERYTHING),
    ],
)
def test_what_linux_and_runtimes_take(limits: Limits, creation: AtCreation) -> None:
    """The least and the greatest values, and everything at once."""
    assert wrong(limits, creation) == ""


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (Limits(shares=1), "shares 1, which is not within 2 to 262144"),
        (Limits(shares=(1 << 18) + 1), "shares 262145"),
        (Limits(quota_us=0), "quota_us 0"),
        (Limits(quota_us=-2), "quota_us -2"),
        (Limits(quota_us=1 << 62), "quota_us"),
        (Limits(period_us=999), "period_us 999"),
        (Limits(memory=0), "memory 0"),
        (Limits(memory=-1), "memory -1"),
    ],
)
def test_limits_out_of_bounds(limits: Limits, said: str) -> None:
    """Each is named, with its bounds."""
    assert said in wrong(limits)


@pytest.mark.parametrize(
    ("creation", "said"),
    [
        (AtCreation(hugepages=(("2M", 0),)), "an invalid hugepage limit: '2M'"),
        (AtCreation(hugepages=(("2MB", -1),)), "an invalid hugepage limit"),
        (AtCreation(hugepages=(("2MB", 0), ("2MB", 1))), "twice"),
        (AtCreation(rdt_class="silver"), "a RDT class that no rule names for its pod: 'silver'"),
        (AtCreation(rdt_class="../info"), "no rule names"),
        (AtCreation(blockio_class="gold"), "a block-I/O class that no rule names"),
        (AtCreation(env=(("PATH", "/x"),)), "policies may not set: 'PATH'"),
        (AtCreation(env=(("LD_PRELOAD", "/x"),)), "policies may not set"),
        (AtCreation(env=(("-HOME", ""),)), "policies may not set"),
        (AtCreation(env=(("A=B", ""),)), "policies may not set"),
        (AtCreation(env=(("A", "x\0y"),)), "an invalid value of the environment variable 'A'"),
        (AtCreation(env=(("A", "x" * 5000),)), "an invalid value"),
        (AtCreation(env=tuple((f"A{n}", "") for n in range(17))), "more than 16"),
        (AtCreation(mounts=(Mount("/x", "/etc"),)), "outside alloc.mount_sources: '/etc'"),
        (AtCreation(mounts=(Mount("/x", "/run/hints/../.."),)), "not absolute and normalized"),
        (AtCreation(mounts=(Mount("/x", "/run/hintsx"),)), "outside alloc.mount_sources"),
        (AtCreation(mounts=(Mount("-/x", "/run/hints"),)), "not absolute and normalized"),
        (AtCreation(mounts=(Mount("/", "/run/hints"),)), "not absolute and normalized"),
        (AtCreation(mounts=(Mount("/proc/1", "/run/hints"),)), "a mount over '/proc/1'"),
        (AtCreation(mounts=(Mount("/x", "/run/hints"),) * 2), "twice"),
        (AtCreation(devices=(replace(HINTS, path="/dev/sda"),)), "alloc.devices does not list"),
        (AtCreation(devices=(replace(HINTS, path="/dev/vfio/../sda"),)), "does not list"),
        (AtCreation(devices=(replace(HINTS, path="/dev/hints01"),)), "does not list"),
        (AtCreation(devices=(replace(HINTS, path="-/dev/hints0"),)), "does not list"),
        (AtCreation(devices=(replace(HINTS, path="/srv/dev/x"),)), "outside /dev: '/srv/dev/x'"),
        (AtCreation(devices=(replace(HINTS, kind="p"),)), "neither c nor b"),
        (AtCreation(devices=(replace(HINTS, major=1 << 12),)), "invalid numbers"),
        (AtCreation(devices=(replace(HINTS, minor=-1),)), "invalid numbers"),
        (AtCreation(devices=(replace(HINTS, mode=0o4666),)), "an invalid mode or rule"),
        (AtCreation(devices=(replace(HINTS, mode=-1),)), "an invalid mode or rule"),
        (AtCreation(devices=(replace(HINTS, access="rx"),)), "an invalid mode or rule"),
        (AtCreation(devices=(replace(HINTS, access=""),)), "an invalid mode or rule"),
        (AtCreation(devices=(HINTS, replace(HINTS, minor=8))), "twice"),
        (
            AtCreation(devices=tuple(replace(GROUP, path=f"/dev/vfio/{n}") for n in range(17))),
            "more than 16",
        ),
        (AtCreation(annotations=(("other", ""),)), "annotation_keys does not list: 'other'"),
        (AtCreation(annotations=(("-plain", ""),)), "annotation_keys does not list"),
        (AtCreation(annotations=(("cdi.k8s.io/x", "gpu"),)), "an annotation that runtimes obey"),
        (AtCreation(annotations=(("plain", "x\ny"),)), "an invalid value of the annotation"),
        (AtCreation(annotations=(("plain", "x" * 5000),)), "an invalid value of the annotation"),
        (AtCreation(annotations=(("plain", "a"), ("plain", "b"))), "twice"),
    ],
)
def test_what_may_not_be_set_at_creation(creation: AtCreation, said: str) -> None:
    """Values that a runtime would misread, and what the administrator did not list."""
    assert said in wrong(creation=creation)


@pytest.mark.parametrize(
    ("limits", "creation"),
    [
        (Limits(quota_us=100_000), AtCreation()),
        (Limits(period_us=100_000), AtCreation()),
        (Limits(memory=1 << 30), AtCreation()),
        (Limits(), AtCreation(hugepages=(("2MB", 1 << 30),))),
        (Limits(), AtCreation(rdt_class="gold")),
    ],
)
def test_a_kata_vm_is_never_resized(limits: Limits, creation: AtCreation) -> None:
    """Kata sizes its VM by these; a class has no effect there. Anything else is fine."""
    assert "Kata VM" in wrong(limits, creation, request=KATA)
    assert wrong(limits, creation) == ""
    harmless = AtCreation(env=(("A", "b"),))
    assert wrong(Limits(shares=2), harmless, request=KATA) == ""


def test_devices_that_kata_passes_into_a_vm() -> None:
    """VFIO groups and disks; any other node would be whatever has its numbers in the guest."""
    passed = AtCreation(devices=(GROUP, DISK), annotations=(("plain", "x"),))
    assert wrong(creation=passed, request=KATA) == ""
    for path in ("/dev/hints0", "/dev/vfio/vfio", "/dev/vfio/devices/vfio0"):
        char = AtCreation(devices=(replace(HINTS, path=path),))
        assert "cannot be passed into a Kata VM" in wrong(creation=char, request=KATA)
        assert wrong(creation=char) == ""


def test_nothing_for_a_vm_itself() -> None:
    """A VM has threads, and no container that a runtime could adjust."""
    assert "for a VM" in wrong(Limits(shares=2), kind=GrantKind.SANDBOX)


CREATION: Any = AtCreation
LIMITS: Any = Limits


@pytest.mark.parametrize(
    "wrong_type",
    [
        {"limits": None},
        {"limits": LIMITS(shares="2")},
        {"limits": LIMITS(shares=True)},
        {"creation": CREATION(env=(("A", 1),))},
        {"creation": CREATION(env={"A": "b"})},
        {"creation": CREATION(mounts=(("/a", "/b"),))},
        {"creation": CREATION(hugepages=(("2MB", "4"),))},
        {"creation": CREATION(rdt_class=7)},
        {"creation": CREATION(devices=(("/dev/hints0", "c", 1, 2),))},
        {"creation": CREATION(devices=(replace(HINTS, major="1"),))},
        {"creation": CREATION(devices=(replace(HINTS, minor=True),))},
        {"creation": CREATION(annotations=(("plain", 1),))},
    ],
)
def test_values_of_wrong_types(wrong_type: dict[str, Any]) -> None:
    """Other packages' code may err; that is a violation like any other."""
    policy = create("static", flat(4), SETTINGS)
    decision = policy.allocate(policy.start(), PLAIN)
    (grant,) = decision.changed
    strange = replace(grant, **wrong_type)
    decision = Decision(decision.state.with_grant(strange), (strange,))
    violation = Invariants(flat(4), SETTINGS).violation(
        decision, ExpectedGrants(policy.start(), (PLAIN,))
    )
    assert "wrong types" in violation


def test_a_violation_names_the_container() -> None:
    """The invariants of every policy include these."""
    policy = create("static", flat(4), SETTINGS)
    decision = policy.allocate(policy.start(), PLAIN)
    (grant,) = decision.changed
    heavy = replace(grant, limits=Limits(shares=1))
    decision = Decision(decision.state.with_grant(heavy), (heavy,))
    violation = Invariants(flat(4), SETTINGS).violation(
        decision, ExpectedGrants(policy.start(), (PLAIN,))
    )
    assert violation.startswith(f"the grant of {PLAIN.container_id} has shares 1")
