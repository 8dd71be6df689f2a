"""What a decision may carry beside CPUs and memory nodes (NRI resource policies, containerd/nri#3).

Limits can be changed while a container runs; the rest only when it is created, because runtimes
apply nothing else later. Frozen values. What is permitted: policy/alloc/adjustments.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_DEFAULT_SHARES: Final = 1024
_DEFAULT_PERIOD_US: Final = 100_000
"""What a cgroup has that nobody set (sched-bwc.rst)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """CFS values and the memory limit; None leaves a value as it is.

    `shares`, `quota_us` and `period_us` are those of the OCI runtime spec; a quota of -1 is none.
    `memory` is in bytes.
    """

    shares: int | None = None
    quota_us: int | None = None
    period_us: int | None = None
    memory: int | None = None

    def __bool__(self) -> bool:
        return self != NO_LIMITS

    def over(self, before: Limits) -> Limits:
        """Return the limits of a container after these were set: what is None stays."""
        return Limits(
            before.shares if self.shares is None else self.shares,
            before.quota_us if self.quota_us is None else self.quota_us,
            before.period_us if self.period_us is None else self.period_us,
            before.memory if self.memory is None else self.memory,
        )

    def where_set(self, ours: Limits) -> Limits:
        """Return these limits where others are set; a limit that a container lacks is lifted."""
        return Limits(
            None if ours.shares is None else self.shares or _DEFAULT_SHARES,
            None if ours.quota_us is None else self.quota_us or -1,
            None if ours.period_us is None else self.period_us or _DEFAULT_PERIOD_US,
            None if ours.memory is None else self.memory or -1,
        )

    def but(self, ours: Limits, before: Limits) -> Limits:
        """Return these limits, but those of `before` where they are the same as ours."""

        def one(now: int | None, set_by_us: int | None, first: int | None) -> int | None:
            return first if set_by_us is not None and now == set_by_us else now

        return Limits(
            one(self.shares, ours.shares, before.shares),
            one(self.quota_us, ours.quota_us, before.quota_us),
            one(self.period_us, ours.period_us, before.period_us),
            one(self.memory, ours.memory, before.memory),
        )


@dataclass(frozen=True, slots=True)
class Mount:
    """A read-only bind mount; both paths are absolute."""

    destination: str
    source: str


@dataclass(frozen=True, slots=True)
class AtCreation:
    """What only a container that is being created can get.

    `hugepages` are limits in bytes by page size (`2MB`). An empty class leaves the runtime's own.
    `env` holds names and values, which replace those of the container.
    """

    hugepages: tuple[tuple[str, int], ...] = ()
    rdt_class: str = ""
    blockio_class: str = ""
    env: tuple[tuple[str, str], ...] = ()
    mounts: tuple[Mount, ...] = ()

    def __bool__(self) -> bool:
        return self != NOTHING_MORE


NO_LIMITS: Final = Limits()
NOTHING_MORE: Final = AtCreation()
