"""Why an allocation failed, or why kata-pin allocates nothing on this node (D14).

Out of scope: settings that contradict each other; those are ConfigError, at start.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from kata_pin.errors import KataPinError
from kata_pin.model.alloc import Refusal, RefusalKind
from kata_pin.model.node import KubeletState


class AllocFailure(StrEnum):
    """The kubelet's kinds of failure, and SHARED_MINIMUM, which is ours."""

    NOT_ENOUGH_CPUS = "not-enough-cpus"
    FAILED = "failed-to-allocate"
    SMT_ALIGNMENT = "smt-alignment"
    TOPOLOGY_AFFINITY = "topology-affinity"
    INVALID_STATE = "invalid-state"
    SHARED_MINIMUM = "shared-minimum"


_REFUSALS: Final = {
    AllocFailure.SMT_ALIGNMENT: RefusalKind.ALIGNMENT,
    AllocFailure.TOPOLOGY_AFFINITY: RefusalKind.ALIGNMENT,
    AllocFailure.SHARED_MINIMUM: RefusalKind.SHARED_MINIMUM,
}


class AllocError(KataPinError):
    """CPUs could not be given, and nothing was recorded; `failure` is the kind."""

    def __init__(self, failure: AllocFailure, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.failure = failure

    def refusal(self, *, strict: bool) -> Refusal:
        """Return the refusal of the container that the CPUs were for."""
        kind = _REFUSALS.get(self.failure, RefusalKind.NOT_ENOUGH_CPUS)
        return Refusal(kind, self.message, strict)


def not_enough(requested: int, available: int) -> AllocError:
    """Return the error for a request above what is available (both in CPUs)."""
    return AllocError(
        AllocFailure.NOT_ENOUGH_CPUS,
        f"not enough CPUs available to satisfy request: requested={requested}, "
        f"available={available}",
    )


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
