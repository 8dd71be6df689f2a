"""The remedies for intruders, with real units, cgroups, kernel threads and interrupts.

What they rest on: who is restricted, what a VM's cgroup allows. And their commands as printed: the
intruder is gone, and a pod that starts afterwards gets what it should.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.placement.remedies import WORKQUEUES, mask
from tests.e2e.cgroup import cgroup
from tests.e2e.criruntime import CriNode, kata_handler, qemu_pid
from tests.e2e.node import Node
from tests.e2e.nodepods import VmThreads
from tests.e2e.unit import Unit
from tests.support.interrupts import read_interrupts
from tests.support.intruder import Busy

pytestmark = [pytest.mark.usefixtures("kvm"), pytest.mark.timeout(1800)]

CPU: Final = 4
"""The pod's exclusive pCPUs: this one,"""
LATER: Final = 5
"""and this one."""
ELSEWHERE: Final = 6
"""The exclusive pCPU of a pod that starts later."""
LOOP: Final = "while :; do :; done"
POD_CGROUP: Final = "kubepods.slice/kubepods-pod00000000_0000_4000_8000_000000000001.slice"

Json = dict[str, Any]
IsIntruder = Callable[[Json], bool]
"""Whether a row of tasks or interrupts is the intruder's."""


@pytest.fixture(scope="module")
def containerd(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CriNode]:
    """containerd with minikata as the handler `kata`."""
    with kata_handler(node, tmp_path_factory.mktemp("cri")) as made:
        yield made


@pytest.fixture
def pods(containerd: CriNode) -> Iterator[CriNode]:
    """Pods of one test; they live until a failure is diagnosed."""
    made = CriNode(containerd.node, containerd.cri)
    yield made
    made.remove_all()


@pytest.fixture(scope="module")
def owner(node: Node, containerd: CriNode) -> str:
    """A pod with both exclusive pCPUs, whose guest rests."""
    pod = containerd.run_pod("disturbed")
    containerd.create(
        *(pod, "disturbed", "app"),
        cpuset_cpus=f"{CPU}-{LATER}", cpu_quota=200_000, cpu_period=100_000,
    )  # fmt: skip
    threads = VmThreads(qemu_pid(pod))
    node.wait(lambda: not threads.misplaced({14: CPU, 15: LATER}, {CPU, LATER}), "pins")
    return pod


def test_a_restricted_runtime_is_found(node: Node, pods: CriNode) -> None:
    """doctor's row of a containerd whose unit has AllowedCPUs=, and of one with CPUAffinity=."""
    pid = _main_pid(node, "containerd")
    narrow = CpuSet([0, 1])
    assert _narrow_runtimes(node) == []
    _allow(node, "containerd.service", str(narrow))
    try:
        node.wait(lambda: os.sched_getaffinity(pid) == set(narrow), "containerd to be restricted")
        texts = [row["text"] for row in _narrow_runtimes(node)]
        said = f"containerd (pid {pid}) may run on {narrow} only"
        assert [text for text in texts if text.startswith(said)], texts
    finally:
        _allow(node, "containerd.service", "")
        pods.restart()
    assert _narrow_runtimes(node) == [], "as the remedy says: removed and restarted"
    drop_in = Path("/run/systemd/system/containerd.service.d/kp.conf")
    drop_in.parent.mkdir(parents=True, exist_ok=True)
    drop_in.write_text(f"[Service]\nCPUAffinity={narrow}\n")
    try:
        node.run(["systemctl", "daemon-reload"], seconds=60)
        pods.restart()
        assert {row["status"] for row in _narrow_runtimes(node)} == {"warn"}
    finally:
        drop_in.unlink()
        node.run(["systemctl", "daemon-reload"], seconds=60)
        pods.restart()
    assert _narrow_runtimes(node) == []


