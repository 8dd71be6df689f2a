"""Pods and containers as our allocator is asked about them, for tests."""

from __future__ import annotations

from collections.abc import Mapping

from kata_pin.base.allocation import ContainerRequest, PodRequest, Qos
from kata_pin.base.values import CpuClass

NAMESPACE = "shop"


def pod(
    uid: str = "pod",
    *,
    annotations: Mapping[str, str] | None = None,
    qos: Qos = Qos.GUARANTEED,
    kata: bool = True,
    namespace: str = NAMESPACE,
    handler: str = "kata",
    overhead_millis: int = 0,
    ordered: CpuClass | None = None,
) -> PodRequest:
    """Return a pod; its VM is called `vm-UID`."""
    return PodRequest(
        pod_uid=uid,
        namespace=namespace,
        name=uid,
        handler=handler,
        annotations=annotations or {},
        qos=qos,
        kata=kata,
        sandbox_id=f"vm-{uid}" if kata else "",
        overhead_millis=overhead_millis,
        ordered=ordered,
    )


def container(
    millis: int,
    of: PodRequest | None = None,
    name: str = "app",
    *,
    limit: int | None = None,
    init: bool = False,
) -> ContainerRequest:
    """Return a container called `POD-NAME` whose limit is its request unless told (0: none)."""
    owner = of or pod()
    bound = millis if limit is None else limit
    return ContainerRequest(
        container_id=f"{owner.pod_uid}-{name}",
        pod=owner,
        name=name,
        cpu_millis=millis,
        quota_us=bound * 100 if bound else None,
        init=init,
    )
