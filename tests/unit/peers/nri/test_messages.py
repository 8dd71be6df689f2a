"""NRI's messages: byte vectors, a recorded connection of containerd 1.7, and records of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kata_pin.base.allocation import DeviceNode
from kata_pin.base.cpuset import MAX_TEXT, CpuSet
from kata_pin.base.errors import ParseError
from kata_pin.base.values import ContainerKind, ContainerState
from kata_pin.peers import ttrpc
from kata_pin.peers.nri import messages as nri
from kata_pin.peers.nri import replies
from kata_pin.peers.nri.messages import Event, EventKind, SnapshotParts
from kata_pin.peers.oci import CpuResources
from kata_pin.peers.proto import nri_pb2 as pb
from kata_pin.peers.ttrpc import FrameDecoder, MuxDecoder, Response, TtrpcRequest

DATA = Path(__file__).resolve().parents[3] / "data/nri"

REGISTRATION = (
    "00000002000000570000004d0000000101000a1c6e72692e706b672e6170692e7631616c706861312e52756e74696d"
    "65120e5265676973746572506c7567696e1a170a086b6174612d70696e120239351a0776302e31322e302080e497d0"
    "12"
)
"""The trunk's bytes of a registration, computed from NRI's .proto files with another encoder."""


def _frames(name: str) -> list[tuple[int, ttrpc.Frame]]:
    """Return the frames of a recording with their connections."""
    decoders = {ttrpc.PLUGIN: FrameDecoder(), ttrpc.RUNTIME: FrameDecoder()}
    return [
        (connection, frame)
        for connection, piece in MuxDecoder().feed((DATA / name).read_bytes())
        for frame in decoders[connection].feed(piece)
    ]


def _calls() -> list[TtrpcRequest]:
    """Return what the recorded containerd called."""
    return [
        ttrpc.parse_request(frame.data)
        for connection, frame in _frames("from-containerd.bin")
        if connection == ttrpc.PLUGIN and frame.data is not None
    ]


def _events() -> list[Event]:
    found = [nri.parse_event(call.method, call.payload) for call in _calls()[2:]]
    assert None not in found
    return [event for event in found if event is not None]


def test_registration_as_bytes() -> None:
    """Registering is exactly these bytes on the trunk."""
    request = TtrpcRequest(
        nri.RUNTIME_SERVICE,
        "RegisterPlugin",
        replies.register_request("kata-pin", "95"),
        timeout_ns=5_000_000_000,
    )
    data = ttrpc.encode(ttrpc.RUNTIME, ttrpc.encode_request(1, request))
    assert data.hex() == REGISTRATION


def test_configure_reply_as_bytes() -> None:
    """The mask is that of an observer: 0x767, bits that every version since 0.2 has."""
    data = ttrpc.encode_response(1, Response(replies.configure_reply()))
    expected = "000000010000000f00000005000000010200120310e70e"
    assert ttrpc.encode(ttrpc.PLUGIN, data).hex() == expected


def test_methods_are_named_as_in_nri() -> None:
    """The methods of the service Plugin, as the .proto has them."""
    assert [kind.method for kind in EventKind] == [
        *("RunPodSandbox", "StopPodSandbox", "RemovePodSandbox", "CreateContainer"),
        *("PostCreateContainer", "StartContainer", "PostStartContainer", "UpdateContainer"),
        "PostUpdateContainer",
        *("StopContainer", "RemoveContainer"),
    ]


def test_the_recording_begins_with_configure_and_synchronize() -> None:
    """The real containerd sends its version, then all pods and containers."""
    configure, synchronize = _calls()[:2]
    assert (configure.service, configure.method) == (nri.PLUGIN_SERVICE, "Configure")
    told = nri.parse_configure(configure.payload)
    assert (told.runtime, told.version.startswith("1.7.24")) == ("containerd", True)
    assert told.request_s == 2.0
    snapshot = SnapshotParts().feed(synchronize.payload)
    assert snapshot is not None
    (pod,) = snapshot.pods
    assert (pod.name, pod.namespace, pod.uid) == ("earlier", "shop", "uid-earlier")
    assert pod.pid > 0
    containers = {one.name: one for one in snapshot.containers}
    assert {one.pod_id for one in snapshot.containers} == {pod.id}
    app = containers["app"]
    assert (app.cpu.cpus, app.cpu.shares, app.state) == ("0-1", 512, ContainerState.RUNNING)
    assert containers["waiting"].state is ContainerState.CREATED
    assert containers["waiting"].cpu.cpus == ""


def test_the_recording_tells_a_pods_life() -> None:
    """Every event of containerd 1.7, most of them as StateChange, in the order they came."""
    assert "StateChange" in {call.method for call in _calls()}
    events = _events()
    assert [event.kind for event in events] == [
        *(EventKind.RUN_POD_SANDBOX, EventKind.START_CONTAINER, EventKind.POST_START_CONTAINER),
        *(EventKind.POST_UPDATE_CONTAINER, EventKind.STOP_CONTAINER, EventKind.REMOVE_CONTAINER),
        *(EventKind.STOP_POD_SANDBOX, EventKind.REMOVE_POD_SANDBOX),
    ]
    cpus = {e.kind: e.container.cpu.cpus for e in events if e.container is not None}
    assert cpus[EventKind.START_CONTAINER] == "1"
    assert cpus[EventKind.POST_UPDATE_CONTAINER] == "0"
    assert {event.pod.name for event in events} == {"later"}


def test_our_side_of_the_recording_is_empty_answers() -> None:
    """An observer answers with nothing but the mask: no adjustment ever left the plugin."""
    answers = [
        ttrpc.parse_response(frame.data)
        for connection, frame in _frames("from-plugin.bin")
        if connection == ttrpc.PLUGIN and frame.data is not None
    ]
    assert answers[0].payload == replies.configure_reply()
    assert {(one.code, one.payload) for one in answers[1:]} == {(0, b"")}
    assert len(answers) == len(_calls())


def test_records_of_the_recording() -> None:
    """A container's record has the cpuset as updated, its names, its handler and its stamp."""
    event = next(e for e in _events() if e.kind is EventKind.POST_UPDATE_CONTAINER)
    assert event.container is not None
    record = nri.container_record(
        event.pod,
        event.container,
        event.container.state,
        stamp_ns=5,
        source="nri:PostUpdateContainer",
    )
    assert (record.id, record.sandbox_id) == (event.container.id, event.pod.id)
    assert record.kind is ContainerKind.CONTAINER
    assert (record.cpus, record.quota_us, record.recorded_ns) == (CpuSet([0]), 100000, 5)
    assert (record.name, record.pod_name, record.pod_namespace) == ("app", "later", "shop")
    assert (record.pod_uid, record.source) == ("uid-later", "nri:PostUpdateContainer")
    assert record.cgroups_path.endswith(record.id)
    assert record.note == ""
    pod = nri.pod_record(event.pod, ContainerState.RUNNING, stamp_ns=6, source="nri:X")
    assert (pod.id, pod.sandbox_id, pod.kind) == (event.pod.id, event.pod.id, ContainerKind.SANDBOX)
    assert pod.pid_hint == event.pod.pid


