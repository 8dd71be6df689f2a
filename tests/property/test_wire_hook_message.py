"""The hook's messages over any split of the stream."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kata_pin.base.errors import RemoteProtocolError
from kata_pin.peers.oci import MAX_PID, Phase
from kata_pin.records import hooks
from kata_pin.records.hooks import HookDecoder, HookMessage
from kata_pin.service.exchange import LineDecoder

messages = st.builds(
    HookMessage,
    phase=st.sampled_from(Phase),
    stamp_ns=st.integers(0, hooks.MAX_STAMP),
    pid=st.integers(1, MAX_PID),
    body=st.binary(max_size=300),
)


@given(message=messages)
def test_round_trip(message: HookMessage) -> None:
    """What is encoded is decoded, and the spool file's name gives the identity back."""
    assert hooks.decode(hooks.encode(message)) == message
    assert hooks.parse_spool_name(message.spool_name) == message.key


@given(message=messages, cuts=st.lists(st.integers(0, 500)))
def test_any_split(message: HookMessage, cuts: list[int]) -> None:
    """The message comes out with its last byte, however the stream is cut."""
    data = hooks.encode(message)
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    decoder = HookDecoder()
    start = 0
    for end in ends:
        found = decoder.feed(data[start:end])
        assert found == (message if end == len(data) else None)
        start = end


@given(message=messages)
def test_one_byte_at_a_time(message: HookMessage) -> None:
    """Fed one byte at a time is fed at once."""
    data = hooks.encode(message)
    decoder = HookDecoder()
    for position in range(len(data)):
        found = decoder.feed(data[position : position + 1])
        assert (found == message) is (position == len(data) - 1)


@given(data=st.binary(max_size=400), head=st.sampled_from([b"", b"KP1 ", b"KP1 prestart 1 2 "]))
def test_any_bytes(data: bytes, head: bytes) -> None:
    """Any bytes are a message, unfinished, or a violation; a message encodes to the same bytes."""
    try:
        message = HookDecoder().feed(head + data)
    except RemoteProtocolError:
        return
    if message is not None:
        assert hooks.encode(message) == head + data


@given(reason=st.text())
def test_any_reason(reason: str) -> None:
    """A reason never breaks out of its reply line."""
    for line in (hooks.refused(reason), hooks.unpinned(reason)):
        assert line.endswith(b"\n")
        assert line.count(b"\n") == 1
        assert line.split(b" ", 1)[1].strip()


@given(lines=st.lists(st.binary(max_size=40)), cuts=st.lists(st.integers(0, 400)))
def test_lines_over_any_split(lines: list[bytes], cuts: list[int]) -> None:
    """The control protocol's lines come out whole and in order."""
    clean = [line.replace(b"\n", b"") for line in lines]
    data = b"".join(line + b"\n" for line in clean)
    decoder = LineDecoder()
    found: list[bytes] = []
    start = 0
    for end in sorted({min(cut, len(data)) for cut in cuts} | {len(data)}):
        found += decoder.feed(data[start:end])
        start = end
    assert found == clean
    assert decoder.feed(b"\n") == [b""], "nothing was left over"
