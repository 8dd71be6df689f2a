"""NRI's multiplexer over any split, and its messages from any bytes."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import ParseError, RemoteProtocolError
from kata_pin.base.values import ContainerState
from kata_pin.peers import ttrpc
from kata_pin.peers.nri import messages as nri
from kata_pin.peers.nri import replies
from kata_pin.peers.nri.messages import EventKind, SnapshotParts
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


@given(st.binary(max_size=300))
def test_any_trunk(data: bytes) -> None:
    """Any bytes are frames, unfinished, or a violation."""
    with suppress(RemoteProtocolError):
        for connection, piece in MuxDecoder().feed(data):
            assert piece
            assert connection >= 0


METHODS = ["StateChange", *(kind.method for kind in EventKind)]
SEEDS = [
    ttrpc.parse_request(frame.data).payload
    for connection, frame in _frames([(DATA / "from-containerd.bin").read_bytes()])
    if connection == ttrpc.PLUGIN and frame.data is not None
]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A real message with a piece cut out or replaced."""
    data = draw(st.sampled_from(SEEDS))
    start = draw(st.integers(0, len(data)))
    end = draw(st.integers(start, min(len(data), start + 60)))
    return data[:start] + draw(st.binary(max_size=20)) + data[end:]


@given(st.binary(max_size=300) | damaged(), st.sampled_from(METHODS))
@settings(max_examples=300)
def test_any_message_raises_parse_errors_only(data: bytes, method: str) -> None:
    """Any bytes are a message or a ParseError, and every message becomes a record."""
    for parse in (nri.parse_configure, SnapshotParts().feed):
        with suppress(ParseError):
            parse(data)
    with suppress(ParseError):
        event = nri.parse_event(method, data, tuple(nri.EventKind))
        if event is not None and event.container is not None:
            nri.container_record(
                event.pod, event.container, ContainerState.CREATED, stamp_ns=1, source="nri:x"
            )
        elif event is not None:
            nri.pod_record(event.pod, ContainerState.RUNNING, stamp_ns=1, source="nri:x")


wild = st.text(max_size=20) | st.sampled_from(["p1", "c1", "0-3", "0-99999999999", "../x", ""])


@given(st.tuples(wild, wild, wild, wild, wild), st.integers(0, (1 << 32) - 1), st.integers(0, 200))
def test_any_values(words: tuple[str, str, str, str, str], pid: int, state: int) -> None:
    """Messages of the right shape with wild values: an event whose record is sound, or an error."""
    pod_id, container_id, name, cpus, mems = words
    container = pb.Container(
        id=container_id,
        pod_sandbox_id=pod_id,
        name=name,
        state=state,  # type: ignore[arg-type] # proto3 enums are open
        linux=pb.LinuxContainer(
            resources=pb.LinuxResources(cpu=pb.LinuxCPU(cpus=cpus, mems=mems)), cgroups_path=name
        ),
    )
    request = pb.EventRequest(
        pod=pb.PodSandbox(id=pod_id, name=name, uid=name, namespace=name, pid=pid),
        container=container,
    )
    try:
        event = nri.parse_event("StartContainer", request.SerializeToString())
    except ParseError:
        return
    assert event is not None
    assert event.container is not None
    record = nri.container_record(
        event.pod, event.container, event.container.state, stamp_ns=1, source="nri:x"
    )
    assert record.id == container_id
    assert record.cpus is None or len(record.cpus) <= 8192


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


@given(st.binary(max_size=100))
def test_any_update_response_raises_parse_errors_only(data: bytes) -> None:
    """Any bytes are a list of containers or a ParseError."""
    with suppress(ParseError):
        replies.parse_update_response(data)
