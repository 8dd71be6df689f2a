"""What a container is to get: class and number of CPUs, RDT class, block-I/O class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from msgspec import Struct
from msgspec.structs import fields, replace

from kata_pin.base.allocation import (
    BLOCKIO_KEY,
    CRANE_KEY,
    FAIL_KEY,
    NOTHING_MORE,
    POLICY_KEY,
    RDT_KEY,
    AllocState,
    ContainerRequest,
    Decision,
    Grant,
    PodRequest,
    Qos,
)
from kata_pin.base.config.alloc import Alloc, Fail
from kata_pin.base.errors import ConfigError
from kata_pin.base.placement import Note
from kata_pin.base.settings import Eligibility
from kata_pin.base.values import CpuClass, NoteLevel
from kata_pin.options.allocation.accumulator import Machine, Packing

# One rule per policy. A container that may not have its own CPUs, or whose annotation has an
# unknown value, is treated as `none`, with the reason: it still starts.

STRICT: Final = "strict"
BEST_EFFORT: Final = "best-effort"

_MAX_SHOWN: Final = 40
"""Longest part of an annotation's value that is shown: users write it."""


class Demand(Struct, frozen=True):
    """`whole` CPUs of the class, and `fraction_millis` more from the shared pool near them."""

    cpu_class: CpuClass = CpuClass.NONE
    whole: int = 0
    fraction_millis: int = 0
    reasons: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()

    @property
    def pooled(self) -> bool:
        """Whether it only uses the shared pool."""
        return self.cpu_class is CpuClass.NONE


def static_demand(request: ContainerRequest, settings: Alloc) -> Demand:
    """Return what the policy `static` gives: exclusive CPUs for eligible containers."""
    return _eligible(request, CpuClass.EXCLUSIVE, settings.eligibility)


def annotated_demand(request: ContainerRequest, settings: Alloc) -> Demand:
    """Return what the policy `annotation` gives: what the pod chose, if it is allowed.

    Without an annotation: none. The relaxed rule applies to the administrator's override.
    """
    return _as_chosen(request, settings, mixed=False)


def topology_demand(request: ContainerRequest, settings: Alloc) -> Demand:
    """Return what the policy `topology` gives: what the pod chose, else by eligibility.

    An eligible container with a fraction gets its whole CPUs exclusively and the fraction from the
    shared pool (NRI resource policies: mixed).
    """
    pod = request.pod
    if pod.ordered is not None or POLICY_KEY in pod.annotations or CRANE_KEY in pod.annotations:
        return _as_chosen(request, settings, mixed=True)
    demand = _eligible(request, CpuClass.EXCLUSIVE, settings.eligibility, mixed=True)
    return replace(demand, notes=_fail_notes(pod))


def strict(request: ContainerRequest, settings: Alloc) -> bool:
    """Return whether the container is refused if it cannot be served.

    A pod can be stricter than its node's setting, never less strict (D17).
    """
    return settings.fail is Fail.STRICT or request.pod.annotations.get(FAIL_KEY) == STRICT


def asked(pod: PodRequest) -> bool:
    """Return whether own CPUs were chosen for this pod, not only derived by a rule."""
    chose = POLICY_KEY in pod.annotations or CRANE_KEY in pod.annotations
    return chose or pod.ordered is not None or pod.annotations.get(FAIL_KEY) == STRICT


def chosen_class(pod: PodRequest, settings: Alloc) -> Demand:
    """Return the class of the administrator's override, or of the pod's annotation.

    Our own key takes precedence over Crane's even if its value is invalid, which is noted.
    """
    notes = _fail_notes(pod)
    if pod.ordered is not None:
        return Demand(pod.ordered, reasons=(f"administrator's override: {pod.ordered}",))
    for key in (POLICY_KEY, CRANE_KEY):
        if key in pod.annotations:
            return _annotated(pod, key, settings, notes)
    return Demand(reasons=("its pod has no annotation",), notes=notes)


