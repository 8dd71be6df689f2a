"""Checks of what QEMU answers over QMP (qemu-qmp-ref(7)).

QEMU runs the tenant's devices, so an answer is a hint: shape and bounds are checked here, and
whether a thread id is QEMU's own is checked against /proc by the caller (D5). Any violation makes
the whole answer worthless: RemoteProtocolError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from kata_pin.errors import RemoteProtocolError
from kata_pin.wire.oci import MAX_PID
from kata_pin.wire.qemu.smp import MAX_VCPUS

MAX_IOTHREADS: Final = 1024

_Tid = Annotated[int, msgspec.Meta(ge=1, le=MAX_PID)]


class QmpCpu(msgspec.Struct, frozen=True):
    """One entry of query-cpus-fast: `index` is the cpu-index, `thread_id` the host tid."""

    index: Annotated[int, msgspec.Meta(ge=0, lt=MAX_VCPUS)] = msgspec.field(name="cpu-index")
    thread_id: _Tid = msgspec.field(name="thread-id")


class QmpIothread(msgspec.Struct, frozen=True):
    """One entry of query-iothreads."""

    id: Annotated[str, msgspec.Meta(max_length=256)]
    thread_id: _Tid = msgspec.field(name="thread-id")


_Cpus = Annotated[tuple[QmpCpu, ...], msgspec.Meta(max_length=MAX_VCPUS)]
_Iothreads = Annotated[tuple[QmpIothread, ...], msgspec.Meta(max_length=MAX_IOTHREADS)]


class QmpAnswers(msgspec.Struct, frozen=True):
    """All that one session asked."""

    cpus: _Cpus = msgspec.field(name="query-cpus-fast", default=())
    iothreads: _Iothreads = msgspec.field(name="query-iothreads", default=())


def check_answers(cpus: object, iothreads: object) -> QmpAnswers:
    """Check both replies (the values of `return`): every index, id and thread id is there once.

    Raises RemoteProtocolError, also for a key with a lone surrogate, which JSON lets through.
    """
    replies = {"query-cpus-fast": cpus, "query-iothreads": iothreads}
    try:
        answers = msgspec.convert(replies, QmpAnswers)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise RemoteProtocolError(f"QMP answers: {error}") from error
    tids = [cpu.thread_id for cpu in answers.cpus] + [io.thread_id for io in answers.iothreads]
    _check_unique("cpu-index", [cpu.index for cpu in answers.cpus])
    _check_unique("iothread id", [iothread.id for iothread in answers.iothreads])
    _check_unique("thread-id", tids)
    return answers


def _check_unique(what: str, values: Sequence[int | str]) -> None:
    if len(set(values)) != len(values):
        raise RemoteProtocolError(f"QMP answers: the same {what} appears twice")
