"""Whose task ran there: by kata-pin's own knowledge first, then the kernel's word."""

from __future__ import annotations

from typing import Any

import pytest

from kata_pin.base.counters import PF_NO_SETAFFINITY, SeenTask
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.sandbox import PF_KTHREAD
from kata_pin.base.values import TaskClass
from kata_pin.placement.owners import KTHREADD, Known, Owner, class_of, container_of, place_of

OWNER = Owner(4, "p1", "shop/web", own={101: "vcpu 0"})
KNOWN = Known(
    threads={101: "p1", 102: "p1", 201: "p2", 301: "p2"},
    processes={100: "p1", 200: "p2"},
    containers={"p1": "p1", "c2": "p2"},
)
ONE, ALL = CpuSet.parse("4"), CpuSet.parse("0-7")


def task(tid: int, pid: int = 0, **facts: Any) -> SeenTask:
    made: dict[str, Any] = {"comm": "x", "affinity": ALL} | facts
    return SeenTask(tid, pid or tid, **made)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (task(101, 100), TaskClass.OWN),
        (task(102, 100), TaskClass.SAME_POD),
        (task(103, 100, affinity=None), TaskClass.SAME_POD),
        (task(104, cgroup="/kubepods/pod7/kata_p1", by_root=True), TaskClass.SAME_POD),
        (task(105, cgroup="/user.slice/user@1000.service/kata_p1"), TaskClass.USER),
        (task(201, 200), TaskClass.OTHER_SANDBOX),
        (task(301, flags=PF_KTHREAD), TaskClass.OTHER_SANDBOX),
        (
            task(202, cgroup="/system.slice/cri-containerd-c2.scope", by_root=True),
            TaskClass.OTHER_SANDBOX,
        ),
        (task(500, cgroup="/system.slice/cron.service"), TaskClass.USER),
        (task(501, affinity=None, parent="sh (pid 9)"), TaskClass.USER),
        (task(502, affinity=None), TaskClass.UNKNOWN),
        (None, TaskClass.UNKNOWN),
        (task(20, flags=PF_KTHREAD | PF_NO_SETAFFINITY, affinity=ONE), TaskClass.PER_CPU_KERNEL),
        (task(21, flags=PF_KTHREAD | PF_NO_SETAFFINITY), TaskClass.UNBOUND_KERNEL),
        (task(22, flags=PF_KTHREAD, affinity=ONE), TaskClass.UNBOUND_KERNEL),
        (
            task(25, comm="kworker/u8:1", flags=PF_KTHREAD | PF_NO_SETAFFINITY, affinity=ONE),
            TaskClass.UNBOUND_KERNEL,  # of a pool of one CPU, which the mask of workqueues moves
        ),
        (task(23, affinity=None, parent=KTHREADD), TaskClass.UNBOUND_KERNEL),
        (task(24, flags=PF_NO_SETAFFINITY, affinity=ONE), TaskClass.USER),
    ],
)
def test_class(seen: SeenTask | None, expected: TaskClass) -> None:
    """A process that names itself after a kernel thread stays a user task."""
    assert class_of(seen, OWNER, KNOWN) is expected


UID = "0b7f0e2c-1a2b-4c3d-8e4f-5a6b7c8d9e0f"
SLICE = f"/kubepods.slice/pod{UID.replace('-', '_')}.slice"


@pytest.mark.parametrize(
    ("cgroup", "unit", "pod"),
    [
        ("/system.slice/cron.service", "cron.service", ""),
        ("/system.slice/docker.service/x", "docker.service", ""),
        ("/user.slice/user-1.slice/user@1.service/app.slice/x.service", "x.service", ""),
        ("/system.slice/docker-abc.scope/system.slice/cron.service", "docker-abc.scope", ""),
        ("/docker/abc/system.slice/cron.service", "", ""),
        (f"{SLICE}/cri-containerd-abc.scope", "cri-containerd-abc.scope", UID),
        (f"{SLICE}/cri-containerd-abc.scope/init.scope", "cri-containerd-abc.scope", UID),
        (f"/kubepods/besteffort/pod{UID}/abc", "", UID),
        ("/a/system.slice:cri-containerd:abc", "", ""),
        ("/", "", ""),
        ("", "", ""),
        ("/podcast/x", "", ""),
    ],
)
def test_place(cgroup: str, unit: str, pod: str) -> None:
    """Units and pods in the forms of both cgroup drivers; units inside containers are not ours."""
    assert place_of(cgroup) == (unit, pod)


@pytest.mark.parametrize(
    "part", ["abc", "kata_abc", "cri-containerd-abc.scope", "system.slice:cri-containerd:abc"]
)
def test_container(part: str) -> None:
    """An id in what runtimes put around it."""
    assert container_of(part) == "abc"
