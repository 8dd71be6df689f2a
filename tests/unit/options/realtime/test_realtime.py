"""Which vCPUs may be real-time threads: alone on their pCPU, with a net, and below its guards."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kata_pin.base.counters import RtNode
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.placement import Desired, Placement, SandboxMask
from kata_pin.base.sandbox import Thread
from kata_pin.base.values import ThreadRole
from kata_pin.options.realtime import choose
from tests.support import world

FOUR = CpuSet([4])
VCPU = world.vcpu(0, on="4")
EMULATOR = world.thread(ThreadRole.EMULATOR, 1001, on="0-3")
GOOD = RtNode(950_000, 1_000_000, guards={4: {"ksoftirqd/4": 2}})


def placed(vcpu: Thread = VCPU, **fields: object) -> Placement:
    desired = Desired(FOUR, FOUR, "", paired=True)
    return Placement("pod", SandboxMask(FOUR), {vcpu.key: replace(desired, **fields)})


def test_a_vcpu_alone_on_its_pcpu() -> None:
    """With the conditions met it gets the class; the rest of the sandbox keeps its own."""
    choice = choose((VCPU, EMULATOR), placed(), 1, GOOD)
    assert choice.threads == {VCPU.key: 4}
    assert choice.refusals == ()


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (replace(GOOD, runtime_us=-1), "leaves no time to other threads"),
        (replace(GOOD, runtime_us=1_000_000), "leaves no time to other threads"),
        (replace(GOOD, runtime_us=0), "get no time"),
        (replace(GOOD, runtime_us=None), "cannot be read"),
        (replace(GOOD, guards={}), "ksoftirqd/4 was not found"),
        (replace(GOOD, guards={4: {"ksoftirqd/4": 0}}), "is no real-time thread"),
        (replace(GOOD, guards={4: {"ksoftirqd/4": 1}}), "priority 1 and would starve"),
        (replace(GOOD, guards={4: {"ksoftirqd/4": 2, "rcuc/4": 1}}), "rcuc/4 has priority 1"),
        (replace(GOOD, fair_server=True, unserved=frozenset({4})), "switched off"),
    ],
)
def test_what_the_node_lacks(node: RtNode, words: str) -> None:
    """Each missing condition is a refusal that names it."""
    choice = choose((VCPU, EMULATOR), placed(), 1, node)
    assert choice.threads == {}
    assert words in " ".join(choice.refusals)


def test_the_fair_server_is_a_net_of_its_own() -> None:
    """Since Linux 6.12 sched_rt_runtime_us need not keep time for others."""
    node = replace(GOOD, runtime_us=-1, fair_server=True)
    assert choose((VCPU,), placed(), 1, node).threads == {VCPU.key: 4}


def test_a_thread_beside_the_vcpu() -> None:
    """An emulator thread that may run there would wait for good, even if it may run elsewhere."""
    beside = world.thread(ThreadRole.EMULATOR, 1001, on="3-4")
    choice = choose((VCPU, beside), placed(), 1, GOOD)
    assert choice.threads == {}
    assert "(emulator): set overhead" in choice.refusals[0]


def test_threads_that_are_no_paired_vcpu_or_not_there_yet() -> None:
    """Unpaired, released, with several CPUs, off its place, another role: nothing, in silence."""
    wide = CpuSet([4, 5])
    for placement in (
        placed(paired=False),
        placed(release=True),
        placed(wanted=wide, applied=wide),
        placed(applied=CpuSet([5])),
        Placement("pod", SandboxMask(FOUR)),
        None,
    ):
        choice = choose((VCPU, EMULATOR), placement, 1, GOOD)
        assert (choice.threads, choice.refusals) == ({}, ())
    thread = world.thread(ThreadRole.IOTHREAD, 1100, on="4")
    assert choose((thread,), placed(thread), 1, GOOD).threads == {}
