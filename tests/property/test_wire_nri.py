"""NRI's multiplexer over any split, and its messages from any bytes."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from kata_pin.base.cpuset import CpuSet
from kata_pin.peers import ttrpc
from kata_pin.peers.nri import replies
from kata_pin.peers.nri.replies import Cpuset, NriAnswer, Update
from kata_pin.peers.proto import nri_pb2 as pb
from kata_pin.peers.ttrpc import FrameDecoder, MuxDecoder

DATA = Path(__file__).resolve().parents[1] / "data/nri"

connections = st.integers(0, (1 << 32) - 1)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    """Cut data at these places, wherever they are."""
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@given(
    st.lists(st.tuples(connections, st.binary(min_size=1, max_size=9000)), max_size=5),
    st.lists(st.integers(0, 30000)),
)
def test_any_split(messages: list[tuple[int, bytes]], cuts: list[int]) -> None:
    """Every connection gets its bytes in order, however the trunk is cut."""
    data = b"".join(ttrpc.encode(*message) for message in messages)
    decoder = MuxDecoder()
    found: dict[int, bytes] = {}
    for piece in pieces(data, cuts):
        for connection, part in decoder.feed(piece):
            found[connection] = found.get(connection, b"") + part
    wanted: dict[int, bytes] = {}
    for connection, message in messages:
        wanted[connection] = wanted.get(connection, b"") + message
    assert found == wanted


@given(st.lists(st.integers(0, 20000), max_size=60))
@settings(max_examples=30)
def test_the_recording_over_any_split(cuts: list[int]) -> None:
    """A real connection reads the same however it is cut, both layers together."""
    data = (DATA / "from-containerd.bin").read_bytes()
    assert _frames(pieces(data, cuts)) == _frames([data])


def _frames(parts: list[bytes]) -> list[tuple[int, ttrpc.Frame]]:
    trunk, inner = MuxDecoder(), {1: FrameDecoder(), 2: FrameDecoder()}
    return [
        (connection, frame)
        for part in parts
        for connection, piece in trunk.feed(part)
        for frame in inner[connection].feed(piece)
    ]


cpusets = st.builds(
    Cpuset,
    st.sets(st.integers(0, 300), max_size=40).map(CpuSet),
    st.sets(st.integers(0, 7), max_size=4).map(CpuSet),
)
ids = st.text("0123456789abcdef", min_size=1, max_size=64)


@given(cpusets, st.dictionaries(ids, st.tuples(cpusets, st.booleans()), max_size=5))
def test_answers_read_back(adjust: Cpuset, changes: dict[str, tuple[Cpuset, bool]]) -> None:
    """What a runtime reads of any answer is what was meant: lists of CPUs, no other resource."""
    updates = tuple(Update(one, cpuset, must) for one, (cpuset, must) in changes.items())
    message = pb.CreateContainerResponse()
    message.ParseFromString(replies.create_reply(NriAnswer(adjust, updates)))
    assert message.HasField("adjust") is bool(adjust)
    assert _cpuset(message.adjust.linux.resources) == adjust
    read = {one.container_id: one for one in message.update}
    assert set(read) == {one for one, (cpuset, _) in changes.items() if cpuset}
    for one, update in read.items():
        assert _cpuset(update.linux.resources) == changes[one][0]
        assert update.ignore_failure is not changes[one][1]


def _cpuset(resources: pb.LinuxResources | pb.AdjustedResources) -> Cpuset:
    known = pb.LinuxCPU(cpus=resources.cpu.cpus, mems=resources.cpu.mems)
    assert resources == type(resources)(cpu=known) or not resources.HasField("cpu")
    return Cpuset(CpuSet.parse(resources.cpu.cpus), CpuSet.parse(resources.cpu.mems))
