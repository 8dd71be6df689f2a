"""`quiet: irq` on a node with real devices and the real irqbalance, while pods live and end.

Virtio-blk, virtio-net and NVMe of QEMU, with interrupts that can be moved and such that cannot. In
the end every mask is as it was first.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.options.quiet.services import parse_setup
from tests.e2e.node import Node
from tests.e2e.nodepods import EXCLUSIVE, installed_hooks, node_pods
from tests.e2e.unit import CONFIG, Unit
from tests.support.interrupts import Interrupt, default_mask, read_interrupts
from tests.support.minikata import Minikata, MinikataContainer

pytestmark = pytest.mark.usefixtures("kvm")

INSTALL: Final = (("kata-pin", "install", "--containerd"), ("systemctl", "daemon-reload"))
DROP_IN: Final = Path("/usr/lib/systemd/system/kata-pin.service.d/quiet.conf")
NET: Final = Path("/sys/bus/virtio/drivers/virtio_net")
SOCKETS: Final = Path("/run/irqbalance")

Masks = dict[str, str]
"""Masks of interrupts that can be moved, by what they are for; the default mask under its name."""


def movable() -> list[Interrupt]:
    """Return the interrupts that can be moved; 0 and 2 refuse as managed ones do."""
    return [one for one in read_interrupts() if not one.managed and one.number > 2]


def masks() -> Masks:
    """Return every mask that can be changed."""
    found = {f"{one.number} {one.text}": str(one.mask) for one in movable()}
    return {**found, "default": str(default_mask())}


def loud(cpus: CpuSet) -> list[str]:
    """Return what may go to these pCPUs although it could be kept off."""
    return [what for what, mask in masks().items() if not CpuSet.parse(mask).isdisjoint(cpus)]


def fired(cpus: CpuSet) -> dict[str, int]:
    """Return how often movable interrupts fired on these pCPUs since boot."""
    return {f"{one.number} {one.text}": sum(one.counts[cpu] for cpu in cpus) for one in movable()}


@pytest.fixture(scope="module")
def devices(node: Node) -> None:
    """Drivers of devices that nothing else here uses."""
    node.run(["modprobe", "-a", "nvme", "virtio_net"], seconds=60)
    node.wait(lambda: list(NET.glob("virtio*")) != [], "a virtio-net device", seconds=30)
    node.wait(Path("/dev/nvme0n1").exists, "an NVMe disk", seconds=60)


@pytest.fixture(scope="module")
def unit(node: Node, devices: None) -> Iterator[Unit]:
    """The installed unit with `quiet: irq`, its drop-in included; as before at the end."""
    made, before = Unit(node), CONFIG.read_bytes()

    def install() -> None:
        for step in INSTALL:
            node.run(step, seconds=120)
        made.systemctl("restart")
        made.wait_running()

    try:
        CONFIG.write_text('{"version": 1, "quiet": "irq", "audit": {"affinity_s": 2}}')
        install()
        assert DROP_IN.exists()
        yield made
    finally:
        CONFIG.write_bytes(before)
        install()
        assert not DROP_IN.exists()


@pytest.fixture
def kata(node: Node, unit: Unit, tmp_path: Path) -> Iterator[Minikata]:
    """Where pods are made."""
    with node_pods(node, tmp_path, default_vcpus=1) as made:
        yield made


@contextlib.contextmanager
def pod(kata: Minikata, name: str, cpu: int) -> Iterator[MinikataContainer]:
    """A pod with one exclusive pCPU."""
    with (
        kata.container(name, name, hooks=installed_hooks()) as sandbox,
        kata.container(
            f"{name}-app", name, hooks=installed_hooks(), cpus=str(cpu), **EXCLUSIVE
        ) as app,
    ):
        sandbox.start()
        app.start()
        yield app


@pytest.fixture
def wait_quiet(node: Node) -> Callable[..., None]:
    """Wait until no interrupt that can be moved may go to these pCPUs."""

    def wait(*cpus: int) -> None:
        wanted = CpuSet(cpus)
        node.wait(lambda: not loud(wanted), f"pCPUs {wanted} to be quiet", seconds=30)

    return wait


@pytest.fixture
def wait_first(node: Node) -> Callable[[Masks], None]:
    """Wait until all masks are as they were."""

    def wait(first: Masks) -> None:
        def restored() -> bool:
            return masks() == first

        try:
            node.wait(restored, "the first masks", seconds=30)
        except AssertionError:
            now = masks()
            changed = {k: (v, now.get(k)) for k, v in first.items() if now.get(k) != v}
            raise AssertionError(f"not restored (first, now): {changed}") from None

    return wait


@pytest.mark.usefixtures("unit")
def test_before_during_and_after_a_pod(
    node: Node,
    kata: Minikata,
    wait_quiet: Callable[..., None],
    wait_first: Callable[[Masks], None],
) -> None:
    """Nothing that can be moved fires on its pCPU under load; the managed queues stay."""
    first = masks()
    managed = [one for one in read_interrupts() if one.managed]
    assert any("nvme" in one.text for one in managed), "the NVMe disk has queues of its own"
    with pod(kata, "quiet-1", 4):
        wait_quiet(4)
        time.sleep(2 * node.scale)  # an idle interrupt moves when it fires the next time
        before = fired(CpuSet({4}))
        for _ in range(3):
            node.run(
                ["dd", "if=/dev/nvme0n1", "of=/dev/null", "bs=64k", "count=200", "iflag=direct"],
                seconds=60,
            )
        after = fired(CpuSet({4}))
        grown = {what: after[what] - times for what, times in before.items() if what in after}
        assert not {what: n for what, n in grown.items() if n > 1}, "one may come on the old pCPU"
        assert {one.number: str(one.mask) for one in read_interrupts() if one.managed} == {
            one.number: str(one.mask) for one in managed
        }
        node.tell(f"quiet: {len(first) - 1} movable and {len(managed)} managed interrupts")
    wait_first(first)


def test_pods_that_come_and_go_while_the_daemon_is_killed(
    node: Node,
    unit: Unit,
    kata: Minikata,
    wait_quiet: Callable[..., None],
    wait_first: Callable[[Masks], None],
) -> None:
    """Two at once, one that replaces another on the same pCPU, kill -9 in between."""
    first = masks()
    chance = random.Random(15)

    def kill() -> None:
        time.sleep(chance.random() * node.scale)
        pid = unit.pid
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        unit.wait_running(other_than=pid)

    with contextlib.ExitStack() as old:
        old.enter_context(pod(kata, "quiet-a", 4))
        kill()
        with pod(kata, "quiet-b", 5):
            wait_quiet(4, 5)
            kill()
            with pod(kata, "quiet-c", 4):  # the kubelet starts it before the old one is deleted
                old.close()
                kill()
                wait_quiet(4, 5)
            wait_quiet(5)
            node.wait(lambda: bool(loud(CpuSet({4}))), "pCPU 4 to be used again", seconds=30)
        kill()
    wait_first(first)


@pytest.mark.usefixtures("unit")
def test_hotplug_and_another_writer(
    kata: Minikata,
    switch: Callable[[int, bool], None],
    wait_quiet: Callable[..., None],
    wait_first: Callable[[Masks], None],
) -> None:
    """virtio-net rewrites its masks when pCPUs go; a driver that binds again has new ones."""
    device = next(NET.glob("virtio*")).name
    (NET / "unbind").write_text(device)
    (NET / "bind").write_text(device)
    first = masks()
    with pod(kata, "quiet-h", 4):
        wait_quiet(4)
        for on in (False, True):
            switch(15, on)
            wait_quiet(4)
        (NET / "unbind").write_text(device)
        (NET / "bind").write_text(device)
        wait_quiet(4)
        victim = next(one for one in movable() if "nvme0q0" in one.text)
        Path(f"/proc/irq/{victim.number}/smp_affinity_list").write_text("4")
        wait_quiet(4)
    wait_first(first)


SEND: Final = """
import socket, sys, time
end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
end.bind((sys.argv[1], 0))
frame = b"\\xff" * 6 + bytes(6) + b"\\x88\\xb5" + bytes(1000)
while True:
    try:
        end.send(frame)
    except OSError:
        pass
    time.sleep(0.001)