def _as_chosen(request: ContainerRequest, settings: Alloc, *, mixed: bool) -> Demand:
    """Return what was chosen for the pod, if this container is eligible for it."""
    chosen = chosen_class(request.pod, settings)
    if chosen.pooled:
        return chosen
    rule = settings.eligibility if request.pod.ordered is None else Eligibility.RELAXED
    mixed = mixed and chosen.cpu_class is CpuClass.EXCLUSIVE
    demand = _eligible(request, chosen.cpu_class, rule, mixed=mixed)
    if demand.pooled:
        why = f"{chosen.reasons[0]}, but {demand.reasons[0]}"
        return _pooled(why, "not-eligible", chosen.notes)
    return replace(demand, reasons=chosen.reasons + demand.reasons, notes=chosen.notes)


def _annotated(pod: PodRequest, key: str, settings: Alloc, notes: tuple[Note, ...]) -> Demand:
    value = pod.annotations[key]
    try:
        chosen = CpuClass(value)
    except ValueError:
        text = f"annotation {key} of pod {pod.title}: {_clipped(value)} is not none, share or "
        return _pooled(f"{text}exclusive: treated as none", "unknown-cpu-policy", notes)
    allowed = any(rule.allows(pod.namespace, pod.handler, chosen) for rule in settings.allow)
    if chosen is not CpuClass.NONE and not allowed:
        text = f"annotation {key} of pod {pod.title}: no allow rule permits {chosen} CPUs"
        return _pooled(f"{text}: treated as none", "cpu-policy-not-allowed", notes)
    return Demand(chosen, reasons=(f"annotation {key} says {chosen}",), notes=notes)


def _fail_notes(pod: PodRequest) -> tuple[Note, ...]:
    value = pod.annotations.get(FAIL_KEY, STRICT)
    if value in {STRICT, BEST_EFFORT}:
        return ()
    text = f"annotation {FAIL_KEY} of pod {pod.title}: {_clipped(value)} is not {STRICT} or "
    return (Note("unknown-fail-policy", f"{text}{BEST_EFFORT}: ignored", NoteLevel.WARNING),)


def _eligible(
    request: ContainerRequest, wished: CpuClass, rule: Eligibility, *, mixed: bool = False
) -> Demand:
    """Return the demand of a container that may have whole CPUs, else none and why."""
    millis = request.cpu_millis
    if rule is Eligibility.KUBELET:
        if request.pod.pod_level:
            return Demand(reasons=("its pod has pod-level resources, which its containers share",))
        if request.pod.qos is not Qos.GUARANTEED:
            return Demand(reasons=(f"its pod is {request.pod.qos}, not guaranteed",))
        why = "its pod is guaranteed"
    else:
        # without a request Kubernetes uses the limit
        millis = millis or request.limit_millis
        if request.limit_millis != millis:
            limit = _amount(request.limit_millis) if request.limit_millis else "none"
            return Demand(reasons=(f"its CPU limit ({limit}) is not its request ({millis}m)",))
        why = "its CPU limit equals its request"
    whole, fraction = divmod(millis, 1000)
    if whole == 0 or (fraction and not mixed):
        return Demand(reasons=(f"its request of {_amount(millis)} is not a whole number of CPUs",))
    return Demand(wished, whole, fraction, (f"{why}, request {_amount(millis)}",))


def _pooled(text: str, code: str, notes: tuple[Note, ...] = ()) -> Demand:
    return Demand(reasons=(text,), notes=(*notes, Note(code, text, NoteLevel.WARNING)))


def _amount(millis: int) -> str:
    return f"{millis // 1000} CPUs" if millis % 1000 == 0 else f"{millis}m"


def _clipped(value: str) -> str:
    return repr(value if len(value) <= _MAX_SHOWN else value[: _MAX_SHOWN - 3] + "...")


# The options of the static policy, by the kubelet's names, and which of them exclude each other.
#
# Read from the configuration once at start. Kubelet policy_options.go without its feature gates:
# every option is available.

_TRUE: Final = frozenset({"1", "t", "T", "TRUE", "true", "True"})
_FALSE: Final = frozenset({"0", "f", "F", "FALSE", "false", "False"})