# ---- both styles of events, made here -----------------------------------------------------


def _message_pod() -> pb.PodSandbox:
    return pb.PodSandbox(id="p1", name="web", namespace="shop", runtime_handler="kata", pid=7)


def _message_container(**cpu: Any) -> pb.Container:
    resources = pb.LinuxResources(cpu=pb.LinuxCPU(**cpu))
    return pb.Container(
        id="c1", pod_sandbox_id="p1", name="app", linux=pb.LinuxContainer(resources=resources)
    )


@pytest.mark.parametrize("kind", nri.OBSERVED)
def test_both_styles_are_one(kind: EventKind) -> None:
    """One method for an event (NRI 0.12) and StateChange with its number mean the same."""
    pod, container = _message_pod(), None if kind.of_pod else _message_container(cpus="2-3")
    request = pb.EventRequest(pod=pod, container=container)
    change = pb.StateChangeEvent(event=int(kind), pod=pod, container=container)
    event = nri.parse_event(kind.method, request.SerializeToString())
    assert event == nri.parse_event("StateChange", change.SerializeToString())
    assert event is not None
    assert event.kind is kind
    assert (event.pod.id, event.pod.handler, event.pod.pid) == ("p1", "kata", 7)
    assert (event.container is None) is kind.of_pod


@pytest.mark.parametrize("method", ["CreateContainer", "ValidateContainerAdjustment", "Nonsense"])
def test_other_methods_are_no_events(method: str) -> None:
    """What was not asked for is not read at all."""
    assert nri.parse_event(method, b"\xff\xff") is None


