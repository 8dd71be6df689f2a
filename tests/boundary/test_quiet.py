"""Keeping interrupts and the kernel's work off exclusive pCPUs: files of /proc/irq and /sys.

Sixteen pCPUs; sandbox `p` has 4 and 5 exclusively. What is refused is as Linux refuses it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from errno import EBUSY, EINVAL, EIO, ENOSPC, EPERM, EROFS
from pathlib import Path
from typing import Any

import pytest

from tests.boundary.host import Vm
from tests.boundary.node import Node
from tests.support.irqtree import Line
from tests.support.worktree import WorkTree

ETH, DISK, MANAGED = 24, 25, 26
REST = "0-3,6-15"
NARROW_S = 1.6
RETURNS = 3
LEFT_S = 3600

DEFAULT = "proc/irq/default_smp_affinity"
WORK = "sys/devices/virtual/workqueue/cpumask"
DOG = "proc/sys/kernel/watchdog_cpumask"
RPS = "sys/class/net/eth0/queues/rx-0/rps_cpus"
XPS = "sys/class/net/eth0/queues/tx-0/xps_cpus"
IDLE = "sys/devices/system/cpu/cpu4/power/pm_qos_resume_latency_us"
GOVERNOR = "sys/devices/system/cpu/cpufreq/policy4/scaling_governor"
CRIO_IDLE, CRIO_GOVERNOR = "cpu-c-states.crio.io", "cpu-freq-governor.crio.io"


class Quiet:
    """A node and the double of its kernel's files."""

    def __init__(self, folder: Path) -> None:
        self.node = Node(folder, audit={"affinity_s": 10, "deep_s": 60}, quiet="irq")
        self.tree = self.node.kernel.tunables = WorkTree(self.node.host.folder, 16)
        self.tree.add(ETH, Line("PCI-MSIX-0000:00:02.0   1-edge      eth0-rx", "0-15"))
        self.tree.add(DISK, Line("PCI-MSIX-0000:00:03.0   0-edge      sda", "4"))
        managed = Line("PCI-MSIX-0000:00:04.0   1-edge      nvme0q5", "4-5", 0, EPERM, 0o444)
        self.tree.add(MANAGED, managed)
        self.tree.add_thread(33, "kswapd0", "0-15")
        self.tree.add_thread(34, "kcompactd1", "4-5")
        self.tree.add_thread(35, "khelper", "0-15", refuses=EINVAL)

    async def run(self, name: str = "p", cpus: str = "4-5", **options: Any) -> Vm:
        """Start a pod with exclusive CPUs, and let them become quiet."""
        vm = self.node.vm(name)
        await self.node.create(vm, name, **options)
        await self.node.create(vm, f"c-{name}", cpus, exclusive=True)
        await self.audit(NARROW_S)
        return vm

    async def end(self, vm: Vm) -> None:
        """End a pod."""
        vm.end()
        self.node.kernel.connector.exited(vm.pid, vm.pid)
        await self.until(lambda: not self.node.rows("containers", where=f"id = 'c-{vm.id}'"))
        await self.audit()

    async def audit(self, seconds: float = 11) -> None:
        """Let time pass, and the round end that is due then."""
        await self.node.clock.move(seconds)
        for _ in range(12):
            await self.node.pause()

    async def until(self, holds: Callable[[], object]) -> None:
        """Wait until something holds, with audits meanwhile."""
        with suppress(AssertionError):
            await self.node.until(holds, "", 0.5)
            return
        await self.audit()
        await self.node.until(holds, "what a round should do")

    async def shown(self) -> dict[str, Any]:
        """Return what the state document shows of the node."""
        quiet: dict[str, Any] = (await self.node.ask("state"))["kept_quiet"]
        return quiet

    def values(self) -> dict[str, str]:
        """Return every value that is set, masks as one number."""
        files = (DEFAULT, WORK, DOG, RPS, XPS, IDLE, GOVERNOR)
        found = {name: self.tree.get(name).replace(",", "").lstrip("0") or "0" for name in files}
        found[DOG] = self.tree.get(DOG)
        found |= {str(tid): self.tree.affinity(tid) for tid in self.tree.threads}
        return found | {str(number): mask for number, mask in self.tree.masks.items()}

    @property
    def records(self) -> int:
        """How many first values are stored."""
        return len(self.node.rows("tunables"))


