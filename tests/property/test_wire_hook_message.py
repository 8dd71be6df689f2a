"""The hook's messages over any split of the stream."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kata_pin.peers.oci import MAX_PID, Phase
from kata_pin.records import hooks
from kata_pin.records.hooks import HookDecoder, HookMessage
from tests.support.hooks import encode

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
    assert hooks.decode(encode(message)) == message
    identity = (message.stamp_ns, message.pid)
    assert hooks.parse_spool_name(message.spool_name) == identity


@given(message=messages, cuts=st.lists(st.integers(0, 500)))
def test_any_split(message: HookMessage, cuts: list[int]) -> None:
    """The message comes out with its last byte, however the stream is cut."""
    data = encode(message)
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    decoder = HookDecoder()
    start = 0
    for end in ends:
        found = decoder.feed(data[start:end])
        assert found == (message if end == len(data) else None)
        start = end
