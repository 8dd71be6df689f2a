"""A pod whose VM really boots Linux: vCPUs come online in the guest, vsock answers.

The guest is `.cache/guest` of the checkout, made by tests/e2e/guest/build.py.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.idlevm import vcpu_tids
from tests.e2e.linuxguest import GUEST, Guest, linux
from tests.e2e.minikata.ledger import starttime
from tests.e2e.node import Node
from tests.support.katalike import KataDirs
from tests.support.minikata import Minikata, minikata_node
from tests.support.ocirun import OciError

SANDBOX: Final = "e2e-linux"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: sockets go below it."""
    path = Path(tempfile.mkdtemp(prefix="mk"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def kata(node: Node, folder: Path) -> Iterator[Minikata]:
    """minikata for Linux guests."""
    if not node.kvm:
        pytest.skip(
            f"{node.flavour} has no KVM inside: a guest takes minutes, and hangs on hotplug"
        )
    if not (GUEST / "initrd.img").exists():
        pytest.skip(f"no guest in {GUEST}")
    settings = linux(node, default_maxvcpus=4)
    with minikata_node(folder, KataDirs.below(folder), **settings) as made:
        yield made


def _ask(kata: Minikata, node: Node, question: str) -> str:
    """Return the guest's answer; its address is where Kata's state says that the agent is."""
    url: str = kata.persist(SANDBOX)["AgentState"]["URL"]
    return Guest(node, int(url.removeprefix("vsock://").split(":")[0])).ask(question)


def test_vcpus_of_a_real_guest_come_and_go(node: Node, kata: Minikata) -> None:
    """Hotplugged vCPUs are brought online by the guest, and leave it when they are unplugged.

    A guest with Linux 6.12 numbers them by APIC id, so the first one plugged is the last CPU.
    """
    with kata.container(SANDBOX, SANDBOX):
        assert _ask(kata, node, "cpus") == "0"
        first, second = ("3", "2") if _numbers_by_apic(kata, node) else ("1", "2")
        both = {f"0,{second}-{first}", f"0-{second}"}
        with kata.container("e2e-app", SANDBOX, quota=200_000, period=100_000) as app:
            assert set(vcpu_tids(kata.qemu_pid(SANDBOX))) == {0, 3, 2}
            node.wait(lambda: _ask(kata, node, "cpus") in both, "plugged vCPUs online")
            assert "apicid\t\t: 3" in _ask(kata, node, "cpuinfo")
            app.update_resources({"quota": 100_000})
            assert "apicid\t\t: 2" not in _ask(kata, node, "cpuinfo")
            assert _ask(kata, node, "cpus") in {f"0,{first}", f"0-{first}"}


def test_a_guest_that_panics_is_named(node: Node, kata: Minikata) -> None:
    """Its QEMU ends without a word, as Kata starts it; the next command has what the guest said."""
    panics = {"minikata.guest.run": "echo c >/proc/sysrq-trigger"}
    with kata.container(SANDBOX, SANDBOX) as pod, ExitStack() as containers:
        pod.start()
        qemu = kata.qemu_pid(SANDBOX)
        containers.enter_context(kata.container("e2e-app", SANDBOX, annotations=panics)).start()
        node.wait(lambda: not starttime(qemu), "the VM's end", seconds=60)
        # the end of its console: with a long trace of calls, the message is above it
        with pytest.raises(OciError, match=r"(?s)QEMU had ended with 0.*(Kernel panic|panic\+0x)"):
            containers.close()


def _numbers_by_apic(kata: Minikata, node: Node) -> bool:
    """Whether the guest's kernel gives CPU numbers to slots in advance (Linux 6.9 and later)."""
    major, minor = _ask(kata, node, "kernel").split(".")[:2]
    return (int(major), int(minor)) >= (6, 9)