@pytest.mark.parametrize("number", [0, 4, 5, 8, 12, 13, 14, 99, -1])
def test_other_state_changes_are_no_events(number: int) -> None:
    """Numbers that were not asked for, or of a later version, mean nothing."""
    change = pb.StateChangeEvent(event=number, pod=_message_pod())
    assert nri.parse_event("StateChange", change.SerializeToString()) is None


def test_devices_of_a_container() -> None:
    """Its own ones; a privileged container has all of the host's, and none is its own."""
    message = _message_container()
    for kind in ("c", "b", "p"):
        message.linux.devices.add(path=f"/dev/{kind}", type=kind, major=8, minor=1)
    message.linux.devices.add(path="/dev/wild", type="c", major=-1)
    found = nri.container_of(message)
    assert found.devices == (DeviceNode("/dev/c", "c", 8, 1), DeviceNode("/dev/b", "b", 8, 1))
    for number in range(nri.MAX_DEVICES):
        message.linux.devices.add(path=f"/dev/{number}", type="c", major=9, minor=number)
    assert nri.container_of(message).devices == ()


def test_numbers_beyond_the_database() -> None:
    """NRI's numbers are kept as far as SQLite goes."""
    number, least = pb.OptionalUInt64(value=(1 << 64) - 1), pb.OptionalInt64(value=-(1 << 63))
    container = _message_container(cpus="1", shares=number, period=number, quota=least)
    request = pb.EventRequest(pod=_message_pod(), container=container)
    event = nri.parse_event("StartContainer", request.SerializeToString())
    assert event is not None
    assert event.container is not None
    most = (1 << 63) - 1
    assert event.container.cpu == CpuResources("1", quota_us=-most, period_us=most, shares=most)


def test_what_an_allocator_is_asked() -> None:
    """CreateContainer has the pod's annotations, UpdateContainer what is to be set beside it."""
    pod = _message_pod()
    pod.annotations.update({"qos.gocrane.io/cpu-manager": "share", "long": "x" * 254})
    container = _message_container(cpus="2-3")
    request = pb.EventRequest(pod=pod, container=container)
    event = nri.parse_event("CreateContainer", request.SerializeToString(), tuple(EventKind))
    assert event is not None
    assert event.container is not None
    assert event.pod.annotations == {"qos.gocrane.io/cpu-manager": "share"}
    assert event.asked == CpuResources()
    update = pb.UpdateContainerRequest(
        pod=pod,
        container=container,
        linux_resources=pb.LinuxResources(cpu=pb.LinuxCPU(quota=pb.OptionalInt64(value=7))),
    )
    event = nri.parse_event("UpdateContainer", update.SerializeToString(), tuple(EventKind))
    assert event is not None
    assert event.container is not None
    assert (event.container.cpu.cpus, event.asked) == ("2-3", CpuResources(quota_us=7))
    assert replies.configure_reply(EventKind) == b"\x10\xff\x0f"


def test_the_version_of_nri() -> None:
    """NRI reports its own version from 0.12 on."""
    message = pb.ConfigureRequest(runtime_name="containerd", NRI_version="v0.12.1")
    assert nri.parse_configure(message.SerializeToString()).nri == "v0.12.1"
    assert nri.parse_configure(b"").nri == ""


