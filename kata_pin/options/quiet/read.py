"""What disturbs pCPUs beside tasks, read from /proc and /sys; nothing is written here."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from errno import EINVAL, ENODEV, EPERM, ESRCH
from itertools import islice
from typing import Final, TypeVar

from kata_pin.base.cpuset import MAX_CPU, CpuSet
from kata_pin.base.errors import KataPinError, ParseError
from kata_pin.base.sandbox import Process
from kata_pin.linux.cgroups import CgroupFiles
from kata_pin.linux.counters import cpu_samples
from kata_pin.linux.files import STAT_BYTES, HostRoot, read_bytes
from kata_pin.linux.interrupts import default_mask, read_interrupts
from kata_pin.linux.kernel_text import check_size
from kata_pin.linux.proc import kernel_worker, status_field
from kata_pin.linux.process import read_process
from kata_pin.options.quiet.services import (
    cpu_list,
    known,
    mask,
    read_crio,
    read_irqbalance,
    read_partitions,
    read_tuned,
    text,
    unreadable,
)
from kata_pin.options.quiet.values import (
    FrequencyPolicy,
    MovableThread,
    Power,
    Queue,
    QuietFacts,
    Reading,
    SandboxFacts,
    Unknown,
)
from kata_pin.rights.broker.libc import libc

T = TypeVar("T")

# Idle states and frequency of pCPUs.
#
# Facts are in Documentation/ABI/testing/sysfs-devices-power (pm_qos_resume_latency_us: `0` sets no
# limit, `n/a` allows no idle state), admin-guide/pm/cpufreq.rst (the files belong to a policy,
# which may cover several CPUs).

_POLICY: Final = re.compile(r"policy([0-9]{1,4})\Z")


def read_power(root: HostRoot, cpu: int) -> Power:
    """Return idle-state limit and governor of a pCPU; never raises."""
    base = root.sys("devices/system/cpu", f"cpu{cpu}")
    shared = related(f"{base}/cpufreq")
    return Power(
        latency=read_idle_limit(root, cpu),
        governor=known(f"{base}/cpufreq/scaling_governor", text),
        shared=CpuSet([cpu]) if isinstance(shared, Unknown) else shared,
    )


def read_idle_limit(root: HostRoot, cpu: int) -> str | Unknown:
    """Return the limit of a pCPU's idle states (see Power); never raises."""
    base = root.sys("devices/system/cpu", f"cpu{cpu}")
    return known(f"{base}/power/pm_qos_resume_latency_us", text)


def read_policies(root: HostRoot) -> list[FrequencyPolicy]:
    """Return the frequency policies of the node, those that can be read; never raises."""
    base = root.sys("devices/system/cpu/cpufreq")
    try:
        names = [match[1] for match in map(_POLICY.match, sorted(os.listdir(base))) if match]
    except OSError:
        return []
    found = []
    for name in names:
        folder = f"{base}/policy{name}"
        cpus = related(folder)
        governor = known(f"{folder}/scaling_governor", text)
        available = known(f"{folder}/scaling_available_governors", text)
        if not (
            isinstance(cpus, Unknown)
            or isinstance(governor, Unknown)
            or isinstance(available, Unknown)
        ):
            found.append(FrequencyPolicy(name, cpus, governor, frozenset(available.split())))
    return found


def related(policy: str) -> CpuSet | Unknown:
    """Return the pCPUs of a frequency policy; the file separates them by spaces."""
    return known(f"{policy}/related_cpus", lambda data: CpuSet(map(int, data.split())))


# Network queues whose packets are handled by chosen pCPUs: RPS and XPS.
#
# Facts are in Documentation/networking/scaling.rst. Devices of this network namespace only. A queue
# without XPS has a file that cannot be read (ENOENT), and an empty mask means off.

MAX_QUEUES: Final = 8192
"""Most queues that are read: 64 of a network card, and 2 per veth of 1,000 pods."""

_FILES: Final = {"rx-": ("rps", "rps_cpus"), "tx-": ("xps", "xps_cpus")}


def device_names(root: HostRoot) -> list[str]:
    """Return the network devices by name; never raises."""
    try:
        return sorted(os.listdir(root.sys("class/net")))
    except OSError:
        return []


def read_queues(root: HostRoot) -> tuple[Queue, ...] | Unknown:
    """Return the queues that have a mask, which may be empty; never raises."""
    base = root.sys("class/net")
    try:
        devices = sorted(os.listdir(base))
    except OSError as error:
        return unreadable(base, error)
    found = []
    for device, name in islice(_names(base, devices), MAX_QUEUES):
        kind, file = _FILES[name[:3]]
        cpus = mask(f"{base}/{device}/queues/{name}/{file}")
        if isinstance(cpus, Unknown) and not cpus.absent:
            return cpus
        if not isinstance(cpus, Unknown):
            found.append(Queue(device, name, kind, cpus))
    return tuple(found)


