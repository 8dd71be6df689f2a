"""What quiet pCPUs read and write: the doubles of the kernel's files answer as this kernel does."""

from __future__ import annotations

from errno import EINVAL, ENOENT, EOVERFLOW, ERANGE, ESRCH
from pathlib import Path

import pytest
from msgspec import Struct

from kata_pin.base.cpuset import CpuSet
from kata_pin.linux.files import HOST, HostRoot
from kata_pin.linux.topology import online
from kata_pin.options.quiet.read import read_counters, read_facts
from kata_pin.options.quiet.values import MovableThread, Unknown
from kata_pin.rights.broker.tunables import TUNABLE_FILES, TunableWrite, TunableWritten
from kata_pin.rights.calls import DIRECT, Calls
from tests.support.irqtree import Line
from tests.support.quiethost import QuietHost
from tests.support.worktree import START, WorkTree

pytestmark = pytest.mark.root


class Node(Struct):
    """A node with an interrupt and a kernel thread (`tid:start`) that may be moved."""

    root: str
    calls: Calls
    number: str
    thread: str
    affinity: str

    def read(self, kind: str, name: str = "") -> str:
        path = TUNABLE_FILES[kind].path.format(*name.split("/"))
        return Path(self.root + path).read_text().strip()

    def write(self, kind: str, value: str, name: str = "") -> TunableWritten:
        (written,) = self.calls.write_tunables([TunableWrite(kind, name, value)], self.root)
        return written


def _movable_interrupt() -> str:
    """Return an interrupt of this machine that takes the mask that it has."""
    kernel = Node("", DIRECT, "", "", "")
    for folder in sorted(Path("/proc/irq").iterdir()):
        mask = folder / "smp_affinity_list"
        if (
            mask.exists()
            and not kernel.write("interrupt", mask.read_text().strip(), folder.name)[0]
        ):
            return folder.name
    pytest.skip("no interrupt of this machine can be moved")


def _movable_thread() -> MovableThread:
    threads = read_facts(HOST, CpuSet()).threads
    assert not isinstance(threads, Unknown)
    return threads[0]


@pytest.fixture(params=["double", "kernel"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Node:
    if request.param == "kernel":
        thread = _movable_thread()
        name = f"{thread.tid}:{thread.starttime}"
        return Node("", DIRECT, _movable_interrupt(), name, str(thread.affinity))
    tree = WorkTree(tmp_path / "tree", 4)
    tree.add(24, Line("PCI-MSIX-0000:00:02.0   1-edge      eth0", "0-1"))
    tree.add_thread(30, "kswapd0", "0-3")
    return Node(str(tree.root), tree, "24", f"30:{START}", "0-3")


def test_a_mask_is_read_back(node: Node) -> None:
    """What was written is what the file has then, in the kernel's form."""
    for kind, name in (("interrupt", node.number), ("default-mask", "")):
        mask = node.read(kind, name)
        assert node.write(kind, mask, name) == TunableWritten(0, mask)
        assert node.read(kind, name) == mask


def test_refusals(node: Node) -> None:
    """CPUs beyond the kernel's, an interrupt that is not there, a mask that is too long."""
    mask, default = node.read("interrupt", node.number), node.read("default-mask")
    assert node.write("interrupt", "8191", node.number) == TunableWritten(ERANGE, mask)
    assert node.write("interrupt", "0", "99999") == TunableWritten(ENOENT, "")
    long = ",".join(["ffffffff"] * 41)
    assert node.write("default-mask", long) == TunableWritten(EOVERFLOW, default)
    assert node.read("interrupt", node.number) == mask


@pytest.mark.parametrize(
    ("kind", "name"),
    [("workqueues", ""), ("watchdog", ""), ("idle-limit", "0"), ("rps", "eth0/rx-0")],
)
def test_the_kernels_own_work(node: Node, kind: str, name: str) -> None:
    """A value that is written back is there as it was."""
    try:
        value = node.read(kind, name)
    except FileNotFoundError:
        pytest.skip(f"this machine has no {kind} {name}")
    assert node.write(kind, value, name) == TunableWritten(0, value)


def test_work_needs_a_pcpu(node: Node) -> None:
    """No mask of workqueues is empty."""
    mask = node.read("workqueues")
    assert node.write("workqueues", "0") == TunableWritten(EINVAL, mask)


def test_a_kernel_thread(node: Node) -> None:
    """It is the one that began then, or it has ended."""
    assert node.write("kernel-thread", node.affinity, node.thread) == (0, node.affinity)
    assert node.write("kernel-thread", "0", f"{node.thread}1") == TunableWritten(ESRCH)
    assert node.write("kernel-thread", "0", f"4194304:{START}") == TunableWritten(ESRCH)


# ---- what is read ----------------------------------------------------------------------------


@pytest.fixture(params=["double", "kernel"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> HostRoot:
    return HOST if request.param == "kernel" else QuietHost(tmp_path / "host", more={}).host


def test_facts(root: HostRoot) -> None:
    """Nothing that every node has is unknown, and masks are within the pCPUs that there are."""
    cpus = online(root)
    found = read_facts(root, cpus)
    assert not isinstance(found.interrupts, Unknown)
    assert not isinstance(found.threads, Unknown)
    assert not isinstance(found.boot, Unknown)
    assert not isinstance(found.queues, Unknown)
    assert found.interrupts
    assert found.threads
    assert found.boot
    assert found.queues
    assert len({one.number for one in found.interrupts}) == len(found.interrupts)
    assert any(one.effective and one.effective <= cpus for one in found.interrupts)
    for mask in (found.default_mask, found.workqueues, found.watchdog_mask):
        assert not isinstance(mask, Unknown)
        assert mask
        assert mask & cpus
    assert set(found.power) == set(cpus)


def test_counters(root: HostRoot) -> None:
    """Every interrupt has a count on every pCPU, and every pCPU its timer's and its softirqs'."""
    cpus = online(root)
    found = read_counters(root, cpus)
    assert found.interrupts
    assert {frozenset(counts) for _, counts in found.interrupts.values()} == {frozenset(cpus)}
    for cpu in cpus:
        assert found.cpus[cpu].interrupts
        softirqs = found.cpus[cpu].softirqs
        assert softirqs is not None
        assert {"TIMER", "RCU"} <= softirqs.keys()
