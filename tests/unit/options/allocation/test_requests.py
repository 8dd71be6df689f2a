"""What a container requests, from what a runtime reports: requests, limits, classes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kata_pin.base.allocation import AllocState, Grant, Limits, Qos
from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.base.sandbox import Container
from kata_pin.options.allocation.requests import (
    as_requested,
    cpuset_of,
    dump_state,
    parse_state,
    pod_uid,
    request_of,
    request_of_record,
    with_asked,
)
from kata_pin.peers.nri.messages import Pod, PodContainer
from kata_pin.peers.oci import MAX_KEPT, CpuResources
from kata_pin.placement.masks import sandbox_of

CHOSE = {"cpu-policy.kata-pin.io": "share"}
POD = Pod(
    "p1", name="web", namespace="shop", uid="u1", handler="kata", annotations=CHOSE | {"a": "b"}
)
TWO = CpuResources(shares=2048, quota_us=200_000, period_us=100_000)


def _app(cpu: CpuResources = TWO, cgroups_path: str = "") -> PodContainer:
    return PodContainer("c1", "p1", name="app", cgroups_path=cgroups_path, cpu=cpu)


def test_a_kata_container() -> None:
    """Request and limit come back from shares and quota; the sandbox is named for Kata only."""
    found = request_of(POD, _app(), kata=True)
    assert (found.container_id, found.name) == ("c1", "app")
    assert (found.cpu_millis, found.limit_millis) == (2000, 2000)
    assert (found.pod.title, found.pod.handler, found.pod.annotations) == (
        *("shop/web", "kata"),
        CHOSE,
    )
    assert sandbox_of(found.pod) == "p1"
    assert request_of(POD, _app(), kata=False).pod.sandbox_id == ""


@pytest.mark.parametrize(
    ("cpu", "millis"),
    [
        (CpuResources(), 0),
        (CpuResources(shares=2), 0),
        (CpuResources(shares=102), 100),
        (CpuResources(shares=1024), 1000),
    ],
)
def test_requests(cpu: CpuResources, millis: int) -> None:
    """The kubelet's shares for no request are no request."""
    assert request_of(POD, _app(cpu), kata=True).cpu_millis == millis


def test_numbers_that_no_host_has() -> None:
    """The largest reported number makes a state that can be read after a restart."""
    cpu = CpuResources(quota_us=-MAX_KEPT, period_us=MAX_KEPT, shares=MAX_KEPT)
    request = request_of(POD, _app(cpu), kata=True)
    state = AllocState(CpuSet([0, 1]), grants={"c1": Grant(request, "none")})
    assert parse_state(dump_state(state)).grants["c1"].request == request


@pytest.mark.parametrize(
    ("path", "cpu", "qos"),
    [
        ("/kubepods/podu1/c1", CpuResources(), Qos.GUARANTEED),
        ("kubepods-podu1.slice:cri-containerd:c1", CpuResources(), Qos.GUARANTEED),
        ("/kubepods/burstable/podu1/c1", TWO, Qos.BURSTABLE),
        ("kubepods-besteffort-podu1.slice:cri-containerd:c1", TWO, Qos.BEST_EFFORT),
        ("/pods/c1", TWO, Qos.GUARANTEED),
        ("", CpuResources(shares=2048), Qos.BURSTABLE),
        ("", CpuResources(quota_us=-1, shares=1024), Qos.BURSTABLE),
        ("", CpuResources(), Qos.BURSTABLE),
    ],
)
def test_classes(path: str, cpu: CpuResources, qos: Qos) -> None:
    """The kubelet's cgroup gives the class; elsewhere the container's own limit does."""
    assert request_of(POD, _app(cpu, path), kata=True).pod.qos is qos


def test_a_record_asks_for_the_same() -> None:
    """What hooks recorded gives the request that NRI gives, but for the annotations."""
    record = Container(
        "c1",
        "p1",
        name="app",
        pod_name="web",
        pod_namespace="shop",
        pod_uid="u1",
        handler="kata",
        shares=2048,
        quota_us=200_000,
        period_us=100_000,
    )
    told = request_of(replace(POD, annotations={}), _app(), kata=True)
    assert request_of_record(record).pod == told.pod
    assert request_of_record(record).limit_millis == told.limit_millis
    nameless = request_of_record(Container("c1", "p1")).pod
    assert (nameless.pod_uid, sandbox_of(nameless)) == ("p1", "p1")
    assert pod_uid(Pod("p1")) == "p1"


def test_what_is_asked_for_stands_above_what_is_there() -> None:
    """Zeros and empty texts of an update change nothing."""
    asked = CpuResources(quota_us=300_000, shares=0, period_us=0)
    assert with_asked(TWO, asked) == CpuResources(shares=2048, quota_us=300_000, period_us=100_000)
    assert with_asked(TWO, CpuResources(cpus="3")).cpus == "3"


def test_limits_of_ours_are_not_the_pods_request() -> None:
    """What a runtime reports after an update of ours leaves the request as it was; the pod's own
    change counts."""
    request = request_of(POD, _app(), kata=False)
    ours = Limits(shares=512, quota_us=50_000, period_us=50_000)
    grant = Grant(request, "x", shared=CpuSet([0]), limits=ours)
    cpu = CpuResources(shares=512, quota_us=50_000, period_us=50_000)
    reported = request_of(POD, replace(_app(), cpu=cpu), kata=False)
    assert reported != request
    assert as_requested(reported, grant) == request
    assert as_requested(reported, replace(grant, limits=Limits())) == reported
    assert as_requested(reported, None) == reported
    resized = request_of(POD, replace(_app(), cpu=replace(cpu, shares=3072)), kata=False)
    own = replace(request.limits, shares=3072)
    assert as_requested(resized, grant) == replace(request, cpu_millis=3000, limits=own)


def test_limits_that_are_none() -> None:
    """A runtime sends 0 for what it leaves unchanged."""
    cpu = CpuResources(shares=0, quota_us=-1, period_us=0)
    assert cpuset_of(cpu).limits == Limits(quota_us=-1)
    assert cpuset_of(CpuResources(), 1 << 20).limits == Limits(memory=1 << 20)


def test_a_cpuset_that_is_none() -> None:
    """A text that no runtime should send counts as no cpuset."""
    assert cpuset_of(CpuResources(cpus="2-3", mems="0")).cpus == CpuSet([2, 3])
    assert cpuset_of(CpuResources(cpus="x")).cpus == EMPTY
