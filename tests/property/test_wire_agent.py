"""A guest's bytes, any of them: a value or a ParseError, and never more than was bounded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import ParseError
from kata_pin.base.json_text import MAX_SHOWN, printable
from kata_pin.guest.probe import find_banner, parse_release
from kata_pin.peers.agent import messages
from kata_pin.peers.agent.client import parse_address
from kata_pin.peers.agent.messages import parse_allowed, parse_cpu_times, parse_cpuinfo
from kata_pin.peers.proto import agent_pb2 as pb

PARSERS: list[Callable[[bytes], Any]] = [
    *(messages.parse_metrics,),
    *(messages.parse_usage, messages.parse_read, messages.parse_wait),
    *(parse_allowed, parse_cpuinfo, parse_release, find_banner),
]

tables = st.dictionaries(
    st.integers(0, 8191), st.integers(0, 0xFFFFFFFE), min_size=1, max_size=50
).filter(lambda table: len(set(table.values())) == len(table))
words = st.sampled_from([b"processor", b"apicid", b"\t: ", b"\n", b"0", b"1", b"7", b":", b" "])


@pytest.mark.parametrize("parse", PARSERS, ids=lambda parse: parse.__name__)
@given(data=st.binary(max_size=300))
def test_any_bytes_raise_parse_errors_only(parse: Callable[[bytes], Any], data: bytes) -> None:
    """Nothing but ParseError comes out of bytes that make no sense."""
    with suppress(ParseError):
        parse(data)


@given(st.lists(words, max_size=40).map(b"".join))
def test_near_cpuinfo(data: bytes) -> None:
    """What is believed has one id a CPU, and one CPU an id."""
    with suppress(ParseError):
        table = parse_cpuinfo(data)
        assert len(set(table.values())) == len(table) > 0


@given(tables, st.sampled_from(["", "model name\t: apicid: 7\n", "initial apicid\t: 3\n"]))
def test_cpuinfo_survives(table: dict[int, int], between: str) -> None:
    """Every table is read back, whatever other lines there are."""
    text = "".join(f"processor\t: {c}\n{between}apicid\t\t: {a}\n\n" for c, a in table.items())
    assert dict(parse_cpuinfo(text.encode())) == table


@given(st.text(max_size=200))
def test_any_metrics(text: str) -> None:
    """Any text is refused or has times."""
    with suppress(ParseError):
        assert parse_cpu_times(text)


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=30))
def test_metrics_survive(times: list[int]) -> None:
    """Every rank's time is read back."""
    text = "".join(
        f'kata_guest_cpu_time{{cpu="{rank}",item="user"}} {value}\n'
        for rank, value in enumerate(times)
    )
    assert [one.busy_ms for one in parse_cpu_times(text)] == times


@given(st.text(max_size=1000))
def test_words_are_bounded_and_printable(text: str) -> None:
    """Whatever a guest sends, a log line stays one line."""
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown) <= MAX_SHOWN + 3


@given(st.sets(st.integers(0, 8191), min_size=1, max_size=40))
def test_cpusets_survive(cpus: set[int]) -> None:
    """What is asked for is what the agent reads, alone."""
    data = messages.update_request("c", CpuSet(cpus))
    message = pb.UpdateContainerRequest.FromString(data)
    assert CpuSet.parse(message.resources.cpu.cpus) == CpuSet(cpus)
    message.resources.cpu.ClearField("cpus")
    assert not message.resources.cpu.ListFields()
    message.resources.ClearField("cpu")
    assert not message.resources.ListFields()


@given(st.text(max_size=200))
def test_any_url(url: str) -> None:
    """An address that is accepted reads as itself."""
    with suppress(ParseError):
        address = parse_address(url)
        assert parse_address(str(address)) == address


@given(st.sampled_from(["vsock://", "hvsock:///"]), st.text(max_size=120))
def test_urls_with_the_right_start(scheme: str, rest: str) -> None:
    """The same beyond the scheme."""
    with suppress(ParseError):
        address = parse_address(scheme + rest)
        assert parse_address(str(address)) == address