@pytest.fixture
def quiet(tmp_path: Path) -> Quiet:
    return Quiet(tmp_path)


@pytest.fixture
async def irq(quiet: Quiet) -> AsyncIterator[Quiet]:
    async with quiet.node:
        yield quiet


@pytest.fixture
async def full(quiet: Quiet) -> AsyncIterator[Quiet]:
    quiet.node.change(quiet="full")
    async with quiet.node:
        yield quiet


async def test_a_pod_comes_and_goes(full: Quiet) -> None:
    """Everything leaves its pCPUs and is as it was afterwards; audits between only read."""
    first, files = full.values(), full.tree.files()
    vm = await full.run()
    await full.until(lambda: full.tree.get(GOVERNOR) == "performance")
    assert full.values() == {
        DEFAULT: "ffcf",
        WORK: "ffcf",
        DOG: REST,
        RPS: "2",
        XPS: "0",
        IDLE: "20",
        GOVERNOR: "performance",
        "33": REST,
        "34": REST,
        "35": "0-15",
        str(ETH): REST,
        str(DISK): REST,
        str(MANAGED): "4-5",
    }
    shown = await full.shown()
    assert (shown["cpus"], shown["full"], shown["managed"]) == ("4-5", "4-5", 1)
    written = len(full.tree.writes)
    for _ in range(3):
        await full.audit(61)
    assert len(full.tree.writes) == written
    await full.end(vm)
    await full.until(lambda: full.values() == first)
    await full.until(lambda: not full.records)
    assert full.tree.files() == files
    assert {one.kind for one in full.tree.writes} == full.tree.kinds, "each was written"


@pytest.mark.parametrize("level", ["irq", "report", "off"])
async def test_another_level(full: Quiet, level: str) -> None:
    """A reload restores what the new level does not keep."""
    first = full.values()
    await full.run()
    full.node.change(quiet=level)
    await full.node.ask("reload")
    await full.until(lambda: full.tree.get(GOVERNOR) == first[GOVERNOR])
    await full.until(lambda: full.tree.affinity(33) == "0-15")
    await full.until(lambda: full.tree.masks[ETH] == (REST if level == "irq" else "0-15"))


async def test_a_daemon_that_is_killed(full: Quiet) -> None:
    """The next one restores what the former one found: it was stored before the write."""
    first = full.values()
    vm = await full.run()
    await full.node.kill()
    vm.end()
    await full.node.start()
    await full.until(lambda: full.values() == first)
    await full.until(lambda: not full.records)


async def test_uninstall(irq: Quiet) -> None:
    """Everything is restored while the pod lives, and what cannot be is named."""
    await irq.run()
    irq.tree.fails[str(DISK)] = EIO
    reply = await irq.node.request("release")
    assert "interrupt 25" in str(reply)
    await irq.until(lambda: irq.tree.masks[ETH] == "0-15")
    assert (await irq.node.ask("release"))["quiet_kept"] == []


async def test_pods_that_start_together_cost_one_round(irq: Quiet) -> None:
    """New quiet pCPUs wait a little; free ones are free at once; a replaced pod's stay quiet."""
    old = await irq.run("old")
    await irq.run("new")
    await irq.end(old)
    assert irq.tree.masks[ETH] == REST
    written = len(irq.tree.writes)
    for cpu in (6, 7):
        await irq.node.create(irq.node.vm(f"p{cpu}"), f"c-p{cpu}", str(cpu), exclusive=True)
    assert len(irq.tree.writes) == written
    await irq.audit(NARROW_S)
    await irq.until(lambda: irq.tree.masks[ETH] == "0-3,8-15")


