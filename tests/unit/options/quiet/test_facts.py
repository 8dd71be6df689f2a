"""What disturbs pCPUs, read from a large tree, from odd ones and from this machine."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from kata_pin.base.cpuset import CpuSet
from kata_pin.linux.files import HOST, HostRoot
from kata_pin.options.quiet.read import cookie, read_counters, read_facts
from kata_pin.options.quiet.values import Crio, Irqbalance, Partition, Queue, Tuned, Unknown
from kata_pin.rights.calls import Calls
from tests.support.quiethost import QuietHost, process

FOUR = CpuSet({4, 5, 6, 7})


def test_a_large_host(tmp_path: Path) -> None:
    """64 pCPUs and 500 interrupts, most of them managed."""
    found = read_facts(QuietHost(tmp_path, more={}).host, FOUR)
    assert not isinstance(found.interrupts, Unknown)
    assert len(found.interrupts) == 500
    assert sum(one.managed for one in found.interrupts) == 436
    assert found.default_mask == found.workqueues == found.watchdog_mask == CpuSet(range(64))
    assert (found.watchdog, found.numa_balancing, found.rt_runtime_us) == (True, "1", "950000")
    assert found.nohz_full == FOUR
    assert not isinstance(found.boot, Unknown)
    assert found.boot["isolcpus"] == "managed_irq,domain,4-7"
    assert found.queues == (
        Queue("eth0", "rx-0", "rps", CpuSet({1, 5})),
        Queue("eth0", "rx-1", "rps", CpuSet()),
        Queue("eth0", "tx-0", "xps", CpuSet({2})),
    )
    assert set(found.power) == set(FOUR)
    assert (found.power[4].latency, found.power[4].governor) == ("0", "powersave")
    assert found.power[4].shared == CpuSet({4, 5})
    assert (found.irqbalance, found.tuned, found.crio) == (None, None, None)


def test_kernel_threads(tmp_path: Path) -> None:
    """Those that can be moved, but for an interrupt's and a sandbox's; RCU's name their pCPU.

    Names that a process gave itself mean nothing.
    """
    more = {
        **process(70, "rcuop/5", ppid=1, flags=0, cpus="0-63"),
        **process(71, "rcuop/9999", ppid=2, flags=0, cpus="0-63"),
    }
    found = read_facts(QuietHost(tmp_path, interrupts=64, more=more).host, FOUR)
    assert not isinstance(found.threads, Unknown)
    names = {one.comm: str(one.affinity) for one in found.threads}
    assert names == {"kswapd0": "0-63", "rcuop/4": "0-3", "rcuop/9999": "0-63"}
    assert found.offloaded == CpuSet({4})


def test_other_programs(tmp_path: Path) -> None:
    """Irqbalance with its environment, tuned with an included profile, CRI-O with its hooks."""
    more = {
        **process(900, "irqbalance", ppid=1, flags=0, cpus="0-63"),
        "proc/900/environ": "PATH=/bin\0IRQBALANCE_BANNED_CPUS=f0\0",
        "run/irqbalance/irqbalance900.sock": "",
        **process(901, "tuned", ppid=1, flags=0, cpus="0-63"),
        "etc/tuned/active_profile": "mine",
        "etc/tuned/mine/tuned.conf": "[main]\ninclude=cpu-partitioning\n",
        "usr/lib/tuned/cpu-partitioning/tuned.conf": "[scheduler]\nisolated_cores=${x}\n",
        **process(902, "crio", ppid=1, flags=0, cpus="0-63"),
        "etc/crio/crio.conf": '#allowed_annotations = ["irq-load-balancing.crio.io"]\n',
        "etc/crio/crio.conf.d/9": 'allowed_annotations = ["x", "irq-load-balancing.crio.io"]\n',
    }
    found = read_facts(QuietHost(tmp_path, interrupts=64, more=more).host, FOUR)
    assert isinstance(found.irqbalance, Irqbalance)
    assert found.irqbalance.environment == {"IRQBALANCE_BANNED_CPUS": "f0"}
    assert found.tuned == Tuned(901, "mine", isolates=True)
    assert found.crio == Crio(902, (f"{tmp_path}/etc/crio/crio.conf.d/9",))


class _Balancer(Calls):
    """Calls of a node whose irqbalance gives this answer, or ends before it."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer

    def ask_irqbalance(self, pid: int, banned: str | None) -> socket.socket:
        """Return a connection with the answer on it."""
        assert (pid, banned) == (900, None)
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.sendall(self.answer)
        return ours


@pytest.mark.parametrize(
    ("answer", "banned"),
    [(b"SLEEP 10 BANNED 000000f0", "4-7"), (b"", None), (b"BANNED", None), (b"\xff" * 99, None)],
)
def test_what_irqbalance_answers(tmp_path: Path, answer: bytes, banned: str | None) -> None:
    """Its bans in force; an answer without sense is never none."""
    more = process(900, "irqbalance", ppid=1, flags=0, cpus="0-63")
    root = QuietHost(tmp_path, cpus=8, interrupts=8, more=more).host
    found = read_facts(replace(root, calls=_Balancer(answer)), FOUR)
    assert isinstance(found.irqbalance, Irqbalance)
    if banned is None:
        assert isinstance(found.irqbalance.banned, Unknown)
    else:
        assert found.irqbalance.banned == CpuSet.parse(banned)


