"""The annotations that are read from an OCI state, config.json and persist.json.

A pod's author may set any others, up to 256 KiB in all (Kubernetes API, TotalAnnotationSizeLimitB).
Those are ignored, so that neither their number nor their content can hide a container. What the
annotations mean: container_id.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from kata_pin.model.alloc import RDT_KEY
from kata_pin.wire.json_text import Fields


class Dialect(NamedTuple):
    """How one container manager marks sandboxes and containers."""

    type_key: str
    sandbox_key: str
    sandbox_value: str = "sandbox"


CONTAINERD: Final = Dialect("io.kubernetes.cri.container-type", "io.kubernetes.cri.sandbox-id")
CRIO: Final = Dialect("io.kubernetes.cri-o.ContainerType", "io.kubernetes.cri-o.SandboxID")
DOCKERSHIM: Final = Dialect("io.kubernetes.docker.type", "io.kubernetes.sandbox.id", "podsandbox")
DIALECTS: Final = (CONTAINERD, CRIO, DOCKERSHIM)

CRIO_CONTAINER_ID: Final = "io.kubernetes.cri-o.ContainerID"
KATA_TYPE: Final = "io.katacontainers.pkg.oci.container_type"
KATA_BUNDLE: Final = "io.katacontainers.pkg.oci.bundle_path"
KATA_CONFIG: Final = "io.katacontainers.config_path"

KATA_PINNING: Final = (
    "io.katacontainers.enable_vcpus_pinning",
    "io.katacontainers.config.runtime.enable_vcpus_pinning",
)
"""Kata's own pinning: the key of the Go runtime, and that of runtime-rs."""

# The first key present wins: containerd's, then the labels that CRI-O and dockershim copy.
NAME_KEYS: Final = (
    "io.kubernetes.cri.container-name",
    "io.kubernetes.container.name",
    "io.kubernetes.cri-o.ContainerName",
    "nerdctl/name",
)
POD_KEYS: Final = (
    "io.kubernetes.cri.sandbox-name",
    "io.kubernetes.pod.name",
    "io.kubernetes.cri-o.KubeName",
)
NAMESPACE_KEYS: Final = (
    "io.kubernetes.cri.sandbox-namespace",
    "io.kubernetes.pod.namespace",
    "io.kubernetes.cri-o.Namespace",
)
UID_KEYS: Final = ("io.kubernetes.cri.sandbox-uid", "io.kubernetes.pod.uid")
HANDLER_KEYS: Final = ("io.containerd.cri.runtime-handler", "io.kubernetes.cri-o.RuntimeHandler")

IRQ_KEY: Final = "irq-load-balancing.crio.io"
"""Also with `/` and a container's name behind it."""

QUIET_KEYS: Final = (
    *("cpu-quiet.kata-pin.io", IRQ_KEY),
    *("cpu-c-states.crio.io", "cpu-freq-governor.crio.io"),
)
"""Whether the pCPUs of a pod should be quiet, their idle states and their frequency."""

_MAX_PREFIXED: Final = 64

READ: Final = (
    *(key for dialect in DIALECTS for key in (dialect.type_key, dialect.sandbox_key)),
    *(CRIO_CONTAINER_ID, KATA_TYPE, KATA_BUNDLE, KATA_CONFIG, *KATA_PINNING),
    *(*NAME_KEYS, *POD_KEYS, *NAMESPACE_KEYS, *UID_KEYS, *HANDLER_KEYS),
    *(*QUIET_KEYS, RDT_KEY),
)
"""All keys that are looked up anywhere; a new one must be added here."""


def annotations_of(fields: Fields, member: str) -> dict[str, str]:
    """Return the annotations in READ; ParseError if one of them is not a text."""
    found = fields.fields(member)
    return found.chosen((*READ, *quiet_keys(found.names)))


def quiet_keys(names: Iterable[str]) -> list[str]:
    """Return the keys among these that are about quiet pCPUs, at most 64 of single containers."""
    single = f"{IRQ_KEY}/"
    return [name for name in names if name in QUIET_KEYS or name.startswith(single)][:_MAX_PREFIXED]
