"""The kata-agent's requests and answers, its metrics, and a guest's texts about its CPUs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from msgspec import Struct

from kata_pin.base.cpuset import MAX_CPU, CpuSet
from kata_pin.base.errors import ParseError
from kata_pin.peers import proto
from kata_pin.peers.ttrpc import encoded, parsed

# Names and numbers: kata-containers, src/libs/protocols/protos (agent.proto, oci.proto). A field
# that an older agent leaves out reads as empty or 0. The answers come from a guest and are hostile:
# the receiver bounds their size.

SERVICE: Final = "grpc.AgentService"

MAX_PER_CPU: Final = 8192

NOBODY: Final = 65534
"""The user (nobody) that reads a file in a container: it needs no rights there."""

KILL: Final = 9


class CpuUsage(Struct, frozen=True):
    """CPU time that a container's cgroup has used, in ns.

    `per_cpu_ns` is by guest CPU number where the guest has cgroup v1 (cpuacct.usage_percpu lists
    all possible CPUs), empty with cgroup v2.
    """

    total_ns: int
    per_cpu_ns: tuple[int, ...] = ()


# ---- requests --------------------------------------------------------------------------------


def update_request(container_id: str, cpus: CpuSet) -> bytes:
    """AgentService.UpdateContainer with a cpuset and nothing else.

    The agent keeps what the request does not name (protocols/src/trans.rs). It ignores an empty
    cpuset, so that is a ValueError here.
    """
    if not cpus:
        raise ValueError("the agent ignores an empty cpuset; send all online CPUs instead")
    resources = proto.agent_pb2.LinuxResources(cpu=proto.agent_pb2.LinuxCPU(cpus=str(cpus)))
    message = proto.agent_pb2.UpdateContainerRequest(container_id=container_id, resources=resources)
    return encoded(message)


def stats_request(container_id: str) -> bytes:
    """AgentService.StatsContainer."""
    return encoded(proto.agent_pb2.StatsContainerRequest(container_id=container_id))


def exec_request(container_id: str, exec_id: str, args: tuple[str, ...]) -> bytes:
    """AgentService.ExecProcess: a program of the container: user nobody, no capabilities."""
    process = proto.agent_pb2.Process(
        user=proto.agent_pb2.User(uid=NOBODY, gid=NOBODY),
        args=args,
        env=["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
        cwd="/",
        no_new_privileges=True,
    )
    message = proto.agent_pb2.ExecProcessRequest(
        container_id=container_id, exec_id=_checked(exec_id), process=process
    )
    return encoded(message)


def read_request(container_id: str, exec_id: str, size: int) -> bytes:
    """AgentService.ReadStdout: at most `size` bytes; empty at the end."""
    message = proto.agent_pb2.ReadStreamRequest(
        container_id=container_id, exec_id=_checked(exec_id), len=size
    )
    return encoded(message)


def wait_request(container_id: str, exec_id: str) -> bytes:
    """AgentService.WaitProcess, after which the agent forgets the process."""
    message = proto.agent_pb2.WaitProcessRequest(
        container_id=container_id, exec_id=_checked(exec_id)
    )
    return encoded(message)


def kill_request(container_id: str, exec_id: str) -> bytes:
    """AgentService.SignalProcess with SIGKILL to one process that was started here."""
    message = proto.agent_pb2.SignalProcessRequest(
        container_id=container_id, exec_id=_checked(exec_id), signal=KILL
    )
    return encoded(message)


def _checked(exec_id: str) -> str:
    """Refuse an empty exec id: to the agent it means the container's own process, or all."""
    if not exec_id:
        raise ValueError("an empty exec id means the container itself")
    return exec_id


# ---- answers ---------------------------------------------------------------------------------


def parse_metrics(data: bytes) -> str:
    """Read the answer of GetMetrics: text in Prometheus format."""
    return parsed(proto.agent_pb2.Metrics(), data, "GetMetrics").metrics


def parse_usage(data: bytes) -> CpuUsage:
    """Read the CPU time in the answer of StatsContainer."""
    message = parsed(proto.agent_pb2.StatsContainerResponse(), data, "StatsContainer")
    usage = message.cgroup_stats.cpu_stats.cpu_usage
    return CpuUsage(usage.total_usage, tuple(usage.percpu_usage[:MAX_PER_CPU]))


def parse_read(data: bytes) -> bytes:
    """Read the answer of ReadStdout."""
    return parsed(proto.agent_pb2.ReadStreamResponse(), data, "ReadStdout").data


def parse_wait(data: bytes) -> int:
    """Read the answer of WaitProcess: the exit status."""
    return parsed(proto.agent_pb2.WaitProcessResponse(), data, "WaitProcess").status


# Texts of a guest's /proc about its CPUs: their APIC ids, and where a process may run.
#
# Hostile input: the size and every number are bounded. Only x86 has APIC ids (proc_cpuinfo(5),
# arch/x86/kernel/cpu/proc.c).

MAX_CPUINFO: Final = 4 << 20
"""Longest /proc/cpuinfo accepted: enough for 2,700 CPUs of 1.5 KiB each."""

