"""Answers of NRI that act, as bytes computed from NRI's own .proto files with another encoder."""

from __future__ import annotations

import pytest

from kata_pin.errors import ParseError
from kata_pin.model.cpuset import CpuSet
from kata_pin.wire.nri import replies
from kata_pin.wire.nri.replies import Answer, Cpuset, Update
from kata_pin.wire.proto import nri_pb2 as pb

CPUS = Cpuset(CpuSet.parse("2-5"))
BOTH = Cpuset(CpuSet.parse("2-5"), CpuSet.parse("0"))
UPDATE = "0a02633112090a0712053203322d351801"
"""ContainerUpdate: c1 to CPUs 2-5, may fail."""


def test_an_adjustment_as_bytes() -> None:
    """CPUs of the container being created, without and with memory nodes."""
    assert replies.create_reply(Answer(CPUS)).hex() == "0a0b3209120712053203322d35"
    assert replies.create_reply(Answer(BOTH)).hex() == "0a0e320c120a12083203322d353a0130"


def test_updates_as_bytes() -> None:
    """The list of updates has its own field number in each answer, and its one shape."""
    updates = (Update("c1", CPUS),)
    assert replies.update_reply(Answer(updates=updates)).hex() == f"0a11{UPDATE}"
    assert replies.synchronize_reply(updates).hex() == f"0a11{UPDATE}"
    assert replies.update_request(updates).hex() == f"0a11{UPDATE}"
    assert replies.create_reply(Answer(updates=updates)).hex() == f"1211{UPDATE}"


def test_an_update_that_must_succeed() -> None:
    """Without `ignore_failure` the field is absent."""
    data = replies.update_reply(Answer(updates=(Update("c1", CPUS, must=True),)))
    assert data.hex() == "0a0f0a02633112090a0712053203322d35"


def test_nothing_to_say_is_no_bytes() -> None:
    """An answer without changes is the observer's answer, byte for byte."""
    nothing = (Update("c1", Cpuset()),)
    assert replies.create_reply(Answer(updates=nothing)) == b""
    assert replies.update_reply(Answer(updates=nothing)) == b""
    assert replies.synchronize_reply(nothing) == b""


def test_what_could_not_be_updated() -> None:
    """The runtime names the containers; anything else is refused."""
    message = pb.UpdateContainersResponse(failed=[pb.ContainerUpdate(container_id="c7")])
    assert replies.parse_update_response(message.SerializeToString()) == {"c7"}
    assert replies.parse_update_response(b"") == frozenset()
    with pytest.raises(ParseError, match="UpdateContainersResponse"):
        replies.parse_update_response(b"\xff")
