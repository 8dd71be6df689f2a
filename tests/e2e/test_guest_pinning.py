"""Containers on their own vCPUs, seen by the guest's /proc and by the host's run times.

One pod with a Linux guest for all tests of this module, in their order: two containers with
exclusive CPUs and one without, each a busy loop. The first vCPU is there from the start, two more
are hotplugged, so both of Linux's ways of numbering are met (6.1: as they come; 6.12: by APIC id).
Expectations are computed from what KVM and the guest's /proc/cpuinfo say, never from kata-pin.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from kata_pin.base.cpuset import CpuSet
from tests.e2e import linuxguest
from tests.e2e.katapods import private_daemon
from tests.e2e.linuxguest import BUSY, Guest, Ran, hooks, linux, vcpus
from tests.e2e.node import Node
from tests.support.daemon import Node as PrivateNode
from tests.support.minikata import Minikata, MinikataContainer, minikata_node
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("kvm", "untouched")

ONE: Final = {"quota": 100_000, "period": 100_000}
MAXIMUM: Final = 6
WATCH_S: Final = 3.0
"""How long run times are measured."""

Json = dict[str, Any]


class GuestPod:
    """The pod: `a` and `b` with exclusive CPUs, `s` without; the daemon; the guest."""

    def __init__(self, node: Node, daemon: PrivateNode, kata: Minikata) -> None:
        self.node = node
        self.daemon = daemon
        self.kata = kata
        self.id = daemon.id_of("g1")
        self.exclusive: dict[str, CpuSet] = {}
        self.containers: dict[str, MinikataContainer] = {}

    def start(self, stack: ExitStack) -> None:
        """Create and start all of it, with hooks as Kata has them."""
        pod = self._container(self.id, {})
        stack.enter_context(pod).start()
        for name, cpu, busy in (
            ("a", {"cpus": "4", **ONE}, BUSY),
            ("b", {"cpus": "5", **ONE}, BUSY),
            ("s", {"cpus": "6,7", "shares": 102}, BUSY),
        ):
            container = self._container(self.name_of(name), cpu, busy)
            self.containers[name] = stack.enter_context(container)
            container.start()
        self.exclusive = {"a": CpuSet.parse("4"), "b": CpuSet.parse("5")}

    def name_of(self, name: str) -> str:
        """Return the id of a container."""
        return f"{self.id}-{name}"

    def _container(
        self, name: str, cpu: Mapping[str, Any], annotations: Mapping[str, str] | None = None
    ) -> MinikataContainer:
        made = hooks(self.daemon.runtime_dir)
        return self.kata.container(name, self.id, hooks=made, annotations=annotations, **cpu)

    @property
    def pid(self) -> int:
        """QEMU's."""
        return self.kata.qemu_pid(self.id)

    @property
    def guest(self) -> Guest:
        """Its guest, where Kata's state says that the agent is."""
        url: str = self.kata.persist(self.id)["AgentState"]["URL"]
        return Guest(self.node, int(url.removeprefix("vsock://").split(":")[0]))

    def shown(self) -> Json:
        """Return what the daemon shows of the guest."""
        found: Json = self.daemon.sandboxes()["g1"]["guest"]
        return found

    def told(self, name: str) -> Json:
        """Return what the daemon shows of a container in the guest."""
        return next(one for one in self.shown()["containers"] if one["id"] == self.name_of(name))

    # ---- what should be ------------------------------------------------------------------

    def owners(self) -> dict[str, dict[int, int]]:
        """Return guest CPU by thread of the vCPUs of each container, of `s` those of nobody.

        A vCPU that is not online in the guest (yet) has CPU -1.
        """
        numbers = self.guest.cpu_of_apic()
        found: dict[str, dict[int, int]] = {name: {} for name in (*self.exclusive, "s")}
        for apic, tid in vcpus(self.pid).items():
            affinity = CpuSet(os.sched_getaffinity(tid))
            owner = next((n for n, cpus in self.exclusive.items() if affinity <= cpus), "s")
            found[owner][tid] = numbers.get(apic, -1)
        return found

    def wrong(self) -> list[str]:
        """Return a line for each process of the guest that is not kept where it should be."""
        owners = self.owners()
        lines = [f"{name} has no vCPU" for name in self.exclusive if not owners[name]]
        if any(-1 in own.values() for own in owners.values()):
            return [*lines, "a vCPU is not online in the guest"]
        for one in self.guest.processes():
            name = one.container.removeprefix(f"{self.id}-")
            if name not in owners:  # the pause container
                continue
            wanted = CpuSet(owners[name].values())
            if wanted and (one.allowed != wanted or one.last not in wanted):
                lines.append(f"{name} may run on {one.allowed}, ran on {one.last}, not {wanted}")
        return lines

    def wait_right(self, seconds: float = 30) -> None:
        """Wait until every loop is on its own guest CPUs, and on them only."""
        try:
            self.node.wait(lambda: not self.wrong(), "each loop on its own vCPUs", seconds)
        except AssertionError as error:
            error.add_note("\n".join([*self.wrong(), str(self.shown())]))
            raise

    def wait_state(self, *states: str, seconds: float = 30) -> None:
        """Wait until the daemon shows the guest so."""
        try:
            self.node.wait(lambda: self.shown()["state"] in states, f"guest {states}", seconds)
        except AssertionError as error:
            error.add_note(str(self.shown()))
            raise

    def check_run_times(self, title: str) -> None:
        """Measure who ran where on the host: fail for wrong vCPU threads, tell the others."""
        owners = self.owners()
        before = Ran.now()
        time.sleep(WATCH_S)
        ran = Ran.now().since(before)
        everybodys = {tid for own in owners.values() for tid in own}
        for name, cpus in self.exclusive.items():
            where = {tid: ran.threads[tid].cpu for tid in owners[name]}
            assert all(cpu in cpus for cpu in where.values()), f"{name}: {where}, not {cpus}"
            total = sum(ran.share(tid) for tid in where)
            assert total > 0.5, f"{name}: its vCPU threads ran {total:.0%} of the time"
            for tid, cpu in where.items():
                others = ran.foreign(cpu, tid)
                assert not everybodys & {one for one, _, _ in others}, f"another vCPU on {cpu}"
                most = ", ".join(f"{who} {share:.2%}" for _, who, share in others[:3])
                self.node.tell(
                    f"{self.node.flavour}: {title}: pCPU {cpu} of {name}: its vCPU thread "
                    f"{ran.share(tid):.1%}, foreign threads "
                    f"{sum(share for _, _, share in others):.2%} ({most})"
                )


