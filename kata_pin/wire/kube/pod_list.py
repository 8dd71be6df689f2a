"""The annotations about CPUs in the kubelet's list of pods (`/pods`, a v1.PodList).

Source: Kubernetes API reference, core/v1 PodList and ObjectMeta. The request: sources/pod_list.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from kata_pin.errors import ParseError
from kata_pin.model.alloc import CRANE_KEY, FAIL_KEY, POLICY_KEY
from kata_pin.wire.ids import is_name
from kata_pin.wire.json_text import Fields, load

MAX_BYTES: Final = 32 * 1024 * 1024
MAX_VALUES: Final = 4_000_000
MAX_PODS: Final = 4096
MAX_VALUE: Final = 253  # longest value that is kept; the meaningful ones are single words
KEYS: Final = (POLICY_KEY, CRANE_KEY, FAIL_KEY)  # the annotations that allocation policies read

_SOURCE: Final = "pod list"

Annotations = dict[str, Mapping[str, str]]
"""By pod uid."""


def about_cpus(annotations: Mapping[str, str]) -> dict[str, str]:
    """Return those of a pod's annotations that are about CPUs."""
    return {key: annotations[key][:MAX_VALUE] for key in KEYS if key in annotations}


class Pods(NamedTuple):
    """The pods of a list; `problems` are the errors of pods that were skipped."""

    annotations: Annotations
    problems: tuple[ParseError, ...] = ()


def parse_pods(data: bytes) -> Pods:
    """Return the annotations about CPUs of every pod; ParseError if it is not a PodList.

    A pod that cannot be read is skipped and never hides the others.
    """
    value = load(data, source=_SOURCE, limit=MAX_BYTES, values=MAX_VALUES)
    fields = Fields(value, source=_SOURCE)
    if fields.text("kind") != "PodList":
        raise fields.fail("kind", "not a PodList", fields.text("kind"))
    found: Annotations = {}
    problems: list[ParseError] = []
    for number, item in enumerate(fields.items("items", limit=MAX_PODS)):
        try:
            uid, annotations = _pod(Fields(item, source=_SOURCE, path=f"items[{number}]"))
        except ParseError as error:
            problems.append(error)
        else:
            found[uid] = annotations
    return Pods(found, tuple(problems))


def _pod(item: Fields) -> tuple[str, dict[str, str]]:
    metadata = item.fields("metadata").need("uid")
    uid = metadata.text("uid")
    if not is_name(uid):
        raise metadata.fail("uid", "not a uid", uid)
    return uid, about_cpus(metadata.fields("annotations").chosen(KEYS))
