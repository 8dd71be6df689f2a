"""Plain words for single facts: ages, owners of sandboxes, other writers, guests. Pure."""

from __future__ import annotations

from typing import Final, Protocol

from kata_pin.cli.reports import pcpus
from kata_pin.model.alloc import HolderSource
from kata_pin.model.count_noun import count
from kata_pin.model.node import DoubleAssignment
from kata_pin.model.reports.network import Interface
from kata_pin.model.reports.pools import Holder, Push
from kata_pin.model.reports.sandbox import Writer

OVER = frozenset({"stopped", "deleted"})
"""States of containers that have ended."""

DOUBLE_REMEDY: Final = (
    "delete one of the pods; kubelets do this on hosts with cores of different sizes "
    "(kata-pin's own allocator does not: docs/allocation.md)"
)
"""What to do about CPUs that the kubelet assigned twice."""

NOTHING: Final = "-"

IDLE_LIMITS: Final = {"0": "no limit", "n/a": "polling"}
"""Values of pm_qos_resume_latency_us that are no time."""

SHOWN: Final = 6
"""Threads that are named one by one."""

GUEST_STATES: Final = {
    "off": "not managed",
    "idle": "nothing to apply in the guest",
    "pending": "cpusets not applied in the guest yet",
    "applied": "cpusets applied in the guest",
    "denied": "denied by the guest's policy",
    "unreachable": "unreachable",
    "failed": "cpusets not in force in the guest",
}


class Named(Protocol):
    """What has a sandbox's id and pod."""

    @property
    def id(self) -> str:
        """Sandbox id."""

    @property
    def pod(self) -> str:
        """`namespace/name`, or the id."""


def safe(text: str) -> str:
    r"""Return the text with everything that is not printable shown as `\x1b` or `\u202e`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def age(seconds: float | None) -> str:
    """Return an age in one unit."""
    if seconds is None:
        return NOTHING
    for limit, divisor, unit in ((10, 1, "s"), (120, 1, "s"), (7200, 60, "m"), (172800, 3600, "h")):
        if seconds < limit:
            value = seconds / divisor
            return f"{value:.1f} {unit}" if limit == 10 else f"{value:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def way(push: Push) -> str:
    """Return how changed cpusets reach containers, and why not by a better channel."""
    reason = safe(push.reason)
    if not push.channel:
        return f"are sent at the runtime's next NRI call ({reason})"
    return f"are sent at once by {safe(push.channel).upper()}" + (f" ({reason})" if reason else "")


def holder_source(found: Holder) -> str:
    """Return how it is known that a container's pCPUs are exclusive."""
    known = {one.value: one.text for one in HolderSource}
    return known.get(found.source, safe(found.source))


def writer(found: Writer) -> str:
    """Return who else sets affinities, and how that is known."""
    if found.name == "kata":
        does = "pins the vCPUs" if found.active else "can pin the vCPUs but does not now"
        return f"Kata {does} ({found.evidence})"
    tids = ", ".join(str(tid) for tid in found.tids[:SHOWN])
    more = f" and {len(found.tids) - SHOWN} more" if len(found.tids) > SHOWN else ""
    left = "; backing off" if found.active else ""
    since = age(found.since_s)
    seen = count(found.count, "time")
    return f"another process changed affinities {seen} since {since} ago (tid {tids}{more}){left}"


def owner(sandbox: Named) -> str:
    """Return the name people know a sandbox by; the start of its id where no pod is known."""
    return sandbox.id[:12] if sandbox.pod == sandbox.id else sandbox.pod


def interface(found: Interface) -> str:
    """Return an interface in words, such as `tap0_kata (tap, 2 queues, peer eth0)`."""
    facts = [found.kind or "device", count(found.queues, "queue")]
    facts += [f"peer {found.peer}"] if found.peer else []
    return f"{found.name} ({', '.join(facts)}): {served_by(found) or 'not open'}"


def served_by(found: Interface) -> str:
    """Return which threads serve an interface; empty if the VMM does not have it open."""
    if not found.attached:
        return ""
    if not found.served_by:
        return "no vhost worker known"
    tids = ", ".join(str(worker.tid) for worker in found.served_by)
    inferred = any(worker.inferred for worker in found.served_by)
    return f"vhost {tids}" + (" (inferred)" if inferred else "")


def double_assignment(found: DoubleAssignment) -> str:
    """Return which CPUs the kubelet assigned twice, and to whom."""
    which = f"{pcpus.named(found.cpus)} {'is' if len(found.cpus) == 1 else 'are'}"
    owners = [f"pod {pod}" for pod in found.pods]
    if found.in_default:
        owners.append("the default set")
    return f"{which} assigned to {', '.join(owners[:-1])} and {owners[-1]}"
