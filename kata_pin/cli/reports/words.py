"""Plain words for single facts of a state document.

A command's choice of sandboxes, and remedies, are here too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from kata_pin.base.cpuset import pcpus_are
from kata_pin.base.errors import KataPinError
from kata_pin.base.values import HolderSource, Remedy, count, listed

if TYPE_CHECKING:
    from kata_pin.base.documents.answers import SandboxName
    from kata_pin.base.documents.pools import Holder, Push
    from kata_pin.base.documents.state import Guest, Interface, Sandbox, Writer
    from kata_pin.base.placement import DoubleAssignment


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


def changes(found: Writer) -> str:
    """Return what another process than Kata does to affinities."""
    left = "; backing off" if found.active else ""
    changed = count(found.count, "change")
    return f"the VMM or another process: {changed} ({_tids(found)}){left}"


def _tids(found: Writer) -> str:
    return f"tid {listed(found.tids, SHOWN)}"


def writer(found: Writer) -> str:
    """Return who else sets affinities, and how that is known."""
    if found.name == "kata":
        does = "pins the vCPUs" if found.active else "can pin the vCPUs but does not now"
        return f"Kata {does} ({found.evidence})"
    left = "; backing off" if found.active else ""
    seen = f"{count(found.count, 'time')} since {age(found.since_s)} ago"
    return f"the VMM or another process changed affinities {seen} ({_tids(found)}){left}"


def owner(sandbox: Named) -> str:
    """Return the name people know a sandbox by; the start of its id where no pod is known."""
    return sandbox.id[:12] if sandbox.pod == sandbox.id else sandbox.pod


def guest_cost(guest: Guest) -> str:
    """Return what it costs that cpusets are not applied in a guest; empty where they can be."""
    if guest.state not in {"unreachable", "denied"}:
        return ""
    own = [one for one in guest.containers if one.cpus is not None]
    if not own:
        return "host pinning is unaffected, and no container needs guest CPUs of its own"
    named = listed([f"{one.name} on {one.cpus}" for one in own], SHOWN)
    return (
        "host pinning is unaffected, but in the guest every process may use every vCPU, and so "
        f"every pCPU of the pod; expected guest CPUs: {named}"
    )


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
    owners = [f"pod {pod}" for pod in found.pods]
    if found.in_default:
        owners.append("the default set")
    return f"{pcpus_are(found.cpus)} assigned to {', '.join(owners[:-1])} and {owners[-1]}"


# Which sandboxes are meant: by an id or its start, a pod, a namespace, or by their problems.

SELECTION_SHOWN: Final = 5
"""Candidates named in an error."""

One = TypeVar("One", bound=Named)


def within(sandboxes: Iterable[One], namespace: str | None) -> list[One]:
    """Return the sandboxes whose pod is of a namespace; None: all."""
    return [one for one in sandboxes if namespace in {None, namespace_of(one)}]


def namespace_of(sandbox: Named) -> str | None:
    """Return the namespace of a sandbox's pod, None if its pod is unknown."""
    namespace, slash, _ = sandbox.pod.partition("/")
    return namespace if slash else None


def meant(every: Iterable[SandboxName], name: str | None, namespace: str | None) -> set[str] | None:
    """Return the ids of the sandboxes that a name and a namespace mean; None: all of them."""
    if name is None and namespace is None:
        return None
    inside = within(every, namespace)
    return {one.id for one in ([choose(inside, name)] if name else inside)}


def has_problem(sandbox: Sandbox) -> bool:
    """Return whether a sandbox needs attention.

    It is neither ok nor released on purpose, or it has a warning, or cpusets that were set in its
    guest are not in force.
    """
    if sandbox.state not in {"ok", "released"} or sandbox.vmm_problem:
        return True
    failed = sandbox.guest is not None and sandbox.guest.state == "failed"
    return failed or any(note.level == "warning" for note in sandbox.notes)


def choose(every: Sequence[SandboxName], text: str) -> SandboxName:
    """Return the one sandbox that `text` names: id, namespace/name, name, or start of an id.

    An exact match wins over a prefix. Raises KataPinError when there is none or more than one.
    """
    for matches in (
        [s for s in every if text in {s.id, s.pod}],
        [s for s in every if s.pod.partition("/")[2] == text],
        [s for s in every if text and s.id.startswith(text)],
    ):
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise KataPinError(
                f"{safe(text)!r} matches {len(matches)} sandboxes: {_named(matches)}",
                hint="give more of the id, or namespace/name",
            )
    from difflib import get_close_matches

    names = [name for s in every for name in (s.pod, s.pod.partition("/")[2], s.id)]
    near = get_close_matches(text, names, n=1)
    hint = f"did you mean {safe(near[0])}?" if near else "kata-pin show lists the sandboxes"
    raise KataPinError(f"no sandbox {safe(text)!r}", hint=hint)