class StaticOptions(Struct, frozen=True):
    """The kubelet's options, each off by default, and one of this project's own.

    - full_pcpus_only: whole cores only, else SMTAlignmentError.
    - strict_cpu_reservation: reserved CPUs are not in the shared pool either.
    - distribute_cpus_across_numa: the distributed algorithm instead of the packed one.
    - prefer_align_cpus_by_uncorecache: packed, inside a last-level cache where that fits.
    - align_by_socket: a NUMA hint is widened to whole packages.
    - distribute_cpus_across_cores: packed, but single CPUs spread over cores.
    - true_unit_sizes (ours): cores and packages are counted by their own size, not by the host's
      average, so that whole cores of a hybrid host are recognised.
    """

    full_pcpus_only: bool = False
    strict_cpu_reservation: bool = False
    distribute_cpus_across_numa: bool = False
    prefer_align_cpus_by_uncorecache: bool = False
    align_by_socket: bool = False
    distribute_cpus_across_cores: bool = False
    true_unit_sizes: bool = False

    def __post_init__(self) -> None:
        for left, right in _REFUSED_PAIRS:
            if getattr(self, left) and getattr(self, right):
                raise ConfigError(
                    f"cannot be used together with {_written(right)}", key=_written(left)
                )

    @property
    def packing(self) -> Packing:
        """How they have CPUs packed."""
        return Packing(
            spread=self.distribute_cpus_across_cores,
            by_llc=self.prefer_align_cpus_by_uncorecache,
            true_sizes=self.true_unit_sizes,
        )

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return every option's name as the kubelet writes it."""
        return tuple(_written(entry.name) for entry in fields(cls))

    @classmethod
    def parse(cls, texts: Mapping[str, str]) -> StaticOptions:
        """Read the kubelet's `cpuManagerPolicyOptions`: option name to a boolean text.

        Raises ConfigError for an unknown option, a text that Go's strconv.ParseBool refuses, and
        options that exclude each other.
        """
        known = {_written(field.name): field.name for field in fields(cls)}
        values: dict[str, bool] = {}
        for option, text in texts.items():
            if option not in known:
                raise ConfigError("unknown option of the static policy", key=option)
            if text not in _TRUE | _FALSE:
                raise ConfigError(f"{text!r} is not true or false", key=option)
            values[known[option]] = text in _TRUE
        return cls(**values)

    def check_against(self, machine: Machine, *, single_numa_node: bool = False) -> None:
        """Raise ConfigError if the host or the topology manager's policy rules an option out.

        `single_numa_node`: the topology manager has the policy of that name.
        """
        if not self.align_by_socket:
            return
        if single_numa_node:
            raise ConfigError(
                "cannot be used with the topology manager's policy single-numa-node",
                key=_written("align_by_socket"),
            )
        if len(machine.packages) > len(machine.nodes):
            raise ConfigError(
                f"cannot be used on a host with more packages ({len(machine.packages)}) "
                f"than NUMA nodes ({len(machine.nodes)})",
                key=_written("align_by_socket"),
            )


_REFUSED_PAIRS: Final = (
    ("full_pcpus_only", "distribute_cpus_across_cores"),
    ("distribute_cpus_across_numa", "distribute_cpus_across_cores"),
    ("prefer_align_cpus_by_uncorecache", "distribute_cpus_across_cores"),
    ("prefer_align_cpus_by_uncorecache", "distribute_cpus_across_numa"),
)


def _written(name: str) -> str:
    return name.replace("_", "-")


# RDT and block-I/O classes of new containers, by the administrator's rules.
#
# A pod gets the class of the first rule in `alloc.assign` that names one for it, or the one it
# chose by annotation, if a rule in `alloc.allow` lets it. Runtimes apply classes only at creation,
# so a running container keeps what it has.

_IN_VM: Final = "no {}: runtimes' classes have no effect on a Kata VM"


class ClassKind(NamedTuple):
    """A kind of class: its field of AtCreation, of the rules, its annotation, and its name."""

    field: str
    rule: str
    key: str
    title: str


