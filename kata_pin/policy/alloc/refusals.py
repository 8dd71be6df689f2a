"""When somebody else decides cpusets, and ours stands back (DESIGN D14). Pure."""

from __future__ import annotations

from kata_pin.model.alloc import Refusal, RefusalKind
from kata_pin.model.node import KubeletState


def other_owner(kubelet: KubeletState | None, plugins: tuple[str, ...] = ()) -> Refusal | None:
    """Return why our allocator decides nothing on this node, None if it may.

    `plugins` are other NRI plugins that own cpusets: two that set the same container's CPUs make
    its creation fail. Give the answer to Policy.decline for each container.
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
