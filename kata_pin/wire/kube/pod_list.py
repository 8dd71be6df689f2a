"""What the kubelet's list of pods says about CPUs (`/pods`, a v1.PodList).

Annotations, which containers are init containers, and whether the pod itself has requests or
limits. Source: Kubernetes API reference, core/v1 PodList, ObjectMeta and PodSpec. The request:
sources/pod_list.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from kata_pin.errors import ParseError
from kata_pin.model.alloc import ANNOTATIONS, PodSpec
from kata_pin.wire.ids import is_name
from kata_pin.wire.json_text import Fields, check_bounds, load_fields

MAX_BYTES: Final = 16 * 1024 * 1024
"""Longest list accepted: 500 pods of 32 KiB."""

MAX_VALUES: Final = 500_000
"""Most brackets and commas of a list outside texts."""

MAX_POD_BYTES: Final = 2 * 1024 * 1024
"""Longest pod; etcd takes no object above 1.5 MiB."""

MAX_PODS: Final = 4096
MAX_VALUE: Final = 253  # longest value that is kept; the meaningful ones are single words

_SOURCE: Final = "pod list"

MAX_INITS: Final = 256
"""Most init containers of a pod that is believed."""


def about_cpus(annotations: Mapping[str, str]) -> dict[str, str]:
    """Return those of a pod's annotations that are about CPUs."""
    return {key: annotations[key][:MAX_VALUE] for key in ANNOTATIONS if key in annotations}


class Pods(NamedTuple):
    """The pods of a list by uid; `problems` are the errors of pods that were skipped."""

    specs: Mapping[str, PodSpec]
    problems: tuple[ParseError, ...] = ()


class _List(msgspec.Struct):
    """The members of a list that are used; a pod is parsed when its turn comes."""

    kind: str = ""
    items: list[msgspec.Raw] | None = None


def parse_pods(data: bytes | bytearray) -> Pods:
    """Return what is listed of every pod; ParseError if it is not a PodList.

    A pod that cannot be read is skipped and never hides the others. One pod is parsed at a time,
    because a parsed list would take ten times its bytes.
    """
    check_bounds(data, source=_SOURCE, limit=MAX_BYTES, values=MAX_VALUES)
    try:
        whole = msgspec.json.decode(data, type=_List)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ParseError(f"not a list of pods: {error}", source=_SOURCE) from error
    except RecursionError:
        raise ParseError("nested too deeply", source=_SOURCE) from None
    if whole.kind != "PodList":
        raise ParseError("not a PodList", source=f"{_SOURCE}: kind", text=whole.kind)
    items = whole.items or []
    if len(items) > MAX_PODS:
        raise ParseError(f"more than {MAX_PODS} entries", source=f"{_SOURCE}: items")
    found: dict[str, PodSpec] = {}
    problems: list[ParseError] = []
    for number, item in enumerate(items):
        source = f"{_SOURCE}: items[{number}]"
        try:
            uid, spec = _pod(load_fields(bytes(item), source=source, limit=MAX_POD_BYTES))
        except ParseError as error:
            problems.append(error)
        else:
            found[uid] = spec
    return Pods(found, tuple(problems))


def _pod(item: Fields) -> tuple[str, PodSpec]:
    metadata, spec = item.fields("metadata").need("uid"), item.fields("spec")
    uid = metadata.text("uid")
    if not is_name(uid):
        raise metadata.fail("uid", "not a uid", uid)
    listed = spec.objects("initContainers", limit=MAX_INITS)
    inits = (one.text("name") for one in listed if one.text("restartPolicy") != "Always")
    resources = spec.fields("resources")
    pod_level = any(resources.fields(kind).names for kind in ("requests", "limits"))
    annotations = about_cpus(metadata.fields("annotations").chosen(ANNOTATIONS))
    return uid, PodSpec(annotations, frozenset(inits), pod_level)
