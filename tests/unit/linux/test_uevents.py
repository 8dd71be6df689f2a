"""CPUs that go on- or offline, from the real kernel's uevents."""

from __future__ import annotations

import asyncio
import errno
import socket
from contextlib import aclosing
from pathlib import Path

import pytest

from kata_pin.base.errors import HostError
from kata_pin.linux.events import MESSAGE_BYTES, cpu_changes, is_about_cpu, kernel_events

LAST_CPU = max(Path("/sys/devices/system/cpu").glob("cpu[0-9]*"), key=lambda p: int(p.name[3:]))


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        (b"online@/devices/system/cpu/cpu3\0ACTION=online\0", True),
        (b"offline@/devices/system/cpu/cpu12\0ACTION=offline\0", True),
        (b"add@/devices/system/cpu/cpu3\0", True),
        (b"change@/devices/system/cpu/cpu3\0", False),
        (b"online@/devices/system/memory/memory3\0", False),
        (b"online@/devices/system/cpu/cpufreq\0", False),
        (b"online@/devices/system/cpu/cpu\0", False),
        (b"add@/devices/virtual/net/veth0\0DEVPATH=/devices/system/cpu/cpu3\0", False),
        (b"libudev\0\xfe\xed\xca\xfe online@/devices/system/cpu/cpu3", False),
        (b"online@/devices/system/cpu/cpu3/cache\0", False),
        (b"\xff" * MESSAGE_BYTES, False),
        (b"", False),
    ],
)
def test_which_messages_are_about_cpus(message: bytes, wanted: bool) -> None:
    """Only the kernel's own form, with a CPU itself in the path."""
    assert is_about_cpu(message) is wanted


@pytest.mark.root
async def test_the_kernel_is_heard() -> None:
    """A uevent of a CPU that the kernel was asked to repeat; others before it are ignored."""
    uevent = LAST_CPU / "uevent"
    async with asyncio.timeout(10), aclosing(cpu_changes()) as changes:
        await anext(changes)  # listening
        try:
            uevent.write_text("change")
            heard = asyncio.ensure_future(anext(changes))
            await asyncio.sleep(0)
            uevent.write_text("online")
        except OSError as error:
            pytest.skip(f"{uevent}: {error.strerror}")
        await heard


async def test_lost_events_count_as_one() -> None:
    """ENOBUFS means that messages were dropped, so the CPUs must be read."""

    class Overrun(socket.socket):
        def recvfrom(self, *_: object) -> tuple[bytes, object]:
            raise OSError(errno.ENOBUFS, "No buffer space available")

    def connect() -> socket.socket:
        with kernel_events() as real:
            return Overrun(fileno=real.detach())

    async with asyncio.timeout(10), aclosing(cpu_changes(connect)) as changes:
        await anext(changes)
        await anext(changes)


async def test_no_events_here() -> None:
    """A refused socket is a HostError with the reason."""

    def refused() -> socket.socket:
        raise OSError(errno.EPERM, "Operation not permitted")

    with pytest.raises(HostError, match=r"uevents.*not permitted"):
        async for _ in cpu_changes(refused):
            pass
