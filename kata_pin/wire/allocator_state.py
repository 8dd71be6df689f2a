"""Our allocator's state as a JSON document, for the registry (DESIGN D15).

Written and read by this program, on the same node; read with the same care as anything else, for a
file can be damaged. A document of another version, or one that contradicts itself, is a ParseError:
the state is rebuilt from what runs. Codec only: no files, no clocks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache
from typing import Final, TypeVar

from kata_pin.errors import ParseError
from kata_pin.model.alloc import (
    AllocState,
    ContainerRequest,
    CpuClass,
    Grant,
    GrantKind,
    PodRequest,
    Qos,
)
from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.wire.json_text import Fields, load
from kata_pin.wire.oci import MAX_KEPT

VERSION: Final = 1

MAX_BYTES: Final = 32 * 1024 * 1024
MAX_VALUES: Final = 2_000_000
MAX_GRANTS: Final = 65_536
"""Twice the containers that a node is believed to have: each pod can have a VM too."""

MAX_MILLIS: Final = 8192 * 1000

_SOURCE: Final = "allocator state"

E = TypeVar("E", bound=StrEnum)


def dump_state(state: AllocState) -> bytes:
    """Return the document of a state; equal states give equal bytes."""
    numbers: dict[PodRequest, int] = {}
    for grant in state.grants.values():
        numbers.setdefault(grant.request.pod, len(numbers))
    listed = cache(str)  # most grants have the same few sets: those of the pools
    document = {
        "version": VERSION,
        "cpus": str(state.cpus),
        "reserved": str(state.reserved),
        "housekeeping": str(state.housekeeping),
        "pods": [_dump_pod(pod) for pod in numbers],
        "grants": [
            _dump_grant(grant, numbers[grant.request.pod], listed)
            for grant in state.grants.values()
        ],
    }
    return json.dumps(document, separators=(",", ":")).encode("ascii")


def parse_state(data: bytes) -> AllocState:
    """Return the state of a document; ParseError when it can not be one of ours.

    No CPU may be exclusive twice, exclusive CPUs have to be among those given out, and a container
    has one grant.
    """
    value = load(data, source=_SOURCE, limit=MAX_BYTES, values=MAX_VALUES)
    fields = Fields(value, source=_SOURCE).need("version")
    if fields.number("version", 0, 1 << 31) != VERSION:
        raise fields.fail("version", f"not {VERSION}")
    pods = [_parse_pod(one) for one in fields.objects("pods", limit=MAX_GRANTS)]
    state = AllocState(_cpus(fields, "cpus"), _cpus(fields, "reserved"))
    grants: dict[str, Grant] = {}
    exclusive = EMPTY
    for one in fields.objects("grants", limit=MAX_GRANTS):
        grant = _parse_grant(one, pods)
        if grant.container_id in grants:
            raise one.fail("container_id", "has a grant already", grant.container_id)
        if not grant.exclusive <= state.cpus - exclusive:
            raise one.fail("exclusive", "not free", str(grant.exclusive))
        exclusive |= grant.exclusive
        grants[grant.container_id] = grant
    return AllocState(state.cpus, state.reserved, _cpus(fields, "housekeeping"), grants)


def _dump_pod(pod: PodRequest) -> Mapping[str, object]:
    return {
        "uid": pod.pod_uid,
        "namespace": pod.namespace,
        "name": pod.name,
        "handler": pod.handler,
        "annotations": dict(sorted(pod.annotations.items())),
        "qos": pod.qos.value,
        "kata": pod.kata,
        "sandbox_id": pod.sandbox_id,
        "overhead_millis": pod.overhead_millis,
        "ordered": None if pod.ordered is None else pod.ordered.value,
    }


def _parse_pod(fields: Fields) -> PodRequest:
    ordered = fields.text("ordered")
    return PodRequest(
        pod_uid=fields.text("uid"),
        namespace=fields.text("namespace"),
        name=fields.text("name"),
        handler=fields.text("handler"),
        annotations=fields.texts("annotations"),
        qos=_word(fields, "qos", Qos),
        kata=fields.flag("kata"),
        sandbox_id=fields.text("sandbox_id"),
        overhead_millis=fields.number("overhead_millis", 0, MAX_MILLIS) or 0,
        ordered=_word(fields, "ordered", CpuClass) if ordered else None,
    )


def _dump_grant(grant: Grant, pod: int, listed: Callable[[CpuSet], str]) -> Mapping[str, object]:
    request = grant.request
    return {
        "container_id": request.container_id,
        "pod": pod,
        "name": request.name,
        "cpu_millis": request.cpu_millis,
        "quota_us": request.quota_us,
        "period_us": request.period_us,
        "init": request.init,
        "policy": grant.policy,
        "class": grant.cpu_class.value,
        "exclusive": listed(grant.exclusive),
        "shared": None if grant.shared is None else listed(grant.shared),
        "zone": listed(grant.zone),
        "mems": listed(grant.mems),
        "kind": grant.kind.value,
        "reasons": list(grant.reasons),
    }


def _parse_grant(fields: Fields, pods: list[PodRequest]) -> Grant:
    fields.need("container_id", "pod", "period_us")
    pod = fields.number("pod", 0, len(pods) - 1)
    request = ContainerRequest(
        container_id=fields.text("container_id"),
        pod=pods[pod or 0],
        name=fields.text("name"),
        cpu_millis=fields.number("cpu_millis", 0, MAX_MILLIS) or 0,
        quota_us=fields.number("quota_us", -MAX_KEPT, MAX_KEPT),
        period_us=fields.number("period_us", 0, MAX_KEPT) or 0,
        init=fields.flag("init"),
    )
    return Grant(
        request,
        policy=fields.text("policy"),
        cpu_class=_word(fields, "class", CpuClass),
        exclusive=_cpus(fields, "exclusive"),
        shared=None if fields.get("shared") is None else _cpus(fields, "shared"),
        zone=_cpus(fields, "zone"),
        mems=_cpus(fields, "mems"),
        kind=_word(fields, "kind", GrantKind),
        reasons=tuple(str(reason) for reason in fields.items("reasons", limit=64)),
    )


def _word(fields: Fields, key: str, words: type[E]) -> E:
    text = fields.text(key)
    try:
        return words(text)
    except ValueError:
        raise fields.fail(key, f"not one of {', '.join(words)}", text) from None


def _cpus(fields: Fields, key: str) -> CpuSet:
    try:
        return CpuSet.parse(fields.text(key, limit=1 << 16))
    except ParseError as error:
        raise fields.fail(key, error.message) from error