"""
"""Sends frames until it is killed; nobody receives them, and the card interrupts for each ring."""

LOADED: Final = r"virtio\d+-(?:input|output)|nvme0q0"
LOAD_CPUS: Final = "0-3"
LOAD_S: Final = 6


@contextlib.contextmanager
def load() -> Iterator[None]:
    """Load on the network card and on both disks, submitted from housekeeping pCPUs."""
    card = next(path.name for path in next(NET.glob("virtio*")).glob("net/*"))
    subprocess.run(["ip", "link", "set", card, "up"], check=True, timeout=20)
    read = "while :; do dd if={} of=/dev/null bs=4k count=2000 iflag=direct 2>/dev/null; done"
    works = (
        [sys.executable, "-c", SEND, card],
        *(["sh", "-c", read.format(disk)] for disk in ("/dev/nvme0n1", "/dev/vda")),
    )
    running = [
        subprocess.Popen(["taskset", "-c", LOAD_CPUS, *one], start_new_session=True)
        for one in works
    ]
    try:
        yield
    finally:
        for one in running:
            os.killpg(one.pid, signal.SIGKILL)
            one.wait()


def rates(cpu: int, seconds: float) -> dict[str, float]:
    """Return interrupts of devices per second on a pCPU: those that can be moved, and managed."""

    def counts() -> dict[tuple[int, str, bool], int]:
        return {(one.number, one.text, one.managed): one.counts[cpu] for one in read_interrupts()}

    began, before = time.monotonic(), counts()
    time.sleep(seconds)
    after, took = counts(), time.monotonic() - began
    found = {"movable": 0.0, "managed": 0.0}
    for key, times in after.items():
        found["managed" if key[2] else "movable"] += (times - before.get(key, times)) / took
    return found


def in_interrupts(cpu: int) -> float:
    """Return the milliseconds that a pCPU has been in interrupts (proc_stat(5): irq, softirq)."""
    line = next(one for one in Path("/proc/stat").read_text().splitlines()
                if one.startswith(f"cpu{cpu} "))  # fmt: skip
    return sum(map(int, line.split()[6:8])) * 1000 / os.sysconf("SC_CLK_TCK")


def measured(node: Node) -> tuple[dict[str, float], float]:
    """Return the rates on pCPU 4 under load, and its milliseconds in interrupts per second."""
    with load():
        time.sleep(2 * node.scale)  # an idle interrupt moves when it fires the next time
        began, before = time.monotonic(), in_interrupts(4)
        found = rates(4, LOAD_S * node.scale)
        return found, (in_interrupts(4) - before) / (time.monotonic() - began)


@pytest.mark.usefixtures("unit")
def test_load_before_and_after(node: Node, kata: Minikata, wait_quiet: Callable[..., None]) -> None:
    """Under network and disk load: what fires on a pod's pCPU without and with `quiet: irq`."""
    first = {one.number: str(one.mask) for one in movable()}
    of_devices = [one.number for one in movable() if re.search(LOADED, one.text)]
    try:
        with pod(kata, "quiet-l", 4):
            wait_quiet(4)
            _set_level(node, "report")
            node.wait(lambda: bool(loud(CpuSet({4}))), "the first masks", seconds=30)
            for number in of_devices:  # as irqbalance may have left them
                Path(f"/proc/irq/{number}/smp_affinity_list").write_text("4")
            before, before_ms = measured(node)
            _set_level(node, "irq")
            wait_quiet(4)
            after, after_ms = measured(node)
            for level, times, spent in (("report", before, before_ms), ("irq", after, after_ms)):
                node.tell(f"quiet: {level}, load: {_said(times)}, {spent:.1f} ms/s in interrupts")
            assert before["movable"] > 20, "the load reaches the pCPU"
            assert after["movable"] < 1
        _set_level(node, "irq")
    finally:
        for number, mask in first.items():
            with contextlib.suppress(OSError):
                Path(f"/proc/irq/{number}/smp_affinity_list").write_text(mask)