def _names(base: str, devices: list[str]) -> Iterator[tuple[str, str]]:
    for device in devices:
        try:
            names = sorted(os.listdir(f"{base}/{device}/queues"))
        except OSError:  # it was removed, or is no device (bonding_masters)
            continue
        yield from ((device, name) for name in names if name[:3] in _FILES)


# Kernel threads that work for the whole node and may be moved.
#
# Facts are in include/linux/sched.h (flags of tasks), Documentation/filesystems/proc.rst
# (task/children).

NO_SETAFFINITY: Final = 0x0400_0000
"""PF_NO_SETAFFINITY: the kernel refuses to move this thread."""

KTHREADD: Final = 2

_MOST: Final = 1024 * 1024
"""Longest list of kthreadd's children that is read."""


def processes(root: HostRoot) -> dict[int, Process] | Unknown:
    """Return every process by pid; Unknown where those of others are hidden."""
    try:
        pids = [int(name) for name in os.listdir(root.proc()) if name.isdigit()]
    except OSError as error:
        return unreadable(root.proc(), error)
    found = {one.pid: one for one in _read(root, pids)}
    if 1 not in found:
        return Unknown(f"{root.proc()} hides the processes of others (hidepid)")
    return found


def kernel_threads(root: HostRoot) -> Iterator[MovableThread] | Unknown:
    """Return the threads, each read when it is asked for: there may be thousands.

    kthreadd's own list saves reading every process, where there is one.
    """
    children = known(
        root.proc(KTHREADD, "task", KTHREADD, "children"),
        lambda data: [int(word) for word in data.split()],
        _MOST,
    )
    if not isinstance(children, Unknown):
        return movable(root, _read(root, children))
    every = processes(root)
    return every if isinstance(every, Unknown) else movable(root, every.values())


def movable(root: HostRoot, every: Iterable[Process]) -> Iterator[MovableThread]:
    """Yield those of these processes that are such threads.

    An interrupt's thread follows its interrupt, and KVM's and vhost's belong to a sandbox.
    """
    for one in every:
        if (
            one.ppid == KTHREADD
            and not one.flags & NO_SETAFFINITY
            and not one.comm.startswith("irq/")
            and kernel_worker(one.comm) is None
        ):
            yield from _thread(root, one)


def _read(root: HostRoot, pids: Iterable[int]) -> Iterator[Process]:
    for pid in sorted(pids):
        with suppress(KataPinError, OSError):
            yield read_process(root, pid)


def _thread(root: HostRoot, one: Process) -> Iterator[MovableThread]:
    with suppress(OSError, ParseError):
        status = read_bytes(root.proc(one.pid, "status"), STAT_BYTES)
        allowed = status_field(status, "Cpus_allowed_list")
        if allowed is not None:
            yield MovableThread(one.pid, one.comm, CpuSet.parse(allowed), one.key.starttime)


# What limits a sandbox's threads on their own pCPUs: CPU quota, and core scheduling.
#
# Facts are in Documentation/scheduler/sched-bwc.rst and cgroup-v2.rst (cpu.max);
# Documentation/admin-guide/hw-vuln/core-scheduling.rst (PR_SCHED_CORE).

_COOKIE: Final = {
    EINVAL: "this kernel has no core scheduling (CONFIG_SCHED_CORE)",
    ENODEV: "core scheduling needs SMT, which is off here",
    EPERM: "no permission to look into the process; run as root",
    ESRCH: "the process has exited",
}


def read_sandbox(
    files: CgroupFiles, sandbox: str, pod: str, *, vmm: int | None, vcpu: int | None
) -> SandboxFacts:
    """Return the facts of a sandbox with this VMM and one of its vCPU threads; never raises.

    `files` are those of the cpu controller.
    """
    if vmm is None:
        gone = Unknown("no VMM is known")
        return SandboxFacts(sandbox, pod, gone, gone, gone)
    folders = files.folders(vmm, vcpu or vmm)
    if folders is None:
        quota: float | Unknown | None = Unknown(f"the cgroup of process {vmm} is not known")
        return SandboxFacts(sandbox, pod, quota, Unknown("its cgroup is not known"), cookie(vmm))
    quota = _quota(folders)
    found = files.throttling(folders)
    throttled: tuple[int, float] | Unknown = Unknown("no cpu.stat can be read")
    if found is not None:
        throttled = found.times, found.ns / 1e9
    return SandboxFacts(sandbox, pod, quota, throttled, cookie(vcpu or vmm))


def _quota(folders: list[str]) -> float | Unknown | None:
    """Return the smallest quota of these cgroups in CPUs, None if there is none."""
    found: list[float] = []
    for folder in folders:
        one = known(f"{folder}/cpu.max", lambda data: _share(text(data)))
        if isinstance(one, Unknown) and one.absent:
            one = _quota_v1(folder)
        if isinstance(one, Unknown):
            return one
        found += [] if one is None else [one]
    return min(found, default=None)


