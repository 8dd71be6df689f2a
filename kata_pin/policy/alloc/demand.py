"""What a container is to get: its class and its number of CPUs, with the reasons.

One rule per policy. A container that may not have its own CPUs, or whose annotation has an unknown
value, is treated as `none`, with the reason: it still starts. Pure. Out of scope: whether there are
enough CPUs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from kata_pin.model.alloc import CRANE_KEY, FAIL_KEY, POLICY_KEY, ContainerRequest, PodRequest, Qos
from kata_pin.model.placement import Note, NoteLevel
from kata_pin.model.settings import AllocSettings, CpuClass, Eligibility

STRICT: Final = "strict"
BEST_EFFORT: Final = "best-effort"

_MAX_SHOWN: Final = 40
"""Longest part of an annotation's value that is shown: users write it."""


@dataclass(frozen=True, slots=True)
class Demand:
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


def static_demand(request: ContainerRequest, settings: AllocSettings) -> Demand:
    """Return what the policy `static` gives: exclusive CPUs for eligible containers."""
    return _eligible(request, CpuClass.EXCLUSIVE, settings.eligibility)


def annotated_demand(request: ContainerRequest, settings: AllocSettings) -> Demand:
    """Return what the policy `annotation` gives: what the pod chose, if it is allowed.

    Without an annotation: none. The relaxed rule applies to the administrator's override.
    """
    return _as_chosen(request, settings, mixed=False)


def topology_demand(request: ContainerRequest, settings: AllocSettings) -> Demand:
    """Return what the policy `topology` gives: what the pod chose, else by eligibility.

    An eligible container with a fraction gets its whole CPUs exclusively and the fraction from the
    shared pool (NRI resource policies: mixed).
    """
    pod = request.pod
    if pod.ordered is not None or POLICY_KEY in pod.annotations or CRANE_KEY in pod.annotations:
        return _as_chosen(request, settings, mixed=True)
    demand = _eligible(request, CpuClass.EXCLUSIVE, settings.eligibility, mixed=True)
    return replace(demand, notes=_fail_notes(pod))


def strict(request: ContainerRequest, settings: AllocSettings) -> bool:
    """Return whether the container is refused if it cannot be served.

    A pod can be stricter than its node's setting, never less strict (D17).
    """
    return settings.strict or request.pod.annotations.get(FAIL_KEY) == STRICT


def asked(pod: PodRequest) -> bool:
    """Return whether own CPUs were chosen for this pod, not only derived by a rule."""
    chose = POLICY_KEY in pod.annotations or CRANE_KEY in pod.annotations
    return chose or pod.ordered is not None or pod.annotations.get(FAIL_KEY) == STRICT


def chosen_class(pod: PodRequest, settings: AllocSettings) -> Demand:
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


def _as_chosen(request: ContainerRequest, settings: AllocSettings, *, mixed: bool) -> Demand:
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


def _annotated(
    pod: PodRequest, key: str, settings: AllocSettings, notes: tuple[Note, ...]
) -> Demand:
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
