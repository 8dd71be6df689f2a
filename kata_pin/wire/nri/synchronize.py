"""NRI's Synchronize: all pods and containers of now, in one message or in parts.

A decoded pod or container takes fifty times the room of the two bytes that it may have on the wire,
and what is kept of the parts adds up, so both are bounded: the fields of a part are counted before
it is decoded, and the parts together have as many pods, containers and characters as a node may
have. Source: github.com/containerd/nri, pkg/adaptation/plugin.go, synchronize.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from itertools import islice
from typing import Final, TypeVar

from kata_pin.errors import ParseError
from kata_pin.wire import proto
from kata_pin.wire.nri.messages import (
    MAX_CONTAINERS,
    MAX_PODS,
    Pod,
    PodContainer,
    Snapshot,
    container_of,
    pod_of,
)
from kata_pin.wire.ttrpc import parsed

MAX_PARTS: Final = 256
"""Most messages of one Synchronize."""

MAX_BYTES: Final = 128 * 1024 * 1024
"""Most bytes of all parts: 4,096 pods with 32 KiB each."""

MAX_CHARACTERS: Final = 8 * 1024 * 1024
"""Most characters of names, ids, paths and cpusets that are kept: 500 in each container."""

MAX_FIELDS: Final = 50_000
"""Most fields of one part and of the pods in it; each annotation is one."""

_SOURCE: Final = "NRI Synchronize"
_PODS: Final = 1
_CONTAINERS: Final = 2

Kept = TypeVar("Kept", Pod, PodContainer)


class SnapshotParts:
    """Collects the parts of one Synchronize."""

    def __init__(self) -> None:
        self._pods: list[Pod] = []
        self._containers: list[PodContainer] = []
        self._parts = self._bytes = self._characters = 0

    def __bool__(self) -> bool:
        return self._parts > 0

    def feed(self, data: bytes) -> Snapshot | None:
        """Take one part; return the snapshot after the last one, None if more follow.

        Raises ParseError for what is no SynchronizeRequest, and for more than a node may have.
        """
        self._parts += 1
        self._bytes += len(data)
        if self._parts > MAX_PARTS:
            raise ParseError(f"more than {MAX_PARTS} parts", source=_SOURCE)
        if self._bytes > MAX_BYTES:
            raise ParseError(f"more than {MAX_BYTES} bytes", source=_SOURCE)
        self._check_counts(data)
        message = parsed(proto.nri_pb2.SynchronizeRequest(), data, _SOURCE)
        for pod in message.pods:
            self._pods.append(self._kept(pod_of(pod)))
        for container in message.containers:
            self._containers.append(self._kept(container_of(container)))
        return None if message.more else Snapshot(tuple(self._pods), tuple(self._containers))

    def _check_counts(self, data: bytes) -> None:
        """Count what a part holds without decoding it."""
        pods, containers, counted = len(self._pods), len(self._containers), 0
        for number, body in _fields(memoryview(data)):
            pods += number == _PODS
            containers += number == _CONTAINERS
            counted += 1
            if number == _PODS:
                counted += sum(1 for _ in islice(_fields(body), MAX_FIELDS))
            if pods > MAX_PODS or containers > MAX_CONTAINERS:
                text = f"more than {MAX_PODS} pods or {MAX_CONTAINERS} containers are too many"
                raise ParseError(text, source=_SOURCE)
            if counted > MAX_FIELDS:
                raise ParseError(f"more than {MAX_FIELDS} fields in one part", source=_SOURCE)

    def _kept(self, one: Kept) -> Kept:
        """Return what is kept of a part, after counting its characters."""
        texts = (getattr(one, entry.name) for entry in fields(one))
        self._characters += sum(len(text) for text in texts if isinstance(text, str))
        self._characters += len(one.cpu.cpus) + len(one.cpu.mems)
        if self._characters > MAX_CHARACTERS:
            raise ParseError(f"names of more than {MAX_CHARACTERS} characters", source=_SOURCE)
        return one


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the number and the bytes of each field of a message; raises ParseError."""
    at, end = 0, len(data)
    while at < end:
        tag, at = _varint(data, at)
        size = 0
        match tag & 7:
            case 0:
                _, after = _varint(data, at)
                size = after - at
            case 1:
                size = 8
            case 2:
                size, at = _varint(data, at)
            case 5:
                size = 4
            case _:  # the groups of proto2
                raise ParseError("not a message of proto3", source=_SOURCE)
        if at + size > end:
            raise ParseError("cut short", source=_SOURCE)
        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return a number of variable length and where it ends."""
    value = shift = 0
    for byte in data[at : at + 10]:
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise ParseError("cut short", source=_SOURCE)
