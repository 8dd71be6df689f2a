"""The one request of CRI that is sent."""

from __future__ import annotations

from kata_pin.base.allocation import Limits
from kata_pin.base.cpuset import CpuSet
from kata_pin.peers.cri import update_resources_request
from kata_pin.peers.nri.replies import Cpuset
from tests.support.proto import cri_pb2 as pb


def test_the_bytes() -> None:
    """Field numbers as in k8s.io/cri-api; nothing but the cpuset."""
    whole = Cpuset(CpuSet.parse("0-1"), CpuSet.parse("1"))
    assert update_resources_request("c1", whole) == b"\n\x02c1\x12\x08\x32\x030-1\x3a\x011"
    assert update_resources_request("c1", Cpuset(CpuSet([3]))) == b"\n\x02c1\x12\x03\x32\x013"


def test_limits() -> None:
    """Those that are decided; 0 leaves the others unchanged."""
    told = pb.UpdateContainerResourcesRequest()
    limits = Limits(shares=512, quota_us=-1, memory=1 << 30)
    told.ParseFromString(update_resources_request("c1", Cpuset(limits=limits)))
    found = told.linux
    assert (found.cpu_shares, found.cpu_quota, found.cpu_period) == (512, -1, 0)
    assert (found.memory_limit_in_bytes, found.cpuset_cpus) == (1 << 30, "")


def test_a_runtime_reads_it() -> None:
    """Another reading of the same message finds the cpuset, and zeros that change nothing."""
    told = pb.UpdateContainerResourcesRequest()
    told.ParseFromString(update_resources_request("c1", Cpuset(CpuSet.parse("2-5,8"))))
    assert (told.container_id, told.linux.cpuset_cpus) == ("c1", "2-5,8")
    assert (told.linux.cpu_quota, told.linux.cpu_period, told.linux.cpu_shares) == (0, 0, 0)
