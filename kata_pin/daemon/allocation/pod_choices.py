"""What administrators and pods choose after a pod's creation: overrides, and current annotations.

Lifetime: the daemon's. Out of scope: reading them (sources), and what follows from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kata_pin.model.alloc import ContainerRequest, PodRequest
from kata_pin.model.settings import CpuClass

Annotations = Mapping[str, Mapping[str, str]]
"""The annotations of pods, by uid."""


@dataclass(slots=True)
class PodChoices:
    """The newest choices; `orders` are by `namespace/name` or sandbox id."""

    orders: Mapping[str, CpuClass] = field(default_factory=dict)
    annotations: Annotations = field(default_factory=dict)

    def ordered(self, namespace: str, name: str, sandbox_id: str) -> CpuClass | None:
        """Return the administrator's override for a pod."""
        by_name = self.orders.get(f"{namespace}/{name}") if name else None
        return by_name or self.orders.get(sandbox_id)

    def newest(
        self, request: ContainerRequest, sandbox_id: str, known: PodRequest | None
    ) -> ContainerRequest:
        """Return a request with its pod's override and annotations of now.

        A runtime always reports the annotations of the pod's creation, and records have none: those
        of `known`, the pod in the container's grant, are newer.
        """
        pod = request.pod
        last = known.annotations if known is not None and known.annotations else pod.annotations
        annotations = self.annotations.get(pod.pod_uid, last)
        ordered = self.ordered(pod.namespace, pod.name, sandbox_id)
        return replace(request, pod=replace(pod, annotations=annotations, ordered=ordered))
