"""This machine's own interrupts, and Debian's irqbalance, which is kept from touching them."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.linux.files import HOST
from kata_pin.linux.interrupts import read_interrupts
from kata_pin.options.quiet.kernel_work import IrqbalanceProcesses
from kata_pin.options.quiet.values import Observed, TunableRecord
from kata_pin.rights.broker.tunables import TunableWrite
from kata_pin.rights.calls import DIRECT
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.alone,  # irqbalance and the interrupts' masks are the machine's
    pytest.mark.skipif(os.geteuid() != 0, reason="interrupts are root's to move"),
]


def test_masks_of_this_machine() -> None:
    """Each can be written with what it has; one that is managed shows it by its mode or by EIO."""
    for one in read_interrupts(HOST):
        write = TunableWrite("interrupt", str(one.number), str(one.mask))
        [done] = DIRECT.write_tunables([write], "")
        if one.managed:
            assert done.errno, f"{one.row.text} is managed, and was written"
        if not done.errno:
            assert CpuSet.parse(done.value) == one.mask


def test_an_interrupt_of_this_machine_is_moved_and_put_back() -> None:
    """The first that the kernel lets anybody move, to each of its pCPUs in turn."""
    moved = 0
    for one in read_interrupts(HOST):
        if one.managed or len(one.mask) < 2:
            continue
        for target in (*map(str, one.mask), str(one.mask)):
            write = TunableWrite("interrupt", str(one.number), target)
            [done] = DIRECT.write_tunables([write], "")
            if done.errno:
                break
            assert str(CpuSet.parse(done.value)) == target
            moved += 1
        if moved:
            break
    assert moved or not [one for one in read_interrupts(HOST) if len(one.mask) > 1]


@pytest.fixture
def balancer(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """irqbalance, which is told to leave every interrupt where it is."""
    script = tmp_path / "policy"
    script.write_text("#!/bin/sh\necho ban=true\n")
    script.chmod(0o755)
    folder = Path("/run/irqbalance")
    made = not folder.exists()
    folder.mkdir(exist_ok=True)
    argv = ["/usr/sbin/irqbalance", "--foreground", "--interval=1", f"--policyscript={script}"]
    child = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield child
    finally:
        child.terminate()
        child.wait(30)
        with suppress(OSError):
            (folder / f"irqbalance{child.pid}.sock").unlink()
        if made:
            with suppress(OSError):
                folder.rmdir()


def _seen(client: IrqbalanceProcesses, pid: int) -> Observed | None:
    found = asyncio.run(client.observe())
    return next((one for one in found if one.key.name == str(pid)), None)


def test_irqbalance_keeps_clear_what_it_is_told(balancer: subprocess.Popen[bytes]) -> None:
    """Over its own socket; afterwards it has what its own configuration says."""
    client = IrqbalanceProcesses(HOST)
    wait_for(lambda: _seen(client, balancer.pid) is not None, "irqbalance to answer", 60)
    first = _seen(client, balancer.pid)
    assert first is not None
    last = max(os.sched_getaffinity(0))
    wanted = str(CpuSet.parse(first.value) | CpuSet({last}))

    def tell(value: str) -> None:
        [done] = asyncio.run(client.write([TunableRecord(first.key, "", first.value, value)]))
        assert done.errno == 0

    def has(value: str) -> bool:
        now = _seen(client, balancer.pid)
        return now is not None and now.value == value

    tell(wanted)
    wait_for(lambda: has(wanted), f"irqbalance to keep pCPU {last} clear", 60)
    tell(first.value)
    wait_for(lambda: has(first.value), "irqbalance's own setup", 60)
    assert not client.problem
    balancer.terminate()
    balancer.wait(30)
    assert _seen(client, balancer.pid) is None
    assert not client.problem
