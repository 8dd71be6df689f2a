"""NRI's Synchronize: parts, and what is refused before it is decoded."""

from __future__ import annotations

from typing import Any

import pytest

from kata_pin.base.errors import ParseError
from kata_pin.peers.nri.messages import (
    MAX_BYTES,
    MAX_CONTAINERS,
    MAX_PARTS,
    MAX_PODS,
    SYNCHRONIZE_MAX_DEVICES,
    SnapshotParts,
)
from kata_pin.peers.proto import nri_pb2 as pb


def _pod(number: int = 1, **fields: Any) -> pb.PodSandbox:
    return pb.PodSandbox(id=f"p{number}", **fields)


def _container(number: int = 1, **fields: Any) -> pb.Container:
    return pb.Container(id=f"c{number}", pod_sandbox_id="p1", **fields)


def _part(**fields: Any) -> bytes:
    return bytes(pb.SynchronizeRequest(**fields).SerializeToString())


def test_parts_are_joined() -> None:
    """They are one snapshot, in order."""
    parts = SnapshotParts()
    assert not parts
    assert parts.feed(_part(pods=[_pod(1)], more=True)) is None
    assert parts
    assert parts.feed(_part(pods=[_pod(2)], containers=[_container(1)], more=True)) is None
    whole = parts.feed(_part(containers=[_container(2)]))
    assert whole is not None
    assert [one.id for one in whole.pods] == ["p1", "p2"]
    assert [one.id for one in whole.containers] == ["c1", "c2"]


@pytest.mark.parametrize(
    ("pods", "containers"),
    [(MAX_PODS + 1, 0), (0, MAX_CONTAINERS + 1)],
)
def test_what_no_node_has(pods: int, containers: int) -> None:
    """Too many are refused before they are decoded, in one part and in all parts together."""
    undecodable = b"\x03\x0a\x01\xff"
    with pytest.raises(ParseError, match="NRI Synchronize: more than 4096 pods or 16384 contain"):
        SnapshotParts().feed((b"\x0a" + undecodable) * pods + (b"\x12" + undecodable) * containers)
    parts = SnapshotParts()
    halves = [
        _part(
            pods=[_pod(n) for n in range(some, pods, 2)],
            containers=[_container(n) for n in range(some, containers, 2)],
            more=True,
        )
        for some in range(2)
    ]
    assert parts.feed(halves[0]) is None
    with pytest.raises(ParseError, match="too many"):
        parts.feed(halves[1])


@pytest.mark.parametrize("containers", [1, 2])
def test_devices_are_counted(containers: int) -> None:
    """Two bytes of the wire are a device, in one container and in all of a part together."""
    device = pb.LinuxContainer(devices=[pb.LinuxDevice()]).SerializeToString()
    linux = pb.LinuxContainer.FromString(device * (SYNCHRONIZE_MAX_DEVICES // containers + 1))
    part = _part(containers=[_container(n, linux=linux) for n in range(containers)])
    with pytest.raises(ParseError, match="more than 200000 devices in one part"):
        SnapshotParts().feed(part)


def test_as_many_as_allowed() -> None:
    """The largest node is read."""
    pods = [_pod(n, annotations={"a": "b"}) for n in range(MAX_PODS)]
    containers = [_container(n, name="x" * 100) for n in range(MAX_CONTAINERS)]
    whole = SnapshotParts().feed(_part(pods=pods, containers=containers))
    assert whole is not None
    assert (len(whole.pods), len(whole.containers)) == (MAX_PODS, MAX_CONTAINERS)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x0a\x7f", "cut short"),
        (b"\x0a" + b"\xff" * 12, "cut short"),
        (b"\xff", "cut short"),
        (b"\x18", "cut short"),
        (b"\x1d\x00", "cut short"),
        (b"\xfb\x07\xfc\x07", "not a message of proto3"),
        (_part(pods=[_pod(1, annotations={f"a{n}": "" for n in range(60_000)})]), "50000 fields"),
        (b"\xf8\x07\x01" * 50_001, "50000 fields"),
        (_part(pods=[pb.PodSandbox(id="../x")]), "not a valid container id"),
    ],
)
def test_refused(data: bytes, said: str) -> None:
    """Each with what is wrong."""
    with pytest.raises(ParseError, match=said):
        SnapshotParts().feed(data)


def test_the_wire_types_are_read_as_protobuf_reads_them() -> None:
    """Unknown fields of every type, before and after known ones."""
    unknown = b"\xf8\x07\x96\x01" + b"\xf9\x07" + b"x" * 8 + b"\xfa\x07\x02hi" + b"\xfd\x07wxyz"
    whole = SnapshotParts().feed(unknown + _part(pods=[_pod()]) + unknown)
    assert whole is not None
    assert [one.id for one in whole.pods] == ["p1"]


def test_all_parts_together_are_bounded() -> None:
    """Their number, their bytes, and what is kept of them."""
    parts = SnapshotParts()
    for _ in range(MAX_PARTS):
        assert parts.feed(_part(more=True)) is None
    with pytest.raises(ParseError, match="more than 256 parts"):
        parts.feed(_part(more=True))
    path = pb.LinuxContainer(cgroups_path="/" + "x" * 4095)
    many = _part(containers=[_container(n, linux=path) for n in range(1000)], more=True)
    parts = SnapshotParts()
    assert parts.feed(many) is None
    assert parts.feed(many) is None
    with pytest.raises(ParseError, match="names of more than 8388608 characters"):
        parts.feed(many)
    with pytest.raises(ParseError, match="more than 134217728 bytes"):
        SnapshotParts().feed(bytes(MAX_BYTES + 1))
