"""cpu-index, place and APIC id convert without loss for any guest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kata_pin.base.sandbox import GuestTopology
from kata_pin.peers.qemu import apic_id, cpu_index, index_of, parse_smp, place_of

counts = st.integers(1, 7)


@st.composite
def guests(draw: st.DrawFn) -> GuestTopology:
    sockets, dies, cores, threads = (draw(counts) for _ in range(4))
    total = sockets * dies * cores * threads
    return GuestTopology(total, total, sockets, dies, cores, threads)


@given(guest=guests(), data=st.data())
def test_round_trips(guest: GuestTopology, data: st.DataObject) -> None:
    """Index to place and back, index to APIC id and back; order is kept."""
    index = data.draw(st.integers(0, guest.maximum - 1))
    place = place_of(guest, index)
    assert index_of(guest, *place) == index
    assert cpu_index(guest, apic_id(guest, index)) == index
    if index:
        assert apic_id(guest, index - 1) < apic_id(guest, index)


@given(guest=guests())
def test_smp_spelled_out(guest: GuestTopology) -> None:
    """A topology spelled out as -smp reads as itself."""
    text = (
        f"{guest.boot},sockets={guest.sockets},dies={guest.dies},"
        f"cores={guest.cores},threads={guest.threads},maxcpus={guest.maximum}"
    )
    assert parse_smp([text]) == guest
