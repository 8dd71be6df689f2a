"""Whether the kubelet or another plugin decides cpusets, so that kata-pin stands aside (D14)."""

from __future__ import annotations

from kata_pin.model.alloc import Refusal, RefusalKind
from kata_pin.model.node import KubeletState


def other_owner(kubelet: KubeletState | None, plugins: tuple[str, ...] = ()) -> Refusal | None:
    """Return why our allocator decides nothing on this node, None if it decides.

    `plugins` are other NRI plugins that set cpusets: if two set the same container's CPUs, its
    creation fails. Policy.decline takes the result.
    """
    if kubelet is not None and kubelet.static:
        return Refusal(
            RefusalKind.KUBELET_STATIC,
            "the kubelet's CPU manager policy is static: it decides the cpusets of this node",
        )
    if plugins:
        return Refusal(
            RefusalKind.FOREIGN_PLUGIN,
            f"another NRI plugin decides the cpusets of this node: {', '.join(plugins)}",
        )
    return None
