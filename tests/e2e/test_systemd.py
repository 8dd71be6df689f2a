"""The service as shipped, under systemd: start, watchdog, sandboxing, reload, away and back."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.node import Node
from tests.e2e.nodepods import EXCLUSIVE, SHARED, VmThreads, installed_hooks, node_pods
from tests.e2e.unit import CONFIG, RUNTIME_DIR, UNIT, Unit
from tests.support.daemon import Refused, asked
from tests.support.minikata import Minikata, MinikataContainer

pytestmark = pytest.mark.usefixtures("kvm", "untouched")

POD: Final = "sd-p1"
PAIRS: Final = {15: 4}
"""The hotplugged vCPU gets the exclusive pCPU; vCPU 0 is surplus."""
REST: Final = (6, 7)
NOBODY: Final = 65534
ELSEWHERE: Final = {4, 6}
"""In the pod's cpuset, and no part of the CPUs of any thread: those are let be."""


@pytest.fixture(scope="module")
def unit(node: Node) -> Unit:
    """The installed unit."""
    return Unit(node)


@pytest.fixture(scope="module")
def kata(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Minikata]:
    """minikata over the node's own paths."""
    with node_pods(node, tmp_path_factory.mktemp("mk"), default_vcpus=1) as kata:
        yield kata


@dataclass(frozen=True)
class Scene:
    """The pod that lives through all tests."""

    kata: Minikata
    log: MinikataContainer
    threads: VmThreads
    node: Node

    def wait_placed(self, pairs: Mapping[int, int] = PAIRS, *, seconds: float = 15) -> None:
        """Wait until every thread of the VM is where it should be, as the kernel tells."""
        lines: list[str] = []

        def right() -> bool:
            lines[:] = self.threads.misplaced(pairs, REST)
            return not lines

        try:
            self.node.wait(right, "pins of the pod", seconds)
        except AssertionError as error:
            error.add_note("\n".join(lines))
            raise

    def disturb(self) -> None:
        """Move every thread elsewhere, as another writer would."""
        for tid in self.threads.affinities():
            os.sched_setaffinity(tid, ELSEWHERE)


@pytest.fixture(scope="module")
def pod(node: Node, kata: Minikata) -> Iterator[Scene]:
    """A pod with one exclusive and one shared container."""
    with (
        kata.container(POD, POD, hooks=installed_hooks()) as sandbox,
        kata.container("sd-app", POD, hooks=installed_hooks(), cpus="4", **EXCLUSIVE) as app,
        kata.container("sd-log", POD, hooks=installed_hooks(), cpus="6-7", **SHARED) as log,
    ):
        for one in (sandbox, app, log):
            one.start()
        yield Scene(kata, log, VmThreads(kata.qemu_pid(POD)), node)


def test_unit_is_shipped_with_its_guards(node: Node, unit: Unit) -> None:
    """systemd has the watchdog, the restart and the sandboxing that the unit's file asks for."""
    shown = unit.show(
        *("WatchdogUSec", "Restart", "StartLimitIntervalUSec", "NoNewPrivileges", "Group"),
        *("ProtectSystem", "ProtectKernelTunables", "PrivateDevices", "CapabilityBoundingSet"),
    )
    rights = set(shown.pop("CapabilityBoundingSet").split())
    assert rights - {"cap_net_admin"} == {  # that one before Linux 6.6 only
        "cap_dac_override",
        "cap_dac_read_search",
        "cap_perfmon",
        "cap_sys_nice",
        "cap_sys_ptrace",
    }
    assert shown == {
        "WatchdogUSec": "30s",
        "Restart": "always",
        "StartLimitIntervalUSec": "0",
        "NoNewPrivileges": "yes",
        "Group": "kata-pin",
        "ProtectSystem": "strict",
        "ProtectKernelTunables": "yes",
        "PrivateDevices": "yes",
    }
    assert node.run(["systemd-analyze", "verify", "--man=no", UNIT], seconds=60) == ""


def test_pins_stand_and_threads_are_seen_inside_the_sandboxing(unit: Unit, pod: Scene) -> None:
    """The daemon in its unit sees process events and every thread, and pins them all."""
    pod.wait_placed()
    assert unit.state()["node"]["thread_events"] is True
    shown = unit.sandbox(POD)
    assert shown["state"] == "ok"
    assert shown["vmm"]["pid"] == pod.threads.pid
    told = {one["tid"] for one in shown["threads"] if one["tgid"] == pod.threads.pid}
    assert told == set(pod.threads.affinities())
    assert {"virtiofsd", "vhost"} <= {one["role"] for one in shown["threads"]}


def test_debugfs_and_fd_map_work_inside_the_sandboxing(unit: Unit, pod: Scene) -> None:
    """A fresh daemon finds vCPUs in debugfs; without it by KVM's descriptors, in the same unit."""
    with unit.drop_in("no-debugfs", "[Service]\nInaccessiblePaths=/sys/kernel/debug\n"):
        unit.wait_running()
        pod.disturb()
        pod.wait_placed(seconds=60)
        assert _sources(unit) == {"kvm-fd"}
    unit.wait_running()
    pod.disturb()
    pod.wait_placed(seconds=60)
    assert _sources(unit) == {"debugfs"}


def _sources(unit: Unit) -> set[str]:
    """Return where the roles of the vCPU threads came from."""
    return {one["source"] for one in unit.sandbox(POD)["threads"] if one["role"] == "vcpu"}