@pytest.fixture(scope="module")
def pod(node: Node) -> Iterator[GuestPod]:
    """The pod, and a daemon of its own; the first test takes the minute that booting takes."""
    if not (linuxguest.GUEST / "initrd.img").exists():
        pytest.skip(f"no guest in {linuxguest.GUEST}")
    folder = Path(tempfile.mkdtemp(prefix="mk"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        daemon = stack.enter_context(private_daemon(**_settings(node)))
        daemon.start()
        settings = linux(node, default_maxvcpus=MAXIMUM)
        kata = stack.enter_context(minikata_node(folder, daemon.dirs, **settings))
        made = GuestPod(node, daemon, kata)
        made.start(stack)
        yield made


def _settings(node: Node, **guest: Any) -> Json:
    patience = {"connect_ms": int(1000 * node.scale), "call_ms": int(2000 * node.scale)}
    return {"guest": {**patience, **guest}}


def _configure(pod: GuestPod, **guest: Any) -> None:
    paths = pod.daemon.settings["paths"]
    pod.daemon.configure(**_settings(pod.node, **guest), paths=paths)
    assert pod.daemon.daemon is not None
    pod.daemon.daemon.reload()
    pod.daemon.ask("reconcile")


def test_each_loop_has_its_own_vcpus(pod: GuestPod, node: Node) -> None:
    """Two hotplugged vCPUs are paired, the first one is left for the shared container.

    The guest's /proc shows each loop on its guest CPUs alone; the host's run times show each vCPU
    thread on its pCPU. Whatever else ran on a paired pCPU is told.
    """
    pod.wait_right(60)
    pod.wait_state("applied")
    owners = pod.owners()
    assert [len(owners[name]) for name in ("a", "b", "s")] == [1, 1, 1]
    numbers = pod.guest.cpu_of_apic()
    assert set(numbers) == {0, MAXIMUM - 1, MAXIMUM - 2}
    newer = tuple(map(int, node.kernel.split(".")[:2])) >= (6, 9)
    hotplugged = {MAXIMUM - 1: MAXIMUM - 1, MAXIMUM - 2: MAXIMUM - 2} if newer else {5: 1, 4: 2}
    assert numbers == {0: 0, **hotplugged}
    shown = {one["tid"]: one["guest_cpu"] for one in pod.shown()["vcpus"]}
    assert shown == {tid: cpu for own in owners.values() for tid, cpu in own.items()}
    pod.check_run_times("hotplugged")


def test_read_back_and_measured(pod: GuestPod) -> None:
    """With leave to run cat, cpusets are read back, and every link is measured or proven."""
    _configure(pod, exec=True)
    pod.node.wait(lambda: pod.told("a")["proof"] == "read", "the cpuset of a read back", 30)
    assert pod.told("a")["cpus"] == str(CpuSet(pod.owners()["a"].values()))
    links = {one["state"] for one in pod.shown()["vcpus"]}
    assert links <= {"measured", "proven"}
    pod.node.tell(f"{pod.node.flavour}: links between vCPUs and guest CPUs: {sorted(links)}")


def test_after_an_update(pod: GuestPod) -> None:
    """Another pCPU and one vCPU more: Kata hotplugs and says nothing; all is put right again."""
    pod.containers["b"].update_resources({"cpus": "8,9", "quota": 200_000})
    pod.exclusive["b"] = CpuSet.parse("8,9")
    pod.daemon.ask("reconcile")
    pod.wait_right(60)
    assert [len(pod.owners()[name]) for name in ("a", "b", "s")] == [1, 2, 1]
    pod.check_run_times("after an update")


def test_after_the_daemon_was_killed(pod: GuestPod) -> None:
    """Guest cpusets stand without a daemon; the next one takes them over."""
    assert pod.daemon.daemon is not None
    pod.daemon.daemon.kill()
    assert pod.wrong() == []
    pod.daemon.start()
    pod.wait_state("applied", "pending")
    pod.wait_state("applied")
    assert pod.wrong() == []


def test_after_the_agent_restarted(pod: GuestPod) -> None:
    """A new agent is a new connection; what somebody else did to a cpuset meanwhile is undone."""
    assert pod.daemon.daemon is not None
    with pod.daemon.daemon.hung():  # or it may undo it before it is seen
        pod.guest.restart_agent()
        pod.guest.ask(f"widen {pod.name_of('b')}")
        pod.node.wait(lambda: bool(pod.wrong()), "b on every guest CPU")
    pod.daemon.ask("reconcile")
    pod.wait_right(60)
    pod.wait_state("applied", seconds=60)


def test_an_agent_that_lies(pod: GuestPod) -> None:
    """A success without effect is found by reading back, shown, and repaired once it is honest."""
    pod.daemon.ask("unpin", sandbox=pod.id)
    _wait_for_all_cpus(pod)
    pod.guest.mode("lie")
    pod.daemon.ask("pin", sandbox=pod.id)
    pod.node.wait(lambda: pod.told("a")["proof"] == "broken", "the lie to be found", 60)
    pod.wait_state("failed")
    pod.guest.mode("honest")
    pod.daemon.ask("reconcile")
    pod.wait_right(60)
    pod.wait_state("applied", seconds=60)


def test_an_agent_that_refuses(pod: GuestPod) -> None:
    """A policy that denies is a state; host pins stand as always."""
    pod.guest.mode("refuse")
    _move_a(pod, "10")
    pod.wait_state("denied", seconds=60)
    _check_host(pod)
    pod.guest.mode("honest")
    pod.daemon.ask("reconcile")
    pod.wait_state("applied", seconds=60)


def test_an_agent_that_hangs(pod: GuestPod) -> None:
    """Host pins do not wait for an agent that never answers; it is shown, and asked again later."""
    _configure(pod, exec=True, call_ms=3000)
    pod.guest.mode("hang")
    began = time.monotonic()
    _move_a(pod, "11")
    _check_host(pod)
    seconds = time.monotonic() - began
    pod.node.tell(
        f"{pod.node.flavour}: an update and its host pins beside a hung agent {seconds:.2f} s"
    )
    pod.wait_state("unreachable", seconds=60)
    pod.guest.mode("honest")
    _configure(pod, exec=True)
    pod.wait_state("applied", seconds=60)
    pod.wait_right(60)


def test_a_vm_that_stands_still(pod: GuestPod) -> None:
    """A stopped VMM answers nothing, not even a connection; the daemon goes on and asks again."""
    os.kill(pod.pid, signal.SIGSTOP)
    try:
        pod.daemon.ask("reconcile")
        pod.wait_state("unreachable", seconds=60)
    finally:
        os.kill(pod.pid, signal.SIGCONT)
    pod.daemon.ask("reconcile")
    pod.wait_state("applied", seconds=60)
    assert pod.wrong() == []


def test_fewer_vcpus_than_exclusive_cpus(pod: GuestPod) -> None:
    """A vCPU for each container with exclusive CPUs and none left: the shared one may use any."""
    pod.containers["b"].update_resources({"quota": -1, "shares": 3072, "cpus": "12-14"})
    pod.exclusive["b"] = CpuSet.parse("12-14")
    pod.daemon.ask("reconcile")
    pod.node.wait(lambda: len(vcpus(pod.pid)) == 2, "two vCPUs", 60)
    pod.wait_right(60)
    every = CpuSet(pod.guest.cpu_of_apic().values())
    assert pod.told("s")["cpus"] is None
    loops = {one.container: one.allowed for one in pod.guest.processes()}
    assert every <= loops[pod.name_of("s")]  # offline ones too, if told while a vCPU went
    pod.check_run_times("fewer vCPUs")


def test_given_back(pod: GuestPod) -> None:
    """Unpinned: every container may use every guest CPU again."""
    pod.daemon.ask("unpin", sandbox=pod.id)
    _wait_for_all_cpus(pod)


def _wait_for_all_cpus(pod: GuestPod) -> None:
    every = CpuSet(pod.guest.cpu_of_apic().values())
    wait_for(
        lambda: {one.allowed for one in pod.guest.processes()} == {every}, "all CPUs for all", 60
    )


def _move_a(pod: GuestPod, cpus: str) -> None:
    pod.containers["a"].update_resources({"cpus": cpus})
    pod.exclusive["a"] = CpuSet.parse(cpus)
    pod.daemon.ask("reconcile")


def _check_host(pod: GuestPod) -> None:
    """The vCPU of `a` is on its new pCPU at once: reconcile returns when host pins stand."""
    affinities = [CpuSet(os.sched_getaffinity(tid)) for tid in vcpus(pod.pid).values()]
    assert affinities.count(pod.exclusive["a"]) == 1