async def test_a_harmless_other_writer(irq: Quiet) -> None:
    """irqbalance moves interrupts among the housekeeping pCPUs; those masks stay for ever."""
    vm = await irq.run()
    irq.tree.set_mask(ETH, "7")
    await irq.audit()
    assert irq.tree.masks[ETH] == "7"
    await irq.end(vm)
    await irq.until(lambda: irq.tree.masks[DISK] == "4")
    assert irq.tree.masks[ETH] == "7"


@pytest.mark.parametrize("ends", ["later", "with CPUs that go"])
async def test_a_harmful_other_writer(irq: Quiet, ends: str) -> None:
    """It is corrected some times, then named and left for a while, or until pCPUs come or go."""
    await irq.run()
    for _ in range(RETURNS):
        irq.tree.set_mask(ETH, "4")
        await irq.until(lambda: irq.tree.masks[ETH] == REST)
    irq.tree.set_mask(ETH, "4")
    await irq.audit()
    await irq.audit()
    assert irq.tree.masks[ETH] == "4"
    assert [str(ETH) in one for one in (await irq.shown())["left"]] == [True]
    if ends == "later":
        await irq.audit(LEFT_S)
    else:
        irq.tree.offline = {15}
        irq.node.host.set_online("0-14")
        irq.tree.render()
    await irq.until(lambda: not {"4", "4-5"} & {irq.tree.masks[ETH]})


@pytest.mark.parametrize("number", [ENOSPC, EBUSY])
async def test_passing_errors(irq: Quiet, number: int) -> None:
    """No vector is free, or a move is in flight: the next round tries again."""
    irq.tree.fails[str(ETH)] = number
    await irq.run()
    await irq.until(lambda: irq.tree.masks[ETH] == REST)
    assert (await irq.shown())["failed_writes"] == {"interrupt": 1}


async def test_without_rights(irq: Quiet) -> None:
    """A read-only /proc: said, tried with one write per round, and nothing stays recorded."""
    for line in irq.tree.lines.values():
        line.refuses = EROFS
    await irq.run()
    assert "Read-only" in str((await irq.shown())["problems"])
    tried = len(irq.tree.writes)
    for _ in range(3):
        await irq.audit()
    assert len(irq.tree.writes) <= tried + 4
    assert {key for (key,) in irq.node.rows("tunables", "kind")} <= {"default-mask"}
    for line in irq.tree.lines.values():
        line.refuses = 0
    await irq.until(lambda: irq.tree.masks[ETH] == REST)


async def test_interrupts_that_come_and_go(irq: Quiet) -> None:
    """A new one gets what it would have had; a number that was used again is another one's."""
    vm = await irq.run()
    text = "PCI-MSIX-0000:00:09.0   1-edge      eth9"
    irq.tree.add(50, Line(text, REST))
    irq.tree.remove(DISK)
    irq.tree.add(DISK, Line("PCI-MSIX-0000:00:07.0   0-edge      sdb", "4-7"))
    await irq.until(lambda: irq.tree.masks[DISK] == "6-7")
    await irq.end(vm)
    await irq.until(lambda: (irq.tree.masks[DISK], irq.tree.masks[50]) == ("4-7", "0-15"))


async def test_what_fires_on_quiet_pcpus(irq: Quiet) -> None:
    """Counters tell whether it worked, by what can be moved and what cannot."""
    await irq.run()
    await irq.audit()
    irq.tree.lines[MANAGED].counts[4] = 7
    irq.tree.lines[ETH].counts |= {5: 1, 6: 100}
    irq.tree.render()
    await irq.audit()
    shown = await irq.shown()
    assert (shown["managed_fired"], shown["movable_fired"]) == (7, 1)