def test_overhead_that_the_cgroup_allows(node: Node, pods: CriNode) -> None:
    """A VM that is confined to its exclusive pCPUs: reserve:1 keeps its own threads off the rest.

    That is what the remedy for a pod's own threads says; housekeeping cannot be reached there.
    """
    unit = Unit(node)
    pod = pods.run_pod("locked")
    pods.create(
        *(pod, "locked", "app"), cpuset_cpus=f"{CPU}-{LATER}", cpu_quota=200_000, cpu_period=100_000
    )
    threads = VmThreads(qemu_pid(pod))
    node.wait(lambda: not threads.misplaced({14: CPU, 15: LATER}, {CPU, LATER}), "pins")
    with unit.settings(overhead="housekeeping", housekeeping="0-1"):
        unit.ask("reconcile")
        assert not threads.misplaced({14: CPU, 15: LATER}, {CPU, LATER}), "its cgroup is in the way"
    with unit.settings(overhead="reserve:1"):
        unit.ask("reconcile")
        node.wait(lambda: _alone_on(threads, CPU), "one exclusive pCPU without other threads")


@contextmanager
def a_service(node: Node) -> Iterator[IsIntruder]:
    """A unit of the system whose process wants this pCPU."""
    wants = f"--property=CPUAffinity={CPU}"
    node.run(["systemd-run", "--unit=kp-intruder", wants, "sh", "-c", LOOP], seconds=60)
    try:
        yield lambda row: row["unit"] == "kp-intruder.service"
    finally:
        node.run(["systemctl", "stop", "kp-intruder.service"], seconds=60)


@contextmanager
def a_scope(node: Node) -> Iterator[IsIntruder]:
    """A scope, as logins and `systemd-run --scope` have them."""
    command = ["systemd-run", "--scope", "--unit=kp-intruder", "taskset", "-c", str(CPU)]
    with subprocess.Popen([*command, "sh", "-c", LOOP]) as process:
        try:
            yield lambda row: row["unit"] == "kp-intruder.scope"
        finally:
            process.kill()


@contextmanager
def a_unit_of_a_user(node: Node) -> Iterator[IsIntruder]:
    """A program in a service of a user's own systemd, which root does not manage.

    Something else of the user's runs too: systemd stops a user's slice that nothing needs.
    """
    slice_ = "user-4711.slice"
    other = ["systemd-run", "--unit=kp-user", f"--slice={slice_}", "sleep", "infinity"]
    node.run(other, seconds=60)
    try:
        with _in_cgroup(node, f"user.slice/{slice_}/user@4711.service/kp.service") as is_intruder:
            yield is_intruder
    finally:
        node.run(["systemctl", "stop", "kp-user.service"], seconds=60)
        node.run(["systemctl", "revert", slice_], seconds=60)


@contextmanager
def a_pod_without_cpuset(node: Node) -> Iterator[IsIntruder]:
    """A process of a pod that is not Kata's, where the kubelet keeps nobody off."""
    with _in_cgroup(node, f"{POD_CGROUP}/cri-containerd-{64 * '1'}.scope") as is_intruder:
        yield is_intruder


@contextmanager
def a_process(node: Node) -> Iterator[IsIntruder]:
    """A process of no unit."""
    with _in_cgroup(node, "kp-by-hand") as is_intruder:
        yield is_intruder


@contextmanager
def _in_cgroup(node: Node, path: str) -> Iterator[IsIntruder]:
    """A process that never rests, in a cgroup."""
    with cgroup(node, path) as group, Busy.started(CPU, "kp-intruder") as busy:
        group.add(busy.tid)
        busy.begin(3600.0, 3600.0)
        yield lambda row: row.get("tid") == busy.tid


@contextmanager
def a_kernel_thread(node: Node) -> Iterator[IsIntruder]:
    """The journal of the root file system, under work."""
    tid = next(
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/comm")
        if path.read_text().startswith("jbd2/")
    )
    before = os.sched_getaffinity(tid)
    write = "while :; do dd if=/dev/zero of=/var/tmp/kp bs=4k count=1 conv=fsync; done"
    os.sched_setaffinity(tid, {CPU})
    try:
        with _working(write):
            yield lambda row: row.get("tid") == tid
    finally:
        os.sched_setaffinity(tid, before)


@contextmanager
def unbound_workers(node: Node) -> Iterator[IsIntruder]:
    """Workers of the kernel that may run anywhere, and have to run here."""
    before = Path(WORKQUEUES).read_text()
    write = "while :; do dd if=/dev/zero of=/var/tmp/kp bs=64k count=16 conv=fsync; done"
    Path(WORKQUEUES).write_text(mask(CpuSet([CPU])))
    try:
        with _working(write):
            yield lambda row: str(row.get("comm")).startswith("kworker/u")
    finally:
        Path(WORKQUEUES).write_text(before)