def _named(sandboxes: list[SandboxName]) -> str:
    return listed([f"{safe(owner(s))} ({s.id[:12]})" for s in sandboxes], SELECTION_SHOWN)


# What helps against what `doctor` finds: on a node, and in a pod (base/values.py).

_NEW_POD: Final = "delete this pod: its DaemonSet starts another"
_CONFIG: Final = "correct the chart's value config, then helm upgrade"

START: Final = Remedy(
    "systemctl start kata-pin; if it stops again, journalctl -u kata-pin says why",
    "kubectl logs -c daemon of this pod says why",
)
STATUS: Final = Remedy("systemctl status kata-pin", "kubectl logs -c daemon of this pod says which")
RESTART: Final = Remedy("systemctl restart kata-pin", _NEW_POD)
OTHER_DAEMON: Final = Remedy(
    "stop all but one: systemctl status kata-pin",
    "stop all but one: on the node systemctl disable --now kata-pin",
)
RELOAD: Final = Remedy(
    "kata-pin config check; then systemctl reload kata-pin", _CONFIG, value="config"
)
NEW_CONFIG: Final = Remedy("kata-pin config check {file}", _CONFIG, value="config")
CAPABILITY: Final = Remedy("run as root", "give the container the capabilities that the chart has")
CGROUPS: Final = Remedy(
    "in a container: --pid host and --volume /sys/fs/cgroup:/sys/fs/cgroup:ro",
    "the pod needs hostPID, and the host's cgroups: see the chart's value paths.cgroup",
    value="paths.cgroup",
)
DEBUGFS: Final = Remedy(
    "mount -t debugfs none {mount}", "see the chart's value paths.debugfs", value="paths.debugfs"
)
ROLES: Final = Remedy(
    "mount debugfs, or grant CAP_SYS_PTRACE",
    "see the chart's value paths.debugfs; give the container the capabilities that the chart has",
    value="paths.debugfs",
)
EVENTS: Final = Remedy("{hint}", "{hint}: see the chart's value hostNetwork", value="hostNetwork")
VSOCK: Final = Remedy(
    "modprobe vhost_vsock",
    "modprobe vhost_vsock on the node; the chart's value seccompProfile must allow AF_VSOCK",
    value="seccompProfile",
)
RECORDS: Final = Remedy(
    "run as root, or with CAP_PERFMON and a seccomp filter that allows perf_event_open",
    "the chart's value seccompProfile must allow perf_event_open",
    value="seccompProfile",
)
_UNPRIVILEGED: Final = (
    "containers see /proc and /sys read-only unless they are privileged, which the chart's is not: "
    "set quiet: report in the chart's value config, or run kata-pin as a service of the node"
)
DROP_IN: Final = Remedy(
    "run kata-pin install again, which adds the drop-in {file}; then systemctl daemon-reload and "
    "systemctl restart kata-pin",
    _UNPRIVILEGED,
    value="config",
)
DROP_IN_UNUSED: Final = Remedy(
    "the drop-in {file} is installed and not in force: systemctl daemon-reload; systemctl restart "
    "kata-pin",
    _UNPRIVILEGED,
    value="config",
)
HOOKS: Final = Remedy(
    "kata-pin install --containerd, --crio or --podman",
    "not needed where NRI is connected: see the row NRI",
)
REGISTRY: Final = Remedy(
    "free space in the file system of runtime_dir (df -h; df -i)",
    "free space in the file system of /run/kata-pin on the node (df -h; df -i)",
)
HOOKS_LEFT: Final = Remedy(
    "kata-pin install, or remove the hook from the runtimes that still name it",
    "on the node, remove the hook from the runtimes that still name it",
)
NRI: Final = Remedy(
    "enable NRI in containerd or CRI-O",
    "enable NRI in containerd or CRI-O; its socket's folder is the chart's value paths.nri",
    value="paths.nri",
)
KATA_CONFIGS: Final = Remedy(
    "name its folder in paths.kata_configs",
    "name its folder in paths.kata_configs of the chart's value config, and add it to the chart's "
    "value paths.kataConfigs",
    value="paths.kataConfigs",
)
PARANOID: Final = Remedy(
    "sysctl kernel.perf_event_paranoid=2 (in /etc/sysctl.d: permanently)",
    "on the node: sysctl kernel.perf_event_paranoid=2 (in /etc/sysctl.d: permanently)",
)
NOT_MOUNTED: Final = Remedy(
    "", "add its folder on the node to the chart's value paths.more", value="paths.more"
)