def test_absent_and_zero_differ() -> None:
    """A quota that is set to 0 is not one that is absent (OptionalInt64)."""
    request = pb.EventRequest(
        pod=_message_pod(), container=_message_container(quota=pb.OptionalInt64(), cpus="1")
    )
    event = nri.parse_event("StartContainer", request.SerializeToString())
    assert event is not None
    assert event.container is not None
    assert event.container.cpu == CpuResources(cpus="1", quota_us=0)


@pytest.mark.parametrize(
    "pod",
    [
        pb.PodSandbox(),
        pb.PodSandbox(id="../p1"),
        pb.PodSandbox(id="p" * 200),
        pb.PodSandbox(id="p1", linux=pb.LinuxPodSandbox(cgroups_path="/x" * 3000)),
    ],
)
def test_impossible_pods(pod: pb.PodSandbox) -> None:
    """An id that is no id, or a path that is too long, is refused."""
    with pytest.raises(ParseError, match="NRI"):
        nri.parse_event("RunPodSandbox", pb.EventRequest(pod=pod).SerializeToString())


def test_a_container_of_another_pod() -> None:
    """An event whose parts do not belong together is refused."""
    container = _message_container()
    container.pod_sandbox_id = "p2"
    request = pb.EventRequest(pod=_message_pod(), container=container)
    with pytest.raises(ParseError, match="another pod"):
        nri.parse_event("StartContainer", request.SerializeToString())


@pytest.mark.parametrize(("told", "seconds"), [(0, 2.0), (-5, 2.0), (500, 0.5), (1 << 62, 2.0)])
def test_timeouts(told: int, seconds: float) -> None:
    """The runtime's timeout is used within bounds; old runtimes do not send it."""
    message = pb.ConfigureRequest(runtime_name="cri-o", request_timeout=told)
    assert nri.parse_configure(message.SerializeToString()).request_s == seconds


def test_a_wild_pid_is_none() -> None:
    """A pid beyond Linux' largest is as good as none."""
    pod = pb.PodSandbox(id="p1", pid=0xFFFFFFFF)
    event = nri.parse_event("RunPodSandbox", pb.EventRequest(pod=pod).SerializeToString())
    assert event is not None
    assert event.pod.pid == 0


@pytest.mark.parametrize("field", ["name", "namespace", "uid", "runtime_handler"])
def test_a_long_name_is_refused(field: str) -> None:
    """Kubernetes has no longer ones, and each is kept."""
    for size in (253, 254):
        pod = pb.PodSandbox(id="p1", **{field: "x" * size})  # type: ignore[arg-type]
        request = pb.EventRequest(pod=pod).SerializeToString()
        if size == 253:
            assert nri.parse_event("RunPodSandbox", request) is not None
        else:
            with pytest.raises(ParseError, match="longer than 253"):
                nri.parse_event("RunPodSandbox", request)


def test_a_long_cpu_list_stays_unreadable() -> None:
    """It is cut, but never to a list that means other CPUs."""
    request = pb.EventRequest(pod=_message_pod(), container=_message_container(cpus="1," * 99_999))
    event = nri.parse_event("StartContainer", request.SerializeToString())
    assert event is not None
    assert event.container is not None
    assert len(event.container.cpu.cpus) == MAX_TEXT + 1


def test_a_cpuset_that_cannot_be_read_is_a_note() -> None:
    """The container is recorded without a cpuset, and the note says why."""
    request = pb.EventRequest(pod=_message_pod(), container=_message_container(cpus="0-99999999"))
    event = nri.parse_event("StartContainer", request.SerializeToString())
    assert event is not None
    assert event.container is not None
    record = nri.container_record(
        event.pod, event.container, ContainerState.CREATED, stamp_ns=1, source="nri:x"
    )
    assert record.cpus is None
    assert "cpu.cpus" in record.note
