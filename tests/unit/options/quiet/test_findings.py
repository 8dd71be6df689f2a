"""Findings about exclusive pCPUs, each with its remedy."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from kata_pin.base.counters import CpuSample, InterruptKind
from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.base.documents.state import Row
from kata_pin.linux.interrupts import Interrupt, InterruptRow
from kata_pin.options.quiet import findings
from kata_pin.options.quiet.decide import Firing, firing, rate_of, softirq_rates
from kata_pin.options.quiet.findings import Claimed
from kata_pin.options.quiet.values import (
    Crio,
    Irqbalance,
    MovableThread,
    Partition,
    Power,
    Queue,
    QuietFacts,
    Reading,
    SandboxFacts,
    Tuned,
    Unknown,
)

CLAIMED = Claimed(CpuSet({2, 3}), CpuSet({0, 1}))
HIDDEN = Unknown("/proc/x: Permission denied")
ABSENT = Unknown("/sys/x does not exist", absent=True)

QUIET = QuietFacts(
    interrupts=(),
    default_mask=CLAIMED.others,
    workqueues=CLAIMED.others,
    watchdog=True,
    watchdog_mask=CLAIMED.others,
    numa_balancing="0",
    rt_runtime_us="950000",
    nohz_full=CLAIMED.exclusive,
    boot={},
    threads=(),
    offloaded=CLAIMED.exclusive,
    queues=(),
    power={cpu: Power("20", "performance", CpuSet({cpu})) for cpu in CLAIMED.exclusive},
    irqbalance=None,
    tuned=None,
    crio=None,
    partitions=(),
)
"""A node on which nothing disturbs pCPUs 2 and 3."""


def _interrupt(number: int, name: str = "eth0", mask: str = "0-3", **facts: Any) -> Interrupt:
    row = InterruptRow(number, f"PCI-MSIX {name}", (name,), {})
    return Interrupt(row, CpuSet.parse(mask), **facts)


def _rows(facts: QuietFacts, there: list[Firing] | None = None) -> dict[str, Row]:
    found = [
        *findings.findings(facts, there or [], CLAIMED),
        *findings.kernel_findings(facts, CLAIMED),
    ]
    return {row.check: row for row in found}


def test_a_quiet_node() -> None:
    """Nothing is to be done."""
    found = _rows(QUIET)
    assert {row.status for row in found.values()} == {"ok", "info"}
    assert [row.check for row in found.values() if row.status == "info"] == ["idle states"]
    assert all(not row.remedy for row in found.values())


@pytest.mark.parametrize(
    ("facts", "check", "status", "text", "remedy"),
    [
        ({"default_mask": CpuSet(range(4))}, "default mask", "info", "on exclusive pCPUs 2-3",
         "echo 3 > /proc/irq/default_smp_affinity"),
        ({"default_mask": CpuSet({2})}, "default mask", "info", "pCPU 2 ", "irqaffinity=0-1"),
        ({"workqueues": CpuSet(range(4))}, "workqueues", "info", "pCPUs 2-3",
         "echo 3 > /sys/devices/virtual/workqueue/cpumask"),
        ({"threads": (MovableThread(33, "kswapd0", CpuSet(range(4))),)}, "kernel threads", "info",
         "1 kernel thread that can be moved", "taskset -p -c 0-1 33"),
        ({"threads": tuple(MovableThread(n, "kx", CpuSet({2})) for n in range(40))},
         "kernel threads", "info", "and 37 more", "quiet: full in the configuration"),
        ({"queues": (Queue("eth0", "rx-1", "rps", CpuSet({0, 3})),)}, "RPS and XPS", "warn",
         "eth0 rx-1 (rps_cpus)", "echo 1 > /sys/class/net/eth0/queues/rx-1/rps_cpus"),
        ({"watchdog_mask": CpuSet(range(4))}, "watchdog", "info", "2-3",
         "sysctl kernel.watchdog_cpumask=0-1"),
        ({"watchdog_mask": CpuSet({3})}, "watchdog", "info", "3", "sysctl kernel.watchdog=0"),
        ({"watchdog": False, "watchdog_mask": CpuSet({3})}, "watchdog", "ok", "off", ""),
        ({"nohz_full": EMPTY}, "tick", "info", "exclusive pCPUs 2-3", "nohz_full=2-3"),
        ({"nohz_full": CpuSet({3, 9})}, "tick", "info", "pCPU 2", "nohz_full=2-3,9"),
        ({"nohz_full": ABSENT}, "tick", "info", "CONFIG_NO_HZ_FULL", "a kernel with"),
        ({"offloaded": EMPTY}, "RCU", "info", "run there", "rcu_nocbs=2-3"),
        ({"numa_balancing": "1"}, "NUMA balancing", "warn", "on:", "numa_balancing=0"),
        ({"rt_runtime_us": "-1"}, "real-time limit", "warn", "not throttled", "950000"),
        ({"boot": {"isolcpus": "managed_irq,domain,3"}}, "isolated pCPUs", "info",
         "the exclusive pCPUs are 2-3", ""),
        ({"boot": {"isolcpus": "nohz,0-9:1/2"}}, "isolated pCPUs", "info", "isolcpus=nohz", ""),
        ({"partitions": (Partition("/a", "isolated", CpuSet({3})),)}, "isolated pCPUs", "info",
         "kata-pin writes no cgroup", ""),
        ({"partitions": (Partition("/a", "isolated invalid (x)", EMPTY),)}, "isolated pCPUs",
         "warn", "isolates nothing", ""),
        ({"irqbalance": Irqbalance(9, {}, CpuSet({2}))}, "irqbalance", "warn",
         "may move interrupts to exclusive pCPU 3", "IRQBALANCE_BANNED_CPULIST=2-3"),
        ({"irqbalance": Irqbalance(9, {}, CpuSet({2, 3}))}, "irqbalance", "ok", "clear of 2-3", ""),
        ({"irqbalance": Irqbalance(9, HIDDEN, HIDDEN)}, "irqbalance", "warn", "not known", "2-3"),
        ({"irqbalance": Irqbalance(9, {"IRQBALANCE_BANNED_CPUS": "c"}, CpuSet({2, 3}))},
         "irqbalance", "ok", "clear", ""),
        ({"tuned": Tuned(9, "cpu-partitioning", isolates=True)}, "tuned", "warn", "isolated_cores",
         "isolated_cores=2-3"),
        ({"tuned": Tuned(9, "virtual-guest", isolates=False)}, "tuned", "ok", "virtual-guest", ""),
        ({"crio": Crio(9, ("/etc/crio/crio.conf",))}, "CRI-O", "info", "restarts irqbalance",
         "allowed_annotations"),
        ({"crio": Crio(9, ())}, "CRI-O", "ok", "off", ""),
    ],
)  # fmt: skip
def test_a_node_with_one_fault(
    facts: dict[str, Any], check: str, status: str, text: str, remedy: str
) -> None:
    """The row says what it is and what helps."""
    row = _rows(replace(QUIET, **facts))[check]
    assert row.status == status
    assert text in row.text
    assert remedy in row.remedy


def test_the_deprecated_ban() -> None:
    """It overrides the other, which nothing else says."""
    facts = replace(QUIET, irqbalance=Irqbalance(9, {"IRQBALANCE_BANNED_CPUS": "c"}, HIDDEN))
    first, second = [
        row for row in findings.findings(facts, [], CLAIMED) if row.check == "irqbalance"
    ]
    assert "deprecated" in first.text
    assert first.status == second.status == "warn"


@pytest.mark.parametrize(
    "name",
    [
        *("interrupts", "default_mask", "workqueues", "watchdog", "watchdog_mask"),
        *("numa_balancing", "nohz_full", "boot", "threads", "queues", "irqbalance"),
        *("tuned", "crio", "partitions"),
    ],
)
def test_what_cannot_be_read_is_never_fine(name: str) -> None:
    """Each is a warning that says so."""
    hidden: dict[str, Any] = {name: HIDDEN}
    facts = replace(QUIET, **hidden)
    found = [*findings.findings(facts, [], CLAIMED), *findings.kernel_findings(facts, CLAIMED)]
    lost = [row for row in found if "not readable" in row.text]
    assert lost
    assert all(row.status == "warn" and row.remedy == "run as root" for row in lost)


@pytest.mark.parametrize("hidden", [{"latency": HIDDEN}, {"governor": HIDDEN}])
def test_power_that_cannot_be_read(hidden: dict[str, Any]) -> None:
    """So are idle states and governor."""
    power = {cpu: replace(one, **hidden) for cpu, one in QUIET.power.items()}
    assert "not readable" in str(_rows(replace(QUIET, power=power)))


def test_power() -> None:
    """Limits and governors are named by pCPU, and whom a change would reach."""
    power = {2: Power("0", "powersave", CpuSet({1, 2})), 3: Power("n/a", ABSENT, CpuSet({3}))}
    found = _rows(replace(QUIET, power=power))
    assert found["idle states"].text == (
        "exclusive pCPU 2: no limit; exclusive pCPU 3: no idle state but polling"
    )
    assert "no frequency control" in found["governor"].text
    power[3] = Power("0", "performance", CpuSet({3}))
    row = _rows(replace(QUIET, power=power))["governor"]
    assert "also cover pCPUs 1" in row.text
    assert "cpupower -c 2 " in row.remedy


def test_interrupts_that_can_be_moved() -> None:
    """Those that fire are named, and the command moves all."""
    there = [
        Firing(2, _interrupt(30, effective=CpuSet({2})), 0.0),
        Firing(3, _interrupt(31, "nvme9"), 12.5),
    ]
    row = _rows(QUIET, there)["interrupts"]
    assert row.status == "warn"
    assert row.text == (
        "2 interrupts that can be moved are on exclusive pCPUs; "
        "active now: nvme9 (interrupt 31) 12.5/s on pCPU 3"
    )
    assert "for i in 31 30; do echo 0-1 > /proc/irq/$i/smp_affinity_list; done" in row.remedy


def test_no_pcpu_is_left() -> None:
    """No command is shown that would write an empty mask."""
    alone = Claimed(CpuSet({0, 1, 2, 3}), EMPTY)
    facts = replace(QUIET, default_mask=CpuSet({0}), workqueues=CpuSet({0}), watchdog_mask=EMPTY)
    facts = replace(facts, threads=(MovableThread(3, "x", CpuSet({0})),))
    found = [
        *findings.findings(facts, [Firing(2, _interrupt(30), 1.0)], alone),
        *findings.kernel_findings(facts, alone),
    ]
    assert all("echo  " not in row.remedy and "-c  " not in row.remedy for row in found)
    assert found[0].remedy == "leave at least one pCPU without a pod"


@pytest.mark.parametrize(
    ("mask", "per_s", "status", "text"),
    [
        ("3", 0.0, "ok", "silent while nothing there submits I/O"),
        ("3", 4.0, "warn", "now active: nvme0q3 (interrupt 40) 4/s on pCPU 3"),
        ("1,3", 0.0, "info", "shared with other pCPUs"),
    ],
)
def test_managed_interrupts(mask: str, per_s: float, status: str, text: str) -> None:
    """They are never offered a command that moves them, and one that VFIO has is no finding."""
    there = [
        Firing(3, _interrupt(40, "nvme0q3", mask, managed=True), per_s),
        Firing(3, _interrupt(41, "vfio-msix[0](0000:03:00.0)"), 99.0),
    ]
    found = _rows(QUIET, there)
    assert found["interrupts"].status == "ok"
    row = found["managed interrupts"]
    assert (row.status, text in row.text) == (status, True)
    assert "echo" not in row.remedy
    assert status == "ok" or "isolcpus=managed_irq,2-3" in row.remedy


def _reading(time_s: float, counts: dict[int, tuple[str, dict[int, int]]], ticks: int) -> Reading:
    kinds = dict.fromkeys(InterruptKind, 0) | {InterruptKind.TICK: ticks, InterruptKind.CALL: 2}
    sample = CpuSample(None, None, kinds, {"NET_RX": ticks, "RCU": 1})
    return Reading(time_s, counts, {2: sample})


def test_rates() -> None:
    """Counts grow per second; one of another device, or that began again, counts nothing."""
    known = tuple(_interrupt(n, effective=CpuSet({3} if n == 34 else {0})) for n in range(30, 35))
    first = _reading(
        10, {30: ("a", {2: 5}), 31: ("a", {2: 5}), 32: ("a", {2: 9}), 34: ("a", {3: 0})}, 0
    )
    last = _reading(
        12, {30: ("a", {2: 25}), 31: ("b", {2: 9}), 32: ("a", {2: 1}), 33: ("a", {2: 7}),
             34: ("a", {3: 0})}, 200,
    )  # fmt: skip
    found = firing(known, first, last, CLAIMED.exclusive)
    assert [(one.cpu, one.interrupt.number, one.per_s) for one in found] == [
        (2, 30, 10.0),
        (3, 34, 0.0),
    ]
    assert rate_of("tick", 2, first, last) == 100.0
    assert rate_of("ipi", 2, first, last) == 0.0
    assert rate_of("tick", 3, first, last) is None
    assert softirq_rates(2, first, last) == {"NET_RX": 100.0}
    assert softirq_rates(3, first, last) is None


@pytest.mark.parametrize(
    ("facts", "check", "status", "text"),
    [
        ((None, (0, 0.0), 0), "CPU quota", "ok", "none"),
        ((2.0, (0, 0.0), 0), "CPU quota", "info", "at most 2 CPUs; never throttled"),
        ((0.5, (7, 1.25), 0), "CPU quota", "warn", "at most 0.5 CPUs; throttled 7 times, 1.2 s"),
        ((0.5, HIDDEN, 0), "CPU quota", "warn", "not readable"),
        ((HIDDEN, HIDDEN, 0), "CPU quota", "warn", "not readable"),
        ((None, (0, 0.0), 0), "core scheduling", "info", "no cookie"),
        ((None, (0, 0.0), 255), "core scheduling", "ok", "cookie 0xff"),
        ((None, (0, 0.0), HIDDEN), "core scheduling", "info", "unknown"),
    ],
)
def test_sandboxes(facts: tuple[Any, Any, Any], check: str, status: str, text: str) -> None:
    """Quota, throttling and cookie of each."""
    rows = {
        row.check: row for row in findings.sandbox_findings([SandboxFacts("id", "a/b", *facts)], {})
    }
    assert (rows[check].status, rows[check].sandbox) == (status, "a/b")
    assert text in rows[check].text


def test_a_core_that_is_shared() -> None:
    """It is a warning, and so is a missing cookie then."""
    one = SandboxFacts("id", "a/b", None, (0, 0.0), 0)
    rows = {
        row.check: row for row in findings.sandbox_findings([one], {"id": ["pCPU 2 with 3 (x/y)"]})
    }
    assert rows["SMT siblings"].text == "shares cores: pCPU 2 with 3 (x/y)"
    assert rows["core scheduling"].status == rows["SMT siblings"].status == "warn"


@pytest.mark.parametrize(
    ("cpus", "mask"), [("0-3", "f"), ("0,32", "1,00000001"), ("63", "80000000,00000000")]
)
def test_masks_in_commands(cpus: str, mask: str) -> None:
    """They are as the kernel takes them: no leading zeros, groups of eight digits."""
    assert CpuSet.parse(cpus).hex_mask() == mask