async def test_annotations(full: Quiet, caplog: pytest.LogCaptureFixture) -> None:
    """A pod may choose less than the setting, if a rule lets it; why not is logged once."""
    annotations = {"cpu-quiet.kata-pin.io": "off", CRIO_IDLE: "disable", CRIO_GOVERNOR: "turbo"}
    await full.run(annotations=annotations)
    await full.until(lambda: full.tree.get(IDLE) == "20")
    await full.audit()
    assert caplog.text.count("cpu-quiet.kata-pin.io ignored: no rule of alloc.allow") == 1
    await full.node.stop()
    full.node.change(alloc={"allow": [{"namespace": "*"}]})
    await full.node.start()
    await full.until(lambda: full.tree.masks[ETH] == "0-15")
    await full.until(lambda: full.tree.get(IDLE) == "n/a")
    shown = await full.node.shown(full.node.vms["p"])
    assert "available: performance, powersave" in str(shown["quiet"]["problems"])


async def test_a_broker_that_serves_the_level_irq_only(full: Quiet) -> None:
    """After a reload from `irq` to `full`: kernel work and power are reported, interrupts move."""
    full.tree.level = "irq"
    await full.run()
    await full.until(lambda: full.tree.masks[ETH] == REST)
    assert (full.tree.get(GOVERNOR), full.tree.affinity(33)) == ("powersave", "0-15")
    problems = (await full.shown())["problems"]
    reason = "not writable until a restart with a level of `quiet` that includes it"
    assert {f"{kind}: {reason}" for kind in ("workqueues", "governor 4")} <= {*problems}


async def test_what_crio_sets_itself(quiet: Quiet) -> None:
    """Its idle limit and governor are left alone and verified, whatever the setting."""
    node = quiet.node
    node.host.bundles = node.host.folder / "containers/storage"
    node.host.bundles.mkdir(parents=True)
    paths = node.settings["paths"] | {"bundle_roots": [str(node.host.bundles)]}
    node.change(quiet="full", paths=paths)
    quiet.tree.put(IDLE, "n/a")
    async with node:
        await quiet.run(annotations={CRIO_IDLE: "disable", CRIO_GOVERNOR: "performance"})
        await quiet.until(lambda: quiet.tree.affinity(33) == REST)
        assert (quiet.tree.get(IDLE), quiet.tree.get(GOVERNOR)) == ("n/a", "powersave")
        said = str((await node.shown(node.vms["p"]))["quiet"]["problems"])
        assert "CRI-O sets pm_qos_resume_latency_us to n/a, but pCPUs 5 have 0" in said
        assert "CRI-O sets the governor to performance, but pCPUs 4-5 have powersave" in said


@pytest.mark.parametrize("file", [WORK, DOG, RPS, IDLE, GOVERNOR])
async def test_what_is_not_there(full: Quiet, file: str) -> None:
    """A kernel without one of these does not keep the others from being set."""
    (full.tree.root / file).unlink()
    await full.run()
    await full.until(lambda: full.tree.affinity(33) == REST)


async def test_kernel_threads_that_come_and_go(full: Quiet) -> None:
    """New ones are moved at the next deep audit; of one that ended nothing is kept."""
    await full.run()
    full.tree.add_thread(77, "kxfs", "0-15")
    await full.audit(61)
    await full.until(lambda: full.tree.affinity(77) == REST)
    full.tree.end_thread(77)
    await full.audit(61)
    await full.until(lambda: not full.node.rows("tunables", where="name = '77:900'"))


async def test_a_policy_that_others_share(full: Quiet) -> None:
    """The governor stays where it would change a foreign pCPU's frequency, the idle limit not."""
    await full.run("p", "4")
    await full.until(lambda: full.tree.get(IDLE) == "20")
    assert full.tree.get(GOVERNOR) == "powersave"
    await full.run("q", "5")
    await full.until(lambda: full.tree.get(GOVERNOR) == "performance")
