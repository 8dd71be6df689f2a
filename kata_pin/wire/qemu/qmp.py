"""Checks of what QEMU answers over QMP (qemu-qmp-ref(7)).

QEMU runs the tenant's devices, so an answer is a hint: shape and bounds are checked here, and
whether a thread id is QEMU's own is checked against /proc by the caller (DESIGN D5). Any violation
makes the whole answer worthless: RemoteProtocolError.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kata_pin.errors import ParseError, RemoteProtocolError
from kata_pin.wire.json_text import Fields
from kata_pin.wire.oci import MAX_PID
from kata_pin.wire.qemu.smp import MAX_VCPUS

MAX_IOTHREADS: Final = 1024

_MAX_TOPOLOGY_ID: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class QmpPlace:
    """The `props` of a vCPU; None where QEMU does not say. `thread` is the SMT number, no tid."""

    socket: int | None = None
    die: int | None = None
    core: int | None = None
    thread: int | None = None
    node: int | None = None


@dataclass(frozen=True, slots=True)
class QmpCpu:
    """One entry of query-cpus-fast: `index` is the cpu-index, `thread_id` the host tid."""

    index: int
    thread_id: int
    qom_path: str = ""
    place: QmpPlace = QmpPlace()

    @property
    def hotplugged(self) -> bool:
        """Whether it was plugged with an id: boot vCPUs are unattached."""
        return self.qom_path.startswith("/machine/peripheral")


@dataclass(frozen=True, slots=True)
class QmpIothread:
    """One entry of query-iothreads."""

    id: str
    thread_id: int


@dataclass(frozen=True, slots=True)
class QmpSlot:
    """One entry of query-hotpluggable-cpus; `qom_path` is empty while nothing is plugged there."""

    place: QmpPlace
    qom_path: str = ""


@dataclass(frozen=True, slots=True)
class QmpAnswers:
    """All that one session asked."""

    cpus: tuple[QmpCpu, ...] = ()
    iothreads: tuple[QmpIothread, ...] = ()
    slots: tuple[QmpSlot, ...] = ()


def check_answers(cpus: object, iothreads: object, slots: object = None) -> QmpAnswers:
    """Check the three replies (the values of `return`) together; `slots` None when not asked.

    Thread ids are unique over vCPUs and iothreads.
    """
    answers = QmpAnswers(
        cpus=check_cpus(cpus),
        iothreads=check_iothreads(iothreads),
        slots=() if slots is None else check_slots(slots),
    )
    tids = [cpu.thread_id for cpu in answers.cpus] + [io.thread_id for io in answers.iothreads]
    _check_unique("a vCPU and an iothread", "thread-id", tids)
    return answers


def check_cpus(reply: object) -> tuple[QmpCpu, ...]:
    """Check query-cpus-fast: indexes unique and below MAX_VCPUS, thread ids unique."""
    command = "query-cpus-fast"
    cpus = tuple(_cpu(entry) for entry in _entries(reply, command, MAX_VCPUS))
    _check_unique(command, "cpu-index", [cpu.index for cpu in cpus])
    _check_unique(command, "thread-id", [cpu.thread_id for cpu in cpus])
    return cpus


def check_iothreads(reply: object) -> tuple[QmpIothread, ...]:
    """Check query-iothreads: ids and thread ids unique."""
    command = "query-iothreads"
    iothreads = tuple(_iothread(entry) for entry in _entries(reply, command, MAX_IOTHREADS))
    _check_unique(command, "id", [iothread.id for iothread in iothreads])
    _check_unique(command, "thread-id", [iothread.thread_id for iothread in iothreads])
    return iothreads


def check_slots(reply: object) -> tuple[QmpSlot, ...]:
    """Check query-hotpluggable-cpus; the order, which is the order of plugging, is kept."""
    entries = _entries(reply, "query-hotpluggable-cpus", MAX_VCPUS)
    return tuple(_slot(entry) for entry in entries)


def _entries(reply: object, command: str, limit: int) -> list[Fields]:
    try:
        return Fields({"return": reply}, source=command).objects("return", limit=limit)
    except ParseError as error:
        raise RemoteProtocolError(str(error)) from error


def _cpu(fields: Fields) -> QmpCpu:
    try:
        fields.need("cpu-index", "thread-id")
        return QmpCpu(
            index=fields.number("cpu-index", 0, MAX_VCPUS - 1) or 0,
            thread_id=fields.number("thread-id", 1, MAX_PID) or 0,
            qom_path=fields.text("qom-path"),
            place=_place(fields.fields("props")),
        )
    except ParseError as error:
        raise RemoteProtocolError(str(error)) from error


def _iothread(fields: Fields) -> QmpIothread:
    try:
        fields.need("id", "thread-id")
        return QmpIothread(
            id=fields.text("id", limit=256),
            thread_id=fields.number("thread-id", 1, MAX_PID) or 0,
        )
    except ParseError as error:
        raise RemoteProtocolError(str(error)) from error


def _slot(fields: Fields) -> QmpSlot:
    try:
        return QmpSlot(_place(fields.need("props").fields("props")), fields.text("qom-path"))
    except ParseError as error:
        raise RemoteProtocolError(str(error)) from error


def _place(props: Fields) -> QmpPlace:
    return QmpPlace(
        socket=props.number("socket-id", 0, _MAX_TOPOLOGY_ID),
        die=props.number("die-id", 0, _MAX_TOPOLOGY_ID),
        core=props.number("core-id", 0, _MAX_TOPOLOGY_ID),
        thread=props.number("thread-id", 0, _MAX_TOPOLOGY_ID),
        node=props.number("node-id", 0, _MAX_TOPOLOGY_ID),
    )


def _check_unique(command: str, key: str, values: list[int] | list[str]) -> None:
    if len(set(values)) != len(values):
        raise RemoteProtocolError(f"{command}: {key} appears twice")
