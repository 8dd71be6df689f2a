"""cpu-index, place and APIC id: the arithmetic at sizes where it is easy to get wrong.

Checked against KVM's own vCPU ids too: tests/integration/test_wire_qemu.py.
"""

from __future__ import annotations

import pytest

from kata_pin.base.sandbox import GuestTopology
from kata_pin.peers.qemu import VcpuPlace, apic_id, cpu_index, place_of


@pytest.mark.parametrize(
    ("shape", "ids"),
    [
        pytest.param((16, 1, 1, 1), list(range(16)), id="Kata Go: sockets only"),
        pytest.param((1, 1, 8, 1), list(range(8)), id="runtime-rs: one socket"),
        pytest.param((2, 1, 3, 1), [0, 1, 2, 4, 5, 6], id="three cores leave a gap"),
        pytest.param((1, 1, 2, 3), [0, 1, 2, 4, 5, 6], id="three threads leave a gap"),
        pytest.param(
            (2, 1, 3, 2), [0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13], id="cores and threads"
        ),
        pytest.param(
            (2, 2, 3, 1), [0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14], id="dies between them"
        ),
        pytest.param((2, 3, 1, 1), [0, 1, 2, 4, 5, 6], id="three dies"),
    ],
)
def test_apic_ids(shape: tuple[int, int, int, int], ids: list[int]) -> None:
    """Each level has bits of its own; ids that no vCPU has convert to None."""
    sockets, dies, cores, threads = shape
    guest = GuestTopology(
        boot=1, maximum=len(ids), sockets=sockets, dies=dies, cores=cores, threads=threads
    )
    assert [apic_id(guest, index) for index in range(len(ids))] == ids
    back = [cpu_index(guest, apic) for apic in range(-1, max(ids) + 20)]
    assert [index for index in back if index is not None] == list(range(len(ids)))


def test_place() -> None:
    """Threads count fastest, sockets slowest."""
    guest = GuestTopology(maximum=24, sockets=2, dies=2, cores=3, threads=2)
    assert place_of(guest, 0) == VcpuPlace(0, 0, 0, 0)
    assert place_of(guest, 7) == VcpuPlace(0, 1, 0, 1)
    assert place_of(guest, 23) == VcpuPlace(1, 1, 2, 1)


def test_absurd_apic_id() -> None:
    """An id far outside is nobody's."""
    assert cpu_index(GuestTopology(maximum=1), 1 << 70) is None
