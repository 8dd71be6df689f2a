"""A prove document made of a window by hand: two pods, an intruder, a pCPU that was offline."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from kata_pin.base.counters import (
    BUCKETS,
    PF_NO_SETAFFINITY,
    CpuWindow,
    KvmCounts,
    Measured,
    MeasuredExits,
    MeasuredInterrupt,
    RanTask,
    SeenTask,
)
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.documents.measured import ProveDocument
from kata_pin.base.documents.state import State
from kata_pin.base.sandbox import PF_KTHREAD
from kata_pin.base.threads import TaskRun
from kata_pin.base.values import Method
from kata_pin.cli.reports import prove
from kata_pin.cli.reports.prove import ProofRequest
from kata_pin.linux.files import HostRoot
from kata_pin.linux.recording import Asked, Progress
from tests.unit.cli import documents as docs

V2 = HostRoot(str(Path(__file__).parents[2] / "data" / "cgroup2"))
"""A node with cgroup v2 alone."""

MS = 1_000_000
WINDOW_NS = 10_000 * MS
PARTS = 60


def owned() -> State:
    """Return a state of one pod with two exclusive pCPUs and one of another with one."""
    first = docs.sandbox(
        "shop/database",
        "4-5",
        docs.thread(4101, "vcpu", "4", vcpu=0, label="vcpu 0"),
        docs.thread(4102, "vcpu", "5", vcpu=1, label="vcpu 1"),
        docs.thread(4100, "emulator", "0-3"),
        exclusive="4-5",
        containers=(docs.container("postgres", "4-5", "4-5"),),
    )
    second = docs.sandbox(
        "shop/cache",
        "6",
        docs.thread(4201, "vcpu", "6", vcpu=0, label="vcpu 0"),
        exclusive="6",
    )
    return docs.state(first, second)


def ran(tid: int, *slices_ms: float, at: int = 0) -> RanTask:
    """Return what a task ran: slices of these lengths, all in one part of the window."""
    lengths = [int(one * MS) for one in slices_ms]
    buckets = [0] * BUCKETS
    for one in lengths:
        buckets[min((one >> 10).bit_length(), BUCKETS - 1)] += 1
    total = sum(lengths)
    return RanTask(tid, len(lengths), total, max(lengths), tuple(buckets), ((at, total),))


TASKS = {
    4101: SeenTask(4101, 4100, "CPU 0/KVM", 0, CpuSet([4])),
    4102: SeenTask(4102, 4100, "CPU 1/KVM", 0, CpuSet([5])),
    4201: SeenTask(4201, 4200, "CPU 0/KVM", 0, CpuSet([6])),
    4100: SeenTask(4100, 4100, "qemu", 0, CpuSet.parse("0-3")),
    40: SeenTask(40, 40, "migration/4", PF_KTHREAD | PF_NO_SETAFFINITY, CpuSet([4])),
    41: SeenTask(
        41, 41, "kworker/u32:3-events", PF_KTHREAD | PF_NO_SETAFFINITY, CpuSet.parse("0-15")
    ),
    900: SeenTask(900, 900, "sh \x1b[31m", 0, CpuSet.parse("0-15"), "/system.slice/cron.service"),
    901: SeenTask(901, 901, "cc1", parent="make (pid 880)"),
}


def measured(*, irq: bool = False) -> Measured:
    """Return a measurement: pCPU 4 is shared with others, 5 is its owner's, 6 went offline."""
    windows = {
        4: CpuWindow(
            4, 0, WINDOW_NS,
            (
                ran(4101, 6000, 1000), ran(900, 2, 4, 1500, at=20), ran(901, 0.3, at=21),
                ran(40, 0.01), ran(41, 0.25), ran(4100, 40), ran(0, 1453.44),
            ),
            records=40,
        ),
        5: CpuWindow(5, 0, WINDOW_NS, (ran(4102, 10_000),), records=40),
        6: CpuWindow(
            6, 0, WINDOW_NS, (ran(4201, 3000),), unknown_ns=7000 * MS, problem="it is offline"
        ),
    }  # fmt: skip
    times = {
        4101: (TaskRun(0, 0, 0), TaskRun(7000 * MS, 1546 * MS, 2)),
        4102: (TaskRun(0, 0, 0), TaskRun(10_000 * MS, 0, 1)),
    }
    found = Measured(Method.PERF, windows, TASKS, times, parts=PARTS, reader_ns=12 * MS)
    if irq:
        timer = MeasuredInterrupt(4, "hardware", "local_timer", -1, 2500, 5 * MS, MS // 50)
        disk = MeasuredInterrupt(4, "hardware", "nvme0q5", 36, 3, MS // 20, MS // 50)
        found = replace(found, interrupts=(timer, disk))
    return found


def felt() -> Measured:
    """Return the measurement with what the guests feel: vCPU 0 of the first is disturbed."""
    found = measured(irq=True)
    window = found.cpus[4]
    vcpu, *others = window.tasks
    vcpu = vcpu._replace(preempted=3, longest_wait_ns=1500 * MS)
    exits = (
        MeasuredExits(4101, 30, "io_instruction", 900, 30 * MS, 2 * MS, 4),
        MeasuredExits(4101, 1, "external_interrupt", 2500, 1520 * MS, 1500 * MS, 3),
        MeasuredExits(4101, 12, "hlt", halts=12, halted_ns=1400 * MS),
    )
    counts = KvmCounts(5000, 100, 0, 0, 0), KvmCounts(8412, 112, 20 * MS, 60 * MS, 1400 * MS)
    return replace(
        found,
        cpus={**found.cpus, 4: replace(window, tasks=(vcpu, *others))},
        exits=exits,
        kvm={4100: counts},
        no_kvm="cannot find a VM of process 4200 in /sys/kernel/debug/kvm",
    )


def proved(
    *, irq: bool = False, about: set[str] | None = None, guest: bool = False
) -> ProveDocument:
    """Return the document of that measurement."""

    def meter(_: HostRoot, __: Asked, ___: Progress) -> Measured:
        return felt() if guest else measured(irq=irq)

    wanted = ProofRequest(about, 10.0, 0.0, irq, guest=guest)
    return prove.prove(_mapped if guest else owned, wanted, root=V2, meter=meter)


def _mapped() -> State:
    """Return the state with the map of the first pod's guest."""
    state = owned()
    first, second = state.sandboxes
    (database,) = first.containers
    guest = docs.links(
        (0, "4", 0, "proven", database.id),
        (1, "5", 1, "proven", database.id),
        containers=(docs.confined("postgres", "0-1"), docs.confined("exporter", "2")),
    )
    return replace(
        state,
        sandboxes=(replace(first, guest=guest), replace(second, vmm=docs.vmm(pid=4200))),
    )
