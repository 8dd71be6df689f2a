"""Answers of NRI that act, as bytes computed from NRI's own .proto files with another encoder."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kata_pin.base.allocation import AtCreation, Device, Limits, Mount
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import ParseError
from kata_pin.peers.nri import replies
from kata_pin.peers.nri.replies import Cpuset, NriAnswer, Update
from kata_pin.peers.proto import nri_pb2 as pb

CPUS = Cpuset(CpuSet.parse("2-5"))
BOTH = Cpuset(CpuSet.parse("2-5"), CpuSet.parse("0"))
UPDATE = "0a02633112090a0712053203322d351801"
"""ContainerUpdate: c1 to CPUs 2-5, may fail."""


def test_an_adjustment_as_bytes() -> None:
    """CPUs of the container being created, without and with memory nodes."""
    assert replies.create_reply(NriAnswer(CPUS)).hex() == "0a0b3209120712053203322d35"
    assert replies.create_reply(NriAnswer(BOTH)).hex() == "0a0e320c120a12083203322d353a0130"


def test_everything_that_a_creation_can_have() -> None:
    """Limits, classes, environment and mounts, each in its field."""
    limits = Limits(shares=512, quota_us=-1, period_us=50_000, memory=1 << 26)
    creation = AtCreation((("2MB", 1 << 22),), "gold", "fast", (("A", "b"),), (Mount("/a", "/b"),))
    answer = NriAnswer(Cpuset(limits=limits), creation=creation)
    assert replies.create_reply(answer).hex() == (
        "0a86011a390a022f61120462696e641a022f62220462696e642202726f22066e6f7375696422056e6f64657622"
        "066e6f657865632208727072697661746522060a01411201623241123f0a070a05088080802012180a03088004"
        "120b08ffffffffffffffffff011a0408d086031a0a0a03324d42108080800222060a04666173742a060a04676f"
        "6c64"
    )


def test_devices_and_annotations() -> None:
    """NRI makes a device's rule of its mode and never a narrower one: that is sent beside it."""
    devices = (
        Device("/dev/d", "c", 240, 7),
        Device("/dev/e", "b", 259, 0, mode=0o444, access="r"),
    )
    creation = AtCreation(devices=devices, annotations=(("k", "v"),))
    assert replies.create_reply(NriAnswer(creation=creation)).hex() == (
        "0a5a12060a016b12017632500a150a062f6465762f6412016318f00120072a0308b0030a130a062f6465762f65"
        "1201621883022a0308a40212223a0f1201621a0308830222002a0372776d3a0f08011201621a0308830222002a"
        "0172"
    )


def test_an_update_with_limits() -> None:
    """Beside the cpuset only what is decided."""
    update = Update("c1", replace(CPUS, limits=Limits(shares=512, memory=1 << 26)))
    assert replies.update_request((update,)).hex() == (
        "0a1f0a02633112170a150a070a050880808020120a0a030880043203322d351801"
    )
    assert replies.update_request((Update("c1", Cpuset(limits=Limits(shares=2))),)) != b""


def test_updates_as_bytes() -> None:
    """The list of updates has its own field number in each answer, and its one shape."""
    updates = (Update("c1", CPUS),)
    assert replies.update_reply(NriAnswer(updates=updates)).hex() == f"0a11{UPDATE}"
    assert replies.synchronize_reply(updates).hex() == f"0a11{UPDATE}"
    assert replies.update_request(updates).hex() == f"0a11{UPDATE}"
    assert replies.create_reply(NriAnswer(updates=updates)).hex() == f"1211{UPDATE}"


def test_an_update_that_must_succeed() -> None:
    """Without `ignore_failure` the field is absent."""
    data = replies.update_reply(NriAnswer(updates=(Update("c1", CPUS, must=True),)))
    assert data.hex() == "0a0f0a02633112090a0712053203322d35"


def test_nothing_to_say_is_no_bytes() -> None:
    """An answer without changes is the observer's answer, byte for byte."""
    nothing = (Update("c1", Cpuset()),)
    assert replies.create_reply(NriAnswer(updates=nothing)) == b""
    assert replies.update_reply(NriAnswer(updates=nothing)) == b""
    assert replies.synchronize_reply(nothing) == b""


def test_what_could_not_be_updated() -> None:
    """The runtime names the containers; anything else is refused."""
    message = pb.UpdateContainersResponse(failed=[pb.ContainerUpdate(container_id="c7")])
    assert replies.parse_update_response(message.SerializeToString()) == {"c7"}
    assert replies.parse_update_response(b"") == frozenset()
    with pytest.raises(ParseError, match="UpdateContainersResponse"):
        replies.parse_update_response(b"\xff")
