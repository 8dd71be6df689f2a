"""Asking the kubelet over its root-owned sockets: its pods, and the exclusive CPUs that it granted.

The Pods API has running pods with their present annotations, without a token and without TLS; the
pod-resources API says which CPUs the CPU manager granted, and which it may grant.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Final

from kata_pin.calls import DIRECT, Calls
from kata_pin.errors import StateError
from kata_pin.sources.grpc_socket import CallRefused, GrpcSocket, SocketUnusable
from kata_pin.sources.pod_list import Specs
from kata_pin.wire.kube.kubelet_api import (
    ALLOCATABLE,
    LIST_PODS,
    LIST_RESOURCES,
    PodResources,
    parse_listed_pods,
    parse_pod_resources,
)

log = logging.getLogger(__name__)

DEADLINE_S: Final = 5.0

_HINTS: Final = {
    "UNIMPLEMENTED": "the Pods API is there from Kubernetes 1.37 on",
    "FAILED_PRECONDITION": "the kubelet is starting",
    "DEADLINE_EXCEEDED": f"no answer within {DEADLINE_S:g} s",
}


@dataclass(frozen=True)
class PodsApi:
    """The kubelet's Pods API at a socket."""

    path: str
    calls: Calls = DIRECT

    async def read(self) -> Specs:
        """Return what is listed of each pod by uid; raises StateError with the reason."""
        data = await _asked(self.path, LIST_PODS, self.calls)
        pods = await asyncio.to_thread(parse_listed_pods, data)
        for problem in pods.problems:
            log.debug("%s: pod skipped: %s", self.path, problem)
        return pods.specs


async def read_pod_resources(path: str, calls: Calls = DIRECT) -> PodResources:
    """Return the exclusive CPUs that a kubelet lists; raises StateError, ParseError."""
    listed = await _asked(path, LIST_RESOURCES, calls)
    return parse_pod_resources(listed, await _asked(path, ALLOCATABLE, calls))


async def _asked(path: str, name: str, calls: Calls) -> bytes:
    try:
        return await GrpcSocket(path, DEADLINE_S, calls).call(name, b"")
    except SocketUnusable as error:
        raise StateError(error.message) from error
    except CallRefused as error:
        hint = _HINTS.get(error.code, "")
        raise StateError(
            f"{path}: the kubelet refused {name}: {error.message}", hint=hint
        ) from error