KINDS: Final = (
    ClassKind("rdt_class", "rdt", RDT_KEY, "RDT class"),
    ClassKind("blockio_class", "blockio", BLOCKIO_KEY, "block-I/O class"),
)


class _Choice(NamedTuple):
    """A class, empty for none, and why."""

    name: str = ""
    reason: str = ""
    note: Note | None = None


def with_classes(decision: Decision, container_id: str, settings: Alloc) -> Decision:
    """Return a decision about a new container with the classes that the rules give it.

    A policy's own choice, or an earlier instance's class, stays if a rule names it for the pod.
    """
    grant = decision.state.get(container_id)
    if grant is None or (decision.refused is not None and decision.refused.strict):
        return decision
    pod = grant.request.pod
    creation, reasons, notes = grant.creation, [], []
    for kind in KINDS:
        choice = _choice(pod, kind, settings)
        own = getattr(creation, kind.field)
        name = choice.name or (own if own in permitted(pod, kind, settings) else "")
        if pod.kata and name:  # Kata removes both (virtcontainers/kata_agent.go)
            name, choice = "", choice._replace(reason=_IN_VM.format(kind.title))
        named: dict[str, Any] = {kind.field: name}
        creation = replace(creation, **named)
        reasons += [choice.reason] if choice.reason else []
        notes += [choice.note] if choice.note is not None else []
    if (creation, reasons, notes) == (grant.creation, [], []):
        return decision
    kept = [one for one in grant.reasons if one not in reasons]  # an earlier instance's
    classed = replace(grant, creation=creation, reasons=(*kept, *reasons))
    return replace(
        decision,
        state=decision.state.with_grant(classed),
        changed=tuple(classed if one == grant else one for one in decision.changed),
        notes=(*decision.notes, *notes),
    )


def permitted(pod: PodRequest, kind: ClassKind, settings: Alloc) -> frozenset[str]:
    """Return the classes that any rule names for a pod."""
    assigned = {
        getattr(one, kind.rule)
        for one in settings.assign
        if one.matches(pod.namespace, pod.handler)
    }
    return (_offered(pod, kind, settings) | assigned) - {""}


def kept_creation(before: AllocState, decision: Decision, new: str = "") -> Decision:
    """Return a decision in which only the container `new` gets anything at creation.

    The others run already: they keep what they were created with, whatever the policy says now.
    """
    fixed: dict[str, Grant] = {}
    for name, grant in decision.state.grants.items():
        old = before.grants.get(name)
        had = NOTHING_MORE if old is None else old.creation
        if name != new and grant is not old and grant.creation != had:
            fixed[name] = replace(grant, creation=had)
    if not fixed:
        return decision
    state = replace(decision.state, grants={**decision.state.grants, **fixed})
    changed = tuple(fixed.get(one.container_id, one) for one in decision.changed)
    return replace(decision, state=state, changed=changed)


def _offered(pod: PodRequest, kind: ClassKind, settings: Alloc) -> frozenset[str]:
    """Return the classes that a pod may choose by annotation."""
    rules = (one for one in settings.allow if one.matches(pod.namespace, pod.handler))
    return frozenset[str]().union(*(getattr(one, kind.rule) for one in rules))


def _choice(pod: PodRequest, kind: ClassKind, settings: Alloc) -> _Choice:
    rules = (one for one in settings.assign if one.matches(pod.namespace, pod.handler))
    default = next((name for one in rules if (name := getattr(one, kind.rule))), "")
    assigned = _Choice(default, f"{kind.title} {default} by alloc.assign" if default else "")
    value = pod.annotations.get(kind.key, "")
    if not value:
        return assigned
    if value in _offered(pod, kind, settings):
        return _Choice(value, f"{kind.title} {value} by annotation {kind.key}")
    text = f"annotation {kind.key} of pod {pod.title}: no allow rule permits "
    note = Note("class-not-allowed", f"{text}{value[:_MAX_SHOWN]!r}: ignored", NoteLevel.WARNING)
    return assigned._replace(note=note)
