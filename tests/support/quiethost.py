"""A host whose kernel has much to do: generated, because it would be large.

Forms of the files: /proc and /sys of Debian's 6.12 kernel with virtio-net and NVMe under QEMU,
where managed interrupts have mode 0444. Numbers and names are made up.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kata_pin.base.cpuset import CpuSet
from tests.support.hosttree import grow
from tests.support.irqtree import IrqTree, Line

PF_KTHREAD = 0x0020_0000
NO_SETAFFINITY = 0x0400_0000


class QuietHost(IrqTree):
    """One queue of a network card per pCPU that can be moved, the rest of the interrupts managed.

    Interrupt 100 + n belongs to pCPU n, and so on in turn; each fired `fired` times there.
    """

    def __init__(
        self,
        folder: Path,
        *,
        cpus: int = 64,
        interrupts: int = 500,
        fired: int = 7,
        more: Mapping[str, str],
    ) -> None:
        super().__init__(folder, cpus)
        everyone = CpuSet(range(cpus))
        self.add_all(
            {
                100 + place: Line(
                    f"PCI-MSIX-0000:00:02.0  {100 + place}-edge      "
                    + (f"eth0-rx-{place}" if place < cpus else f"nvme0q{100 + place}"),
                    str(everyone),
                    node=0,
                    mode=0o644 if place < cpus else 0o444,
                    effective=str(place % cpus),
                )
                for place in range(interrupts)
            }
        )
        grow(folder, {**_files(cpus), **more})
        self.fire(fired)

    def fire(self, times: int) -> None:
        """Write the counters: each interrupt fired so often on its pCPU."""
        for number, line in self.lines.items():
            line.counts = {(number - 100) % self.cpus: times}
        self.unnumbered = {
            "LOC": (times * 100, "Local timer interrupts"),
            "RES": (times * 100, "Rescheduling interrupts"),
        }
        self.render()
        head = "".join(f"{f'CPU{cpu}':>11}" for cpu in range(self.cpus))
        counts = "".join(f"{times:>11}" for _ in range(self.cpus))
        soft = [f"{name}: {counts}" for name in ("TIMER", "RCU")]
        (self.root / "proc/softirqs").write_text("\n".join([f"     {head}", *soft]) + "\n")


def _files(cpus: int) -> dict[str, str]:
    """Return the host's other files."""
    everyone = CpuSet(range(cpus))
    files = {
        "proc/cmdline": "ro quiet isolcpus=managed_irq,domain,4-7 nohz_full=4-7 -- nohz_full=9",
        "proc/sys/kernel/watchdog": "1",
        "proc/sys/kernel/watchdog_cpumask": str(everyone),
        "proc/sys/kernel/numa_balancing": "1",
        "proc/sys/kernel/sched_rt_runtime_us": "950000",
        "sys/devices/virtual/workqueue/cpumask": everyone.hex_mask(),
        "sys/devices/system/cpu/nohz_full": "4-7",
        "sys/devices/system/cpu/online": str(everyone),
        "sys/class/net/eth0/queues/rx-0/rps_cpus": CpuSet({1, 5}).hex_mask(),
        "sys/class/net/eth0/queues/rx-1/rps_cpus": "0",
        "sys/class/net/eth0/queues/tx-0/xps_cpus": CpuSet({2}).hex_mask(),
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
    return files


def process(pid: int, comm: str, *, ppid: int, flags: int, cpus: str) -> dict[str, str]:
    """Return the files of a process: stat and status."""
    stat = f"{pid} ({comm}) S {ppid} 0 0 0 -1 {flags} 0 0 0 0 0 0 0 0 20 0 1 0 9 {'0 ' * 30}"
    return {
        f"proc/{pid}/stat": stat,
        f"proc/{pid}/status": f"Name:\t{comm}\nCpus_allowed_list:\t{cpus}",
    }
