"""The agent's messages: byte vectors and bounds."""

from __future__ import annotations

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import ParseError
from kata_pin.peers.agent import messages
from kata_pin.peers.proto import agent_pb2 as pb


def test_an_update_has_cpus_and_nothing_else() -> None:
    """Field 1 the container, field 2 resources, 3 its CPU, 6 its Cpus: and no other byte."""
    data = messages.update_request("c1", CpuSet.parse("1,3-5"))
    assert data == b"\x0a\x02c1\x12\x09\x1a\x07\x32\x051,3-5"


def test_an_empty_cpuset_can_not_be_asked_for() -> None:
    """The agent would ignore it."""
    with pytest.raises(ValueError, match="ignores"):
        messages.update_request("c1", CpuSet())


def test_a_program_is_nobody() -> None:
    """User 65534 in its group, no terminal, no new privileges, a path to find it on."""
    data = messages.exec_request("c1", "e1", ("cat", "/x"))
    assert data == (
        b"\x0a\x02c1\x12\x02e1"
        b"\x22\x5b\x1a\x08\x08\xfe\xff\x03\x10\xfe\xff\x03\x22\x03cat\x22\x02/x"
        b"\x2a\x41PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        b"\x32\x01/\x48\x01"
    )


def test_no_request_can_mean_the_container_itself() -> None:
    """An empty exec id is the container's own process for a wait, all of them for a signal."""
    for request in (messages.kill_request, messages.wait_request):
        with pytest.raises(ValueError, match="container itself"):
            request("c1", "")
    with pytest.raises(ValueError, match="container itself"):
        messages.read_request("c1", "", 10)
    with pytest.raises(ValueError, match="container itself"):
        messages.exec_request("c1", "", ("cat",))
    assert messages.kill_request("c1", "e1") == b"\x0a\x02c1\x12\x02e1\x18\x09"


def test_what_is_kept_of_a_guests_numbers() -> None:
    """Lists are cut."""
    usage = pb.CpuUsage(total_usage=1, percpu_usage=[7] * 20_000)
    stats = pb.StatsContainerResponse(
        cgroup_stats=pb.CgroupStats(cpu_stats=pb.CpuStats(cpu_usage=usage))
    )
    assert len(messages.parse_usage(stats.SerializeToString()).per_cpu_ns) == messages.MAX_PER_CPU


def test_what_is_missing_is_nothing() -> None:
    """An empty answer has empty values."""
    assert messages.parse_usage(b"") == messages.CpuUsage(0)


def test_what_is_no_message() -> None:
    """Bytes that are no protobuf are a ParseError that names the request."""
    with pytest.raises(ParseError, match="StatsContainer"):
        messages.parse_usage(b"\xff")