def _set_level(node: Node, level: str) -> None:
    """Change the setting while the daemon runs."""
    settings = {"version": 1, "quiet": level, "audit": {"affinity_s": 2}}
    CONFIG.write_text(json.dumps(settings))
    node.run(["kata-pin", "reload"], seconds=60)


def _said(found: dict[str, float]) -> str:
    return ", ".join(f"{times:.1f} {kind} interrupts/s" for kind, times in found.items())


def _setup() -> tuple[int, CpuSet] | None:
    """Return irqbalance's pid and the pCPUs that it keeps clear."""
    for path in SOCKETS.glob("irqbalance*.sock"):
        with socket.socket(socket.AF_UNIX) as end, contextlib.suppress(OSError):
            end.settimeout(10)
            end.connect(str(path))
            end.sendall(b"setup")
            pid = int(re.sub(r"\D", "", path.name))
            return pid, parse_setup(end.recv(65536)).banned
    return None


@pytest.fixture
def irqbalance(node: Node) -> Iterator[Callable[[], tuple[int, CpuSet]]]:
    """Debian's irqbalance; asks for its pid and what it keeps clear."""
    node.run(["systemctl", "start", "irqbalance"], seconds=60)

    def ask() -> tuple[int, CpuSet]:
        found = None

        def answered() -> bool:
            nonlocal found
            found = _setup()
            return found is not None

        node.wait(answered, "irqbalance to answer", seconds=30)
        assert found is not None
        return found

    yield ask
    node.run(["systemctl", "stop", "irqbalance"], seconds=60)


@pytest.mark.usefixtures("unit")
def test_irqbalance(
    node: Node,
    kata: Minikata,
    irqbalance: Callable[[], tuple[int, CpuSet]],
    wait_quiet: Callable[..., None],
) -> None:
    """It is asked to keep clear, again after a restart, and gets its own setup back."""
    pid, own = irqbalance()
    assert 4 not in own
    with pod(kata, "quiet-i", 4):
        node.wait(lambda: irqbalance()[1] == own | CpuSet({4}), "pCPU 4 to be banned", seconds=60)
        wait_quiet(4)
        node.run(["systemctl", "restart", "irqbalance"], seconds=60)
        assert irqbalance()[0] != pid
        node.wait(lambda: irqbalance()[1] == own | CpuSet({4}), "the ban again", seconds=60)
        wait_quiet(4)
    node.wait(lambda: irqbalance()[1] == own, "its own setup", seconds=60)
