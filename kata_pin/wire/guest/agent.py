"""The kata-agent's requests and answers: the protobuf bytes of one ttrpc call each.

Names and numbers: kata-containers, src/libs/protocols/protos (agent.proto, oci.proto,
health.proto). A field that an older agent leaves out reads as empty or 0.

The answers come from a guest and are hostile: the receiver bounds their size; texts are clipped and
made printable here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kata_pin.model.cpuset import CpuSet
from kata_pin.wire import proto
from kata_pin.wire.ids import printable
from kata_pin.wire.ttrpc import parsed

if TYPE_CHECKING:
    from google.protobuf.message import Message

AGENT: Final = "grpc.AgentService"
HEALTH: Final = "grpc.Health"

MAX_FEATURES: Final = 64
MAX_PER_CPU: Final = 8192

NOBODY: Final = 65534
"""The user (nobody) that reads a file in a container: it needs no rights there."""

KILL: Final = 9


@dataclass(frozen=True, slots=True)
class CpuUsage:
    """CPU time that a container's cgroup has used, in ns.

    `per_cpu_ns` is by guest CPU number where the guest has cgroup v1 (cpuacct.usage_percpu lists
    all possible CPUs), empty with cgroup v2.
    """

    total_ns: int
    per_cpu_ns: tuple[int, ...] = ()


# ---- requests --------------------------------------------------------------------------------


NO_ARGUMENTS: Final = b""
"""Health.Check, Health.Version, AgentService.GetMetrics; GetGuestDetails without memory details."""


def update_request(container_id: str, cpus: CpuSet) -> bytes:
    """AgentService.UpdateContainer with a cpuset and nothing else.

    The agent keeps what the request does not name (protocols/src/trans.rs). It ignores an empty
    cpuset, so that is a ValueError here.
    """
    if not cpus:
        raise ValueError("the agent ignores an empty cpuset; send all online CPUs instead")
    resources = proto.agent_pb2.LinuxResources(cpu=proto.agent_pb2.LinuxCPU(cpus=str(cpus)))
    message = proto.agent_pb2.UpdateContainerRequest(container_id=container_id, resources=resources)
    return _encoded(message)


def stats_request(container_id: str) -> bytes:
    """AgentService.StatsContainer."""
    return _encoded(proto.agent_pb2.StatsContainerRequest(container_id=container_id))


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
    return _encoded(message)


def read_request(container_id: str, exec_id: str, size: int) -> bytes:
    """AgentService.ReadStdout: at most `size` bytes; empty at the end."""
    message = proto.agent_pb2.ReadStreamRequest(
        container_id=container_id, exec_id=_checked(exec_id), len=size
    )
    return _encoded(message)


def wait_request(container_id: str, exec_id: str) -> bytes:
    """AgentService.WaitProcess, after which the agent forgets the process."""
    message = proto.agent_pb2.WaitProcessRequest(
        container_id=container_id, exec_id=_checked(exec_id)
    )
    return _encoded(message)


def kill_request(container_id: str, exec_id: str) -> bytes:
    """AgentService.SignalProcess with SIGKILL to one process that was started here."""
    message = proto.agent_pb2.SignalProcessRequest(
        container_id=container_id, exec_id=_checked(exec_id), signal=KILL
    )
    return _encoded(message)


def _encoded(message: Message) -> bytes:
    return bytes(message.SerializeToString())


def _checked(exec_id: str) -> str:
    """Refuse an empty exec id: to the agent it means the container's own process, or all."""
    if not exec_id:
        raise ValueError("an empty exec id means the container itself")
    return exec_id


# ---- answers ---------------------------------------------------------------------------------


def parse_serving(data: bytes) -> bool:
    """Read the answer of Check: whether the agent serves."""
    return parsed(proto.agent_pb2.HealthCheckResponse(), data, "Check").status == 1


def parse_version(data: bytes) -> tuple[str, str]:
    """Read the answer of Version: the interface's version and the agent's."""
    message = parsed(proto.agent_pb2.VersionCheckResponse(), data, "Version")
    return printable(message.grpc_version), printable(message.agent_version)


def parse_features(data: bytes) -> tuple[str, ...]:
    """Read the answer of GetGuestDetails: what the agent was built with, such as agent-policy."""
    message = parsed(proto.agent_pb2.GuestDetailsResponse(), data, "GetGuestDetails")
    features = message.agent_details.extra_features[:MAX_FEATURES]
    return tuple(printable(feature) for feature in features)


def parse_metrics(data: bytes) -> str:
    """Read the answer of GetMetrics: text in Prometheus format, for metrics.py."""
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