def test_a_profile_that_leads_nowhere(tmp_path: Path) -> None:
    """Neither a loop of includes nor a path hurts."""
    more = {
        **process(901, "tuned", ppid=1, flags=0, cpus="0-63"),
        "etc/tuned/active_profile": "loop ../../x",
        "etc/tuned/loop/tuned.conf": "include=loop\n",
    }
    found = read_facts(QuietHost(tmp_path, interrupts=64, more=more).host, FOUR)
    assert found.tuned == Tuned(901, "loop ../../x", isolates=False)


def test_partitions(tmp_path: Path) -> None:
    """Partitions of cgroup v2 are named, also invalid ones; members are not."""
    more = {
        "sys/fs/cgroup/cgroup.controllers": "cpuset cpu",
        "sys/fs/cgroup/a/cpuset.cpus.partition": "member",
        "sys/fs/cgroup/a/cpuset.cpus.effective": "0-63",
        "sys/fs/cgroup/a/quiet/cpuset.cpus.partition": "isolated",
        "sys/fs/cgroup/a/quiet/cpuset.cpus.effective": "4-5",
        "sys/fs/cgroup/b/cpuset.cpus.partition": "isolated invalid (Cpu list not exclusive)",
        "sys/fs/cgroup/b/cpuset.cpus.effective": "",
        "sys/fs/cgroup/c/no-cpuset": "",
    }
    found = read_facts(QuietHost(tmp_path, interrupts=64, more=more).host, FOUR)
    assert not isinstance(found.partitions, Unknown)
    assert set(found.partitions) == {
        Partition("/a/quiet", "isolated", CpuSet({4, 5})),
        Partition("/b", "isolated invalid (Cpu list not exclusive)", CpuSet()),
    }


def test_nothing_there(tmp_path: Path) -> None:
    """Without any file everything is unknown or absent, and nothing fails."""
    found = read_facts(HostRoot(str(tmp_path)), FOUR)
    assert isinstance(found.interrupts, Unknown)
    assert isinstance(found.default_mask, Unknown)
    assert isinstance(found.threads, Unknown)
    assert isinstance(found.irqbalance, Unknown)
    assert isinstance(found.queues, Unknown)
    assert isinstance(found.power[4].governor, Unknown)
    assert found.power[4].governor.absent


def test_processes_that_are_hidden(tmp_path: Path) -> None:
    """With hidepid nothing is said to be absent that may only be hidden."""
    (tmp_path / "proc").mkdir()
    found = read_facts(HostRoot(str(tmp_path)), FOUR)
    for one in (found.threads, found.irqbalance, found.tuned, found.crio):
        assert isinstance(one, Unknown)
        assert not one.absent


@pytest.mark.parametrize(
    "file",
    [
        "proc/cmdline",
        "proc/irq/default_smp_affinity",
        "proc/sys/kernel/watchdog_cpumask",
        "sys/class/net/eth0/queues/rx-0/rps_cpus",
        "sys/devices/system/cpu/cpu4/cpufreq/related_cpus",
        "sys/devices/system/cpu/nohz_full",
        "proc/interrupts",
        "proc/softirqs",
    ],
)
@pytest.mark.parametrize("content", [b"\xff\xfe", b"99999999", b"," * 90000, b"-1", b"\x1b[31m"])
def test_files_that_make_no_sense_raise_nothing(tmp_path: Path, file: str, content: bytes) -> None:
    """No content of a file is an error."""
    root = QuietHost(tmp_path, cpus=8, interrupts=8, more={}).host
    (tmp_path / file).write_bytes(content)
    read_facts(root, FOUR)
    read_counters(root, FOUR)


def test_cost(tmp_path: Path) -> None:
    """64 pCPUs and 500 interrupts are read in a fraction of a second of CPU time."""
    root = QuietHost(tmp_path, more={}).host
    before = time.process_time()
    read_facts(root, FOUR)
    read_counters(root, FOUR)
    assert time.process_time() - before < 1


def test_this_machine() -> None:
    """Its interrupts, threads and masks can be read; nothing is hidden from root."""
    up = CpuSet(os.sched_getaffinity(0))
    found = read_facts(HOST, up)
    assert not isinstance(found.interrupts, Unknown)
    assert found.interrupts
    assert not isinstance(found.threads, Unknown)
    assert not isinstance(found.boot, Unknown)
    assert found.boot
    assert read_counters(HOST, up).problems == ()
    one = cookie(os.getpid())
    assert isinstance(one, Unknown | int)
    assert isinstance(cookie(2**22 + 1), Unknown)
