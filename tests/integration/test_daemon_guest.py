"""The daemon and guests: real QEMU and pins, and an agent behind a unix socket (hybrid vsock).

What a Linux in the guest makes of it is for the lab.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import Json, Node, Pod, private_node
from tests.support.playedguest import Mood, PlayedGuest
from tests.support.qemu import QEMU, Machine
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.qemu, pytest.mark.root]

TWO = Machine(boot=2, maximum=2)
ASKED = {"connect_ms": 300, "call_ms": 300}
PLAYED: dict[str, Any] = {"hypervisors": [QEMU, os.path.realpath(sys.executable)]}
"""This process plays the guest's end of a VMM's socket: the broker connects to VMMs alone."""


@pytest.fixture
def node() -> Iterator[Node]:
    with private_node(**PLAYED, guest=dict(ASKED)) as one:
        yield one


@pytest.fixture
def folder(node: Node) -> Path:
    """Return where Kata keeps the socket of this guest: the broker connects to no others."""
    path = node.dirs.vc / "vm" / "p1"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def guest(folder: Path) -> Iterator[PlayedGuest]:
    with PlayedGuest(folder / "clh.sock") as one:
        yield one


def two_containers(pod: Pod) -> None:
    """Announce a pod, and create an exclusive container `own` and one that shares, `log`."""
    pod.announce()
    pod.create("own", "1", exclusive=True)
    pod.create("log", "0")
    pod.wait_placed({0}, {1: 1})


def told(node: Node, state: str, **proofs: str) -> Json:
    """Wait until a guest is shown in a state, with these proofs; return what is shown."""

    def shown() -> Json | None:
        one = node.sandboxes().get("p1")
        found: Json = one["guest"] if one and one["guest"] else {"state": "", "containers": []}
        has = {c["name"][:4]: c["proof"] for c in found["containers"]}
        fits = found["state"] == state and all(has.get(n) == p for n, p in proofs.items())
        return found if fits else None

    try:
        return wait_for(shown, f"the guest shown as {state} {proofs}")
    except TimeoutError as error:
        error.add_note(str(node.sandboxes().get("p1", {}).get("guest")))
        error.add_note(node.log[-3000:])
        raise


def test_each_container_on_its_own_vcpus(node: Node, guest: PlayedGuest) -> None:
    """The exclusive container gets the guest CPU of its pair, the other one the rest."""
    node.start()
    with node.pod("p1", machine=TWO, agent_url=guest.url) as pod:
        two_containers(pod)
        guest.wait_cpus(own="1", log="0")
        shown = told(node, "applied", own="none", log="none")
        assert [
            (v["vcpu"], v["guest_cpu"], v["state"], v["container"]) for v in shown["vcpus"]
        ] == [
            (0, 0, "proven", ""),
            (1, 1, "proven", "own"),
        ]
        assert not any(name == pod.id for name, _ in guest.said)  # never the pause container
        assert "ExecProcess" not in guest.requests
        picture = node.cli("map", pod.id).stdout
        assert "proven" in picture
        assert "own" in picture
        assert "guest CPUs 1: guest CPUs of its own vCPUs" in node.cli("explain", pod.id).stdout


@pytest.mark.alone
@pytest.mark.parametrize("mood", [Mood.HANGS, Mood.FLOODS])
def test_hostile_guest_never_delays_host_pins(node: Node, guest: PlayedGuest, mood: Mood) -> None:
    """Hooks are answered and pins stand as ever while the guest hangs or floods."""
    node.configure(**PLAYED, guest={"connect_ms": 5000, "call_ms": 5000})
    guest.mood = mood
    node.start()
    with node.pod("p1", machine=TWO, agent_url=guest.url) as pod:
        two_containers(pod)
        wait_for(lambda: guest.requests, "the guest to be asked")
        for number in range(10):
            began = time.monotonic()
            assert pod.create(f"c{number}", "0").stderr == ""  # recorded and pinned in its budget
            assert time.monotonic() - began < 2
            assert pod.misplaced({0}, {1: 1}) == []
        assert guest.connected <= 1


def test_hotplugged_vcpu(node: Node, guest: PlayedGuest) -> None:
    """A hotplugged vCPU of an unknown kernel restricts nobody; read in the guest it is used."""
    guest.online, guest.apic = "0-1", {0: 0, 1: 3}
    node.start()
    with node.pod("p1", machine=Machine(boot=1, maximum=4), agent_url=guest.url) as pod:
        pod.announce()
        pod.kata.shim.plug(1)
        pod.create("own", "1", exclusive=True)
        pod.create("log", "0")
        pod.wait_placed({0}, {3: 1})
        shown = wait_for(lambda: _mapped(node, 3), "the hotplugged vCPU to be shown")
        assert (shown["guest_cpu"], shown["state"]) == (None, "unknown")
        assert "own" not in guest.cpus
        guest.wait_cpus(log="0")
        node.configure(**PLAYED, guest={**ASKED, "exec": True})
        assert node.daemon is not None
        node.daemon.reload()
        guest.wait_cpus(own="1", log="0")
        read = wait_for(lambda: _mapped(node, 3), "the hotplugged vCPU to be shown")
        assert (read["guest_cpu"], read["state"]) == (1, "measured")


def _mapped(node: Node, index: int) -> Json | None:
    found = node.sandboxes().get("p1", {}).get("guest") or {"vcpus": []}
    return next((one for one in found["vcpus"] if one["vcpu"] == index), None)


def test_killed_at_any_time(node: Node, guest: PlayedGuest) -> None:
    """kill -9 while guests are told: the next daemon says it again, and can still undo it."""
    with node.pod("p1", machine=TWO, agent_url=guest.url) as pod:
        for number in range(6):
            daemon = node.start()
            two_containers(pod)
            if number % 2:
                guest.wait_cpus(own="1", log="0")
            daemon.kill()
            guest.cpus = dict.fromkeys(guest.cpus, "0-1")  # nobody keeps it meanwhile
        daemon = node.start()
        guest.wait_cpus(own="1", log="0")
        daemon.kill()
        node.configure(**PLAYED, guest={**ASKED, "enabled": False})
        node.start()
        guest.wait_cpus(own="0-1", log="0-1")


def test_undone_without_a_daemon(node: Node, guest: PlayedGuest) -> None:
    """unpin with no daemon gives guest CPUs back too."""
    daemon = node.start()
    with node.pod("p1", machine=TWO, agent_url=guest.url) as pod:
        two_containers(pod)
        guest.wait_cpus(own="1", log="0")
        daemon.terminate()
        assert node.cli("unpin").returncode == 0
        assert guest.cpus == {"own": "0-1", "log": "0-1"}
