"""The allocator's state as a JSON document, for the registry (D15).

The members are the fields of the values in model.alloc, pods inside their grants, CPU sets in
Linux's list format. Renaming a field there changes the document: raise VERSION then. A document of
another version, a damaged one or one that contradicts itself is a ParseError, and the daemon
rebuilds the state from what runs. Codec only: no files, no clocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Final

import msgspec

from kata_pin.errors import ParseError
from kata_pin.model.alloc import AllocState, Grant
from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.wire.json_text import load_fields

VERSION: Final = 2
MAX_BYTES: Final = 64 * 1024 * 1024
MAX_VALUES: Final = 4_000_000
MAX_GRANTS: Final = 65_536
"""Twice the containers that a node is believed to have: each pod can have a VM too."""

MAX_MILLIS: Final = 8192 * 1000

_SOURCE: Final = "allocator state"
_MAX_US: Final = (1 << 63) - 1


class _Document(msgspec.Struct, frozen=True):
    """The document's members, in their order."""

    version: int
    cpus: CpuSet
    reserved: CpuSet
    housekeeping: CpuSet
    grants: tuple[Grant, ...]


def dump_state(state: AllocState) -> bytes:
    """Return the document of a state; equal states give equal bytes."""
    grants = tuple(state.grants.values())
    document = _Document(VERSION, state.cpus, state.reserved, state.housekeeping, grants)
    listed = cache(str)  # most grants have the same few sets, those of the pools
    return msgspec.json.encode(document, enc_hook=listed, order="deterministic")


def parse_state(data: bytes) -> AllocState:
    """Return the state of a document; ParseError names the member that cannot be ours.

    No CPU may be exclusive twice, exclusive CPUs must be among `cpus`, and a container has one
    grant.
    """
    fields = load_fields(data, source=_SOURCE, limit=MAX_BYTES, values=MAX_VALUES)
    if fields.need("version").number("version", 0, 1 << 31) != VERSION:
        raise fields.fail("version", f"not {VERSION}")
    try:
        document = msgspec.json.decode(data, type=_Document, dec_hook=_cpus)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        raise fields.fail(path.rstrip("`"), message) from error
    except ValueError as error:  # half of a surrogate pair
        raise ParseError(str(error), source=_SOURCE) from error
    if len(document.grants) > MAX_GRANTS:
        raise fields.fail("grants", f"more than {MAX_GRANTS} entries")
    grants: dict[str, Grant] = {}
    taken = EMPTY
    for number, grant in enumerate(document.grants):
        if grant.container_id in grants:
            raise fields.fail(f"grants[{number}]", "container_id has a grant already")
        for wrong in _contradictions(grant, document.cpus - taken):
            raise fields.fail(f"grants[{number}]", wrong)
        taken |= grant.exclusive
        grants[grant.container_id] = grant
    return AllocState(document.cpus, document.reserved, document.housekeeping, grants)


def _contradictions(grant: Grant, free: CpuSet) -> Iterator[str]:
    """Yield what is wrong with a grant; `free` are the CPUs that it may have exclusively."""
    request = grant.request
    if not request.container_id:
        yield "container_id is empty"
    if not grant.exclusive <= free:
        yield f"exclusive CPUs {grant.exclusive} are not free"
    for name, number, low, high in (
        ("cpu_millis", request.cpu_millis, 0, MAX_MILLIS),
        ("overhead_millis", request.pod.overhead_millis, 0, MAX_MILLIS),
        ("quota_us", request.quota_us or 0, -_MAX_US, _MAX_US),
        ("period_us", request.period_us, 0, _MAX_US),
    ):
        if not low <= number <= high:
            yield f"{name} is not within {low} to {high}"


def _cpus(_: type, text: object) -> CpuSet:
    """Read a CPU set for msgspec, which adds the path to the error."""
    if not isinstance(text, str):
        raise TypeError("not a CPU list")
    try:
        return CpuSet.parse(text)
    except ParseError as error:
        raise ValueError(error.message) from error
