"""Why an allocation failed, by the kinds that the kubelet distinguishes.

Out of scope: settings that contradict each other; those are ConfigError, at start.
"""

from __future__ import annotations

from enum import StrEnum

from kata_pin.errors import KataPinError


class AllocFailure(StrEnum):
    """The kubelet's kinds of failure, and SHARED_MINIMUM, which is ours."""

    NOT_ENOUGH_CPUS = "not-enough-cpus"
    FAILED = "failed-to-allocate"
    SMT_ALIGNMENT = "smt-alignment"
    TOPOLOGY_AFFINITY = "topology-affinity"
    INVALID_STATE = "invalid-state"
    SHARED_MINIMUM = "shared-minimum"


class AllocError(KataPinError):
    """CPUs could not be given, and nothing was recorded; `failure` is the kind."""

    def __init__(self, failure: AllocFailure, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.failure = failure


def not_enough(requested: int, available: int) -> AllocError:
    """Return the error for a request above what is available (both in CPUs)."""
    return AllocError(
        AllocFailure.NOT_ENOUGH_CPUS,
        f"not enough CPUs available to satisfy request: requested={requested}, "
        f"available={available}",
    )