def _quota_v1(folder: str) -> float | Unknown | None:
    quota = known(f"{folder}/cpu.cfs_quota_us", int)
    period = known(f"{folder}/cpu.cfs_period_us", int)
    if isinstance(quota, Unknown):
        return None if quota.absent else quota  # without the controller nothing limits
    if isinstance(period, Unknown):
        return period
    return quota / period if quota > 0 and period > 0 else None


def _share(content: str) -> float | None:
    quota, period = content.split()
    return None if quota == "max" else int(quota) / int(period)


def cookie(pid: int) -> int | Unknown:
    """Return the core-scheduling cookie of a thread, 0 for none; never raises."""
    try:
        return libc().core_cookie(pid)
    except OSError as error:
        return Unknown(_COOKIE.get(error.errno or 0, error.strerror or "unknown error"))


# What interrupts pCPUs, counted: one reading, of which two make rates.


def read_counters(root: HostRoot, cpus: CpuSet) -> Reading:
    """Return the counters as of now; what cannot be read is a problem, never an error."""
    problems: dict[str, str] = {}
    rows = {}
    try:
        rows = {one.number: (one.row.text, one.row.counts) for one in read_interrupts(root)}
    except KataPinError as error:
        problems["interrupts"] = error.message
    at = time.monotonic()
    return Reading(at, rows, cpu_samples(root, cpus, problems), _lost(problems))


def _lost(problems: dict[str, str]) -> tuple[str, ...]:
    """Return what this report lacks; cpu_samples reads more than interrupts."""
    return tuple(problems[one] for one in ("interrupts", "softirqs") if one in problems)


# /proc/cmdline: the parameters that the kernel was booted with.
#
# Facts are in Documentation/admin-guide/kernel-parameters.rst. Double quotes protect spaces, `--`
# ends the kernel's own, and `-` and `_` are the same in a name.

MAX_TEXT: Final = 64 * 1024
"""Longest command line that is read; x86 has 2 KiB, arm64 as well, s390 at most 64 KiB."""

_WORD: Final = re.compile(r'(?:[^\s"]|"[^"]*"?)+')


def parse_bootline(data: bytes) -> dict[str, str]:
    """Return the parameters with their last values, empty for a bare word; raises ParseError."""
    check_size(data, MAX_TEXT, "/proc/cmdline")
    found: dict[str, str] = {}
    for word in _WORD.findall(data.decode("utf-8", "backslashreplace")):
        if word == "--":
            break
        name, _, value = word.replace('"', "").partition("=")
        found[name.replace("-", "_")] = value
    return found


# The kernel's own work: its threads, workqueues, watchdog, tick, and what it was booted with.
#
# Facts are in Documentation/admin-guide/kernel-per-CPU-kthreads.rst, core-api/workqueue.rst,
# admin-guide/sysctl/kernel.rst; include/linux/sched.h (flags of tasks).

_OFFLOAD: Final = re.compile(r"rcuo[ps]/([0-9]{1,4})\Z")
"""A thread that runs RCU callbacks of one CPU (kernel/rcu/tree_nocb.h)."""


def read_facts(root: HostRoot, cpus: CpuSet) -> QuietFacts:
    """Return everything about the node, power of these pCPUs only; never raises."""
    sysctl = root.proc("sys/kernel")
    every = processes(root)
    names = {} if isinstance(every, Unknown) else {pid: one.comm for pid, one in every.items()}
    threads = every if isinstance(every, Unknown) else tuple(movable(root, every.values()))
    own = () if isinstance(threads, Unknown) else threads
    offloaded = {int(found[1]) for found in (_OFFLOAD.match(one.comm) for one in own) if found}
    return QuietFacts(
        interrupts=_told(read_interrupts, root),
        default_mask=_told(default_mask, root),
        workqueues=mask(root.sys("devices/virtual/workqueue/cpumask")),
        watchdog=known(f"{sysctl}/watchdog", lambda data: int(data) != 0),
        watchdog_mask=cpu_list(f"{sysctl}/watchdog_cpumask"),
        numa_balancing=known(f"{sysctl}/numa_balancing", text),
        rt_runtime_us=known(f"{sysctl}/sched_rt_runtime_us", text),
        nohz_full=cpu_list(root.sys("devices/system/cpu/nohz_full")),
        boot=known(root.proc("cmdline"), parse_bootline, MAX_TEXT + 1),
        threads=threads,
        offloaded=CpuSet(offloaded & set(range(MAX_CPU))),
        queues=read_queues(root),
        power={cpu: read_power(root, cpu) for cpu in cpus},
        irqbalance=read_irqbalance(root, names),
        tuned=read_tuned(root, names),
        crio=read_crio(root, names),
        partitions=read_partitions(root),
    )


def _told(read: Callable[[HostRoot], T], root: HostRoot) -> T | Unknown:
    """Return what is read, Unknown where that fails."""
    try:
        return read(root)
    except KataPinError as error:
        return Unknown(error.message)