MAX_STATUS: Final = 64 * 1024
MAX_APIC_ID: Final = 0xFFFFFFFE

_NUMBER: Final = re.compile(rb"[0-9]{1,10}\Z")


def parse_cpuinfo(data: bytes) -> Mapping[int, int]:
    """Read /proc/cpuinfo: each online guest CPU's APIC id, by CPU number.

    ParseError for a CPU without an APIC id, or when two CPUs have the same number or id.
    """
    if len(data) > MAX_CPUINFO:
        raise ParseError(f"longer than {MAX_CPUINFO} bytes", source="cpuinfo")
    found: dict[int, int] = {}
    cpu = -1
    for line in data.splitlines():
        name, colon, value = line.partition(b":")
        key = name.strip()
        if not colon or key not in {b"processor", b"apicid"}:
            continue
        number = _number(value.strip())
        if key == b"processor":
            if cpu >= 0 and cpu not in found:
                raise ParseError(f"CPU {cpu} has no apicid", source="cpuinfo")
            if number > MAX_CPU or number in found:
                raise ParseError(
                    "CPU number repeated or too high", source="cpuinfo", text=str(number)
                )
            cpu = number
        elif cpu < 0 or cpu in found or number > MAX_APIC_ID:
            raise ParseError("misplaced or invalid apicid", source="cpuinfo", text=str(number))
        else:
            found[cpu] = number
    if cpu < 0 or cpu not in found:
        raise ParseError("the last CPU has no apicid", source="cpuinfo")
    if len(set(found.values())) != len(found):
        raise ParseError("two CPUs have the same apicid", source="cpuinfo")
    return MappingProxyType(found)


def parse_allowed(data: bytes) -> CpuSet:
    """Read Cpus_allowed_list of /proc/<pid>/status; ParseError if it is missing or empty.

    These are the online CPUs that both the cgroup's cpuset and the process's affinity allow.
    """
    if len(data) > MAX_STATUS:
        raise ParseError(f"longer than {MAX_STATUS} bytes", source="status")
    for line in data.splitlines():
        name, _, value = line.partition(b":")
        if name == b"Cpus_allowed_list":
            cpus = CpuSet.parse(value.decode("ascii", "replace"), source="Cpus_allowed_list")
            if cpus:
                return cpus
    raise ParseError("no Cpus_allowed_list", source="status")


def _number(text: bytes) -> int:
    if _NUMBER.match(text) is None:
        raise ParseError("not a number", source="cpuinfo", text=text[:80].decode("latin-1"))
    return int(text)


# The agent's metrics (GetMetrics, or the shim's /metrics): how busy a guest's CPUs were.
#
# > kata_guest_cpu_time{cpu="1",item="user"} 12340
#
# One gauge per item of each `cpuN` line of the guest's /proc/stat, in ms. The label is not the
# CPU's number but its rank: the agent counts the lines (src/agent/src/metrics.rs, `enumerate`), and
# /proc/stat lists online CPUs only. With CPUs 0 and 3 online the labels are 0 and 1. Gauges are
# never removed: after an unplug the last ranks remain, with times that no longer change.

MAX_METRICS: Final = 2 << 20  # longest text accepted, in characters

_SAMPLE: Final = re.compile(
    r'^kata_guest_cpu_time\{cpu="([0-9]{1,4})",item="([a-z_]{1,16})"\} ([0-9.e+]{1,24})$',
    re.MULTILINE | re.ASCII,
)
_KINDS: Final = {
    **dict.fromkeys(("user", "nice", "system", "irq", "softirq"), "busy"),
    **dict.fromkeys(("idle", "iowait"), "idle"),
    "steal": "steal",
}


class RankTime(Struct, frozen=True):
    """Times in ms of one rank among the guest's online CPUs, since it was first online.

    `steal` is the time that the guest counts as taken by the host. `user` includes `guest`.
    """

    rank: int
    busy_ms: float = 0.0
    idle_ms: float = 0.0
    steal_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        """All time; if it does not grow between two readings, the CPU is offline."""
        return self.busy_ms + self.idle_ms + self.steal_ms


def parse_cpu_times(text: str) -> tuple[RankTime, ...]:
    """Return the times of every rank, 0 upwards; ParseError for no times, or gaps."""
    if len(text) > MAX_METRICS:
        raise ParseError(f"longer than {MAX_METRICS} characters", source="metrics")
    times: dict[str, dict[int, float]] = {"busy": {}, "idle": {}, "steal": {}}
    for match in _SAMPLE.finditer(text):
        rank, value = int(match[1]), _time(match[3])
        if kind := _KINDS.get(match[2]):
            times[kind][rank] = times[kind].get(rank, 0.0) + value
    busy = times["busy"]
    if not busy or sorted(busy) != list(range(len(busy))):
        raise ParseError("CPU times of some ranks are missing", source="metrics")
    return tuple(
        RankTime(rank, busy[rank], times["idle"].get(rank, 0.0), times["steal"].get(rank, 0.0))
        for rank in range(len(busy))
    )


def _time(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ParseError("invalid time", source="metrics", text=text)
    return value
