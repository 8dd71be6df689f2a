"""A tree of a host whose kernel has much to do: generated, because it would be large.

Forms of the files: /proc and /sys of Debian's 6.12 kernel with virtio-net and NVMe under QEMU,
where managed interrupts have mode 0444. Numbers and names are made up.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kata_pin.base.cpuset import CpuSet
from kata_pin.linux.files import HostRoot
from tests.support.hosttree import grow

PF_KTHREAD = 0x0020_0000
NO_SETAFFINITY = 0x0400_0000


def host(
    folder: Path, *, cpus: int = 64, interrupts: int = 500, fired: int = 7, more: Mapping[str, str]
) -> HostRoot:
    """Return its root: one queue of a network card per pCPU that can be moved, the rest managed.

    Interrupt 100 + n belongs to pCPU n, and so on in turn; each fired `fired` times there.
    """
    everyone = CpuSet(range(cpus))
    files = {
        "proc/cmdline": "ro quiet isolcpus=managed_irq,domain,4-7 nohz_full=4-7 -- nohz_full=9",
        "proc/irq/default_smp_affinity": hexadecimal(everyone),
        "proc/sys/kernel/watchdog": "1",
        "proc/sys/kernel/watchdog_cpumask": str(everyone),
        "proc/sys/kernel/numa_balancing": "1",
        "proc/sys/kernel/sched_rt_runtime_us": "950000",
        "sys/devices/virtual/workqueue/cpumask": hexadecimal(everyone),
        "sys/devices/system/cpu/nohz_full": "4-7",
        "sys/devices/system/cpu/online": str(everyone),
        "sys/class/net/eth0/queues/rx-0/rps_cpus": hexadecimal(CpuSet({1, 5})),
        "sys/class/net/eth0/queues/rx-1/rps_cpus": "0",
        "sys/class/net/eth0/queues/tx-0/xps_cpus": hexadecimal(CpuSet({2})),
        "sys/class/net/eth0/queues/tx-0/tx_timeout": "0",
        **process(1, "systemd", ppid=0, flags=0, cpus=str(everyone)),
        **process(2, "kthreadd", ppid=0, flags=PF_KTHREAD, cpus=str(everyone)),
        **process(3, "kswapd0", ppid=2, flags=PF_KTHREAD, cpus=str(everyone)),
        **process(4, "rcuop/4", ppid=2, flags=PF_KTHREAD, cpus="0-3"),
        **process(5, "ksoftirqd/4", ppid=2, flags=PF_KTHREAD | NO_SETAFFINITY, cpus="4"),
        **process(6, "irq/101-eth0", ppid=2, flags=PF_KTHREAD, cpus="4"),
        **process(7, "vhost-77", ppid=2, flags=PF_KTHREAD, cpus="4"),
    }
    for cpu in range(cpus):
        base = f"sys/devices/system/cpu/cpu{cpu}"
        files[f"{base}/power/pm_qos_resume_latency_us"] = "0"
        files[f"{base}/cpufreq/scaling_governor"] = "powersave"
        files[f"{base}/cpufreq/related_cpus"] = f"{cpu} {cpu ^ 1}"
    for number in range(100, 100 + interrupts):
        cpu = (number - 100) % cpus
        files[f"proc/irq/{number}/smp_affinity_list"] = str(everyone)
        files[f"proc/irq/{number}/effective_affinity_list"] = str(cpu)
        files[f"proc/irq/{number}/node"] = "0"
    root = grow(folder, {**files, **more})
    for number in range(100 + cpus, 100 + interrupts):
        (folder / f"proc/irq/{number}/smp_affinity_list").chmod(0o444)
    count(folder, cpus=cpus, interrupts=interrupts, fired=fired)
    return root


def count(folder: Path, *, cpus: int, interrupts: int, fired: int) -> None:
    """Write the counters: each interrupt fired `fired` times on its pCPU."""
    head = "".join(f"{f'CPU{cpu}':>11}" for cpu in range(cpus))
    rows = [f"     {head}"]
    for number in range(100, 100 + interrupts):
        own = (number - 100) % cpus
        counts = "".join(f"{fired if cpu == own else 0:>11}" for cpu in range(cpus))
        name = f"eth0-rx-{own}" if number < 100 + cpus else f"nvme0q{number}"
        rows.append(f"{number}: {counts}  PCI-MSIX-0000:00:02.0  {number}-edge      {name}")
    for label, text in (("LOC", "Local timer interrupts"), ("RES", "Rescheduling interrupts")):
        rows.append(f"{label}: {''.join(f'{fired * 100:>11}' for _ in range(cpus))}   {text}")
    (folder / "proc/interrupts").write_text("\n".join(rows) + "\n")
    soft = [f"{name}: {''.join(f'{fired:>11}' for _ in range(cpus))}" for name in ("TIMER", "RCU")]
    (folder / "proc/softirqs").write_text("\n".join([f"     {head}", *soft]) + "\n")


def process(pid: int, comm: str, *, ppid: int, flags: int, cpus: str) -> dict[str, str]:
    """Return the files of a process: stat and status."""
    stat = f"{pid} ({comm}) S {ppid} 0 0 0 -1 {flags} 0 0 0 0 0 0 0 0 20 0 1 0 9 {'0 ' * 30}"
    return {
        f"proc/{pid}/stat": stat,
        f"proc/{pid}/status": f"Name:\t{comm}\nCpus_allowed_list:\t{cpus}",
    }


def hexadecimal(cpus: CpuSet) -> str:
    """Return the mask as the kernel prints it."""
    digits = f"{cpus.bits:x}"
    digits = digits.zfill(-(-len(digits) // 8) * 8)
    return ",".join(digits[at : at + 8] for at in range(0, len(digits), 8))