def test_status_socket_is_for_the_group(node: Node) -> None:
    """A member of the group reads the state and can not act; anybody else can do neither."""
    group = RUNTIME_DIR.stat().st_gid
    assert _as_nobody(node, [group], "status.sock", "state") == "kind=state"
    assert "Permission denied" in _as_nobody(node, [group], "control.sock", "ping")
    assert "unknown verb" in _as_nobody(node, [group], "status.sock", "unpin")
    assert "Permission denied" in _as_nobody(node, [], "status.sock", "state")


def test_reload_takes_new_settings(node: Node, unit: Unit, pod: Scene) -> None:
    """SIGHUP: without audits new threads are pinned by events alone, which no hook tells of."""
    pod.wait_placed()
    pid = unit.pid
    with unit.settings(audit={"affinity_s": 3600, "deep_s": 86400}):
        before = set(pod.threads.vcpus())
        pod.log.update_resources({"quota": 200_000, "period": 100_000})
        node.wait(lambda: set(pod.threads.vcpus()) == before | {13, 14}, "two new vCPUs")
        pod.wait_placed()
        pod.log.update_resources({"quota": 1_000})
        node.wait(lambda: set(pod.threads.vcpus()) == before | {14}, "one vCPU unplugged")
        pod.wait_placed()
    assert unit.pid == pid


def test_reload_with_a_wrong_file_changes_nothing(node: Node, unit: Unit, pod: Scene) -> None:
    """The reload fails, what is wrong is said with its key, and the daemon goes on as before."""
    pid = unit.pid
    with unit.file("version: 1\nmode: sleep\n"):
        with pytest.raises(AssertionError, match=f"Job for {UNIT} failed"):
            unit.systemctl("reload")
        refusal = f"configuration not reloaded: {CONFIG}: mode: expected one of act, observe"
        node.wait(lambda: refusal in unit.journal(), "the refusal")
        assert unit.state()["node"]["mode"] == "act"
    pod.wait_placed()
    assert unit.pid == pid


def test_daemon_reload_and_restarts_under_load(node: Node, unit: Unit, pod: Scene) -> None:
    """daemon-reload and restarts while containers come and go: no message is lost, all pins right.

    The containers that come are shared and on the pod's shared CPUs.
    """
    ends = threading.Event()
    made = 0

    def churn() -> None:
        nonlocal made
        while not ends.is_set():
            name = f"sd-load{made}"
            with pod.kata.container(
                name, POD, hooks=installed_hooks(), cpus="6-7", **SHARED
            ) as one:
                one.start()
                one.stop()
            made += 1

    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(churn)
        try:
            for _ in range(2):
                node.run(["systemctl", "daemon-reload"], seconds=60)
                unit.systemctl("restart")
                unit.wait_running()
        finally:
            ends.set()
        load.result()
    node.tell(f"systemd: {made} containers came and went during two restarts")
    pod.wait_placed()
    node.wait(lambda: not unit.spooled(), "the spool taken in", seconds=30)
    node.wait(lambda: _live(unit) == {POD, "sd-app", "sd-log"}, "deleted containers forgotten")
    assert unit.sandbox(POD)["state"] == "ok"


def _live(unit: Unit) -> set[str]:
    """Return the containers that the daemon counts."""
    containers = unit.sandbox(POD).get("containers", [])
    return {one["id"] for one in containers if one["state"] in {"created", "running"}}


def test_container_created_while_the_unit_is_stopped(node: Node, unit: Unit, pod: Scene) -> None:
    """Pins stay when the unit stops; hooks spool, and the daemon takes that in when it starts.

    The spool's folder is made anew by systemd-tmpfiles, as at boot.
    """
    pod.wait_placed()
    unit.systemctl("stop")
    assert pod.threads.misplaced(PAIRS, REST) == []
    (RUNTIME_DIR / "spool").rmdir()
    node.run(["systemd-tmpfiles", "--create", "kata-pin.conf"])
    with pod.kata.container("sd-late", POD, hooks=installed_hooks(), cpus="5", **EXCLUSIVE) as late:
        late.start()
        assert len(unit.spooled()) == 2  # createRuntime and poststart
        unit.systemctl("start")
        node.wait(lambda: not unit.spooled(), "the spool taken in", seconds=30)
        pod.wait_placed(PAIRS | {14: 5}, seconds=30)
        late.stop()
    node.wait(lambda: "sd-late" not in _live(unit), "it is forgotten")
    pod.wait_placed()


def test_watchdog_ends_a_hung_daemon(node: Node, unit: Unit, pod: Scene) -> None:
    """A stopped daemon is ended after WatchdogSec, another is started and puts things right."""
    pod.wait_placed()
    hung = unit.pid
    restarts = int(unit.show("NRestarts")["NRestarts"])
    began = time.monotonic()
    os.kill(hung, signal.SIGSTOP)
    pod.disturb()
    node.wait(lambda: not Path(f"/proc/{hung}").exists(), "the hung daemon ended", seconds=60)
    node.tell(f"systemd: the watchdog ended a hung daemon after {time.monotonic() - began:.0f} s")
    unit.wait_running(other_than=hung)
    assert int(unit.show("NRestarts")["NRestarts"]) == restarts + 1
    assert "watchdog timeout" in unit.journal().lower()
    pod.wait_placed(seconds=30)


def _as_nobody(node: Node, groups: list[int], name: str, verb: str) -> str:
    """Ask in a child that is nobody with these groups; return what came of it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups(groups)
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        try:
            document = asked(RUNTIME_DIR / name, verb, within_s=30 * node.scale)
            text = f"kind={document['kind']}"
        except (OSError, Refused) as error:
            text = str(error)
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text