@contextmanager
def an_interrupt(node: Node) -> Iterator[IsIntruder]:
    """The interrupt of the serial console, which is written to."""
    with _working("while :; do echo .; sleep 0.02; done >/dev/ttyS0"):
        node.wait(lambda: _serial() is not None, "the interrupt of the console")
        number = _serial()
        place = Path(f"/proc/irq/{number}/smp_affinity_list")
        before = place.read_text()
        place.write_text(str(CPU))
        try:
            yield lambda row: row.get("irq") == number
        finally:
            place.write_text(before)


def _serial() -> int | None:
    """Return the number of the serial console's interrupt, which exists while it is open."""
    found = [one.number for one in read_interrupts() if "ttyS0" in one.text]
    return found[0] if found else None


@contextmanager
def _working(script: str) -> Iterator[None]:
    """A script of a shell's, on pCPUs that are nobody's."""
    command = ["taskset", "-c", "0-1", "setsid", "sh", "-c", script]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()


Intrusion = Callable[[Node], AbstractContextManager[IsIntruder]]


@pytest.mark.parametrize(
    "intrusion",
    [
        *(a_service, a_scope, a_unit_of_a_user, a_pod_without_cpuset, a_process),
        *(a_kernel_thread, unbound_workers, an_interrupt),
    ],
    ids=lambda one: one.__name__,
)
def test_a_remedy_as_printed(node: Node, pods: CriNode, owner: str, intrusion: Intrusion) -> None:
    """`prove` names the intruder and prints a command; afterwards it is gone.

    The runtime and its shims may still run everywhere, and the next pod's vCPU has its pCPU.
    """
    with intrusion(node) as is_intruder:
        commands = _commands(node, owner, is_intruder)
        assert commands, "the intruder was not seen"
        assert "" not in commands, commands
        for command in commands:
            node.tell(f"remedy for {intrusion.__name__}: {command}")
            node.run(["sh", "-c", command], seconds=60)
        node.wait(lambda: not _commands(node, owner, is_intruder), "the intruder to be gone", 60)
        pod = pods.run_pod("later")
        pods.create(
            *(pod, "later", "app"),
            cpuset_cpus=str(ELSEWHERE), cpu_quota=100_000, cpu_period=100_000,
        )  # fmt: skip
        threads = VmThreads(qemu_pid(pod))
        node.wait(lambda: set(threads.affinities().values()) == {frozenset([ELSEWHERE])}, "pins")
        assert _narrow_runtimes(node) == []


def _narrow_runtimes(node: Node) -> list[Json]:
    """Return doctor's rows of programs that VMs inherit too few pCPUs from."""
    document = json.loads(_answer(node, "doctor", "--json"))
    return [row for row in document["rows"] if " only, not on " in row["text"]]


def _answer(node: Node, *arguments: str) -> str:
    """Return what a command prints, whatever its status."""
    done = subprocess.run(
        ["kata-pin", *arguments],
        capture_output=True, text=True, timeout=60 * node.scale, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.stdout


def _commands(node: Node, owner: str, is_intruder: IsIntruder) -> set[str]:
    """Return the commands that are printed of an intruder on the owner's pCPUs, if it ran there."""
    document = json.loads(_answer(node, "prove", owner, "--for", "2s", "--irq", "--json"))
    assert document["method"] == "perf", document["refused"]
    rows = [row for cpu in document["pcpus"] for row in (*cpu["tasks"], *cpu["interrupts"])]
    return {row["command"] for row in rows if is_intruder({"unit": "", **row})}


def _alone_on(threads: VmThreads, cpu: int) -> bool:
    """Whether vCPUs alone may run on a pCPU."""
    vcpus = set(threads.vcpus().values())
    there = {tid for tid, cpus in threads.affinities().items() if cpu in cpus}
    return bool(there) and there <= vcpus


def _allow(node: Node, unit: str, cpus: str) -> None:
    command = ["systemctl", "set-property", "--runtime", unit, f"AllowedCPUs={cpus}"]
    node.run(command, seconds=60)


def _main_pid(node: Node, unit: str) -> int:
    return int(node.run(["systemctl", "show", "-p", "MainPID", "--value", unit]))
