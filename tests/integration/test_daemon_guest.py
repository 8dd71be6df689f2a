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

from tests.support.daemon import Node, Pod, private_node
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


def test_undone_without_a_daemon(node: Node, guest: PlayedGuest) -> None:
    """unpin with no daemon gives guest CPUs back too."""
    daemon = node.start()
    with node.pod("p1", machine=TWO, agent_url=guest.url) as pod:
        two_containers(pod)
        guest.wait_cpus(own="1", log="0")
        daemon.terminate()
        assert node.cli("unpin").returncode == 0
        assert guest.cpus == {"own": "0-1", "log": "0-1"}
