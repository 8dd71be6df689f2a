"""The sections `alloc`, our own allocator (D14), and `resctrl`, caches and memory bandwidth."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from msgspec import Struct

from kata_pin.base.config.kinds import (
    NAME,
    PATH,
    Kind,
    Raw,
    choice,
    expected,
    integer,
    listing,
    mapping,
    matching,
    number,
    setting,
    text_of,
)
from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.base.errors import ConfigError, ParseError
from kata_pin.base.settings import (
    AllowRule,
    AssignRule,
    ClassRule,
    Eligibility,
    ManagerPolicy,
)
from kata_pin.base.values import CpuClass

# What they mean for a decision is in options/allocation; which CPUs exist is checked when the
# policy is made for the host.

NO_POLICY: Final = "none"
"""The policy's name that means: no allocator."""

ORDERS_FILE: Final = "/etc/kata-pin/policies"
MAX_PATTERN: Final = 253


class Fail(StrEnum):
    """What happens to a container that cannot get what it asks for."""

    BEST_EFFORT = "best-effort"
    STRICT = "strict"


class Push(StrEnum):
    """Whether cpusets are sent without waiting for the runtime's next call."""

    AUTO = "auto"
    NO = "no"


def _read_rule(raw: Raw) -> AllowRule:
    if not isinstance(raw, dict):
        raise ParseError("expected a mapping with namespace, handler, classes, rdt or blockio")
    namespace, handler = _read_patterns(raw, ("classes", "rdt", "blockio"))
    others = raw.keys() & {"rdt", "blockio"}
    listed = raw.get("classes", [] if others else ["share", "exclusive"])
    classes = frozenset(listing(choice(CpuClass)).read(listed))
    if (not classes and not others) or CpuClass.NONE in classes:
        raise ParseError("classes: expected share, exclusive or both")
    rdt, blockio = (listing(CLASS).read(raw.get(key, [])) for key in ("rdt", "blockio"))
    return AllowRule(namespace, handler, classes, frozenset(rdt), frozenset(blockio))


def _read_assignment(raw: Raw) -> AssignRule:
    if not isinstance(raw, dict):
        raise ParseError("expected a mapping with namespace, handler, rdt or blockio")
    namespace, handler = _read_patterns(raw, ("rdt", "blockio"))
    names = {key: CLASS.read(raw[key]) for key in ("rdt", "blockio") if key in raw}
    if not names:
        raise ParseError("expected rdt, blockio or both")
    return AssignRule(namespace, handler, **names)


def _read_patterns(raw: Mapping[str, Raw], others: Sequence[str]) -> tuple[str, str]:
    """Return namespace and handler of a rule that may have these other keys."""
    unknown = sorted(raw.keys() - {"namespace", "handler", *others})
    if unknown:
        words = ", ".join(("namespace", "handler", *others[:-1]))
        raise ParseError(f"expected {words} or {others[-1]}", text=unknown[0])
    if not raw.keys() & {"namespace", "handler"}:
        raise ParseError("expected a namespace, a handler or both")
    return read_pattern(raw.get("namespace", "*")), read_pattern(raw.get("handler", "*"))


def read_pattern(raw: Raw) -> str:
    """Read a pattern of namespaces or handlers; raises ParseError."""
    text = text_of(raw)
    if not text or len(text) > MAX_PATTERN or not text.isascii() or not text.isprintable():
        raise expected("a name, * and ? match anything", text)
    return text


def _write_rule(rule: AllowRule) -> Raw:
    written: dict[str, Raw] = {"namespace": rule.namespace, "handler": rule.handler}
    lists = (("classes", rule.classes), ("rdt", rule.rdt), ("blockio", rule.blockio))
    return written | {key: [*sorted(names)] for key, names in lists if names}


def _write_assignment(rule: AssignRule) -> Raw:
    written = {key: getattr(rule, key) for key in ("namespace", "handler", "rdt", "blockio")}
    return {key: text for key, text in written.items() if text}


def _read_url(raw: Raw) -> str:
    """Read an http or https address, or a socket's; plain http may not leave this host."""
    text = text_of(raw)
    if not text:
        return ""
    if text.startswith(UNIX):
        return UNIX + PATH.read(text.removeprefix(UNIX))
    if len(text) > MAX_URL or not text.isascii() or not text.isprintable() or " " in text:
        raise ParseError("not an address", text=text)
    try:
        from urllib.parse import urlsplit  # noqa: PLC0415 - for the few who set an address

        parts = urlsplit(text)
        host, _ = parts.hostname or "", parts.port
    except ValueError as error:
        raise ParseError("not an address", text=text) from error
    if parts.scheme not in {"http", "https"} or not host or parts.username is not None:
        raise ParseError("expected https://host:port/path", text=text)
    if parts.scheme == "http" and host not in _LOOPBACK:
        raise ParseError("http is accepted for this host only; use https", text=text)
    return text


URL: Final = Kind("an address: https, http on this host, or unix: and a path", _read_url)

UNIX: Final = "unix:"
_LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})
MAX_URL: Final = 2048


OPTIONAL_PATH: Final = Kind(
    "an absolute path, or nothing", lambda raw: PATH.read(raw) if text_of(raw) else ""
)
MOUNTED: Final = matching(
    r"(/(?!(proc|sys|dev)(/|$))[^/.\s][^/\s]*(/[^/.\s][^/\s]*)*)?",
    "an absolute path outside /proc, /sys and /dev, or nothing",
)
NODE_NAME: Final = matching(
    r"([A-Za-z0-9][A-Za-z0-9.-]{0,252}|\$[A-Za-z_][A-Za-z0-9_]{0,252})?",
    "a host's name, $ and the name of an environment variable, or nothing",
)
ALLOW_RULE: Final = Kind(
    "a mapping with namespace, handler, classes, rdt and blockio", _read_rule, _write_rule
)
ASSIGN_RULE: Final = Kind(
    "a mapping with namespace, handler, rdt and blockio", _read_assignment, _write_assignment
)
CLASS: Final = matching(
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "a class: at most 64 letters, digits, . _ and -"
)


class Alloc(Struct, frozen=True):
    """Our own allocator: which CPUs each container gets."""

    policy: str = setting(
        NO_POLICY,
        "who gets which CPUs. none: kata-pin decides nothing; static: as the kubelet's static "
        "policy; annotation: as pod annotations and `kata-pin policy set` say; topology: CPUs of "
        "few NUMA nodes and caches; another name: a policy of another package",
        NAME,
        example="annotation",
    )
    cpus: CpuSet = setting(
        EMPTY, "pCPUs that may be allocated; empty: those online and not isolated"
    )
    reserved: CpuSet = setting(
        EMPTY,
        "pCPUs that are never exclusive; they stay in the shared pool",
        example="0-1",
    )
    strict_reserved: bool = setting(False, "keep alloc.reserved out of the shared pool too")
    housekeeping: CpuSet = setting(
        EMPTY,
        "pCPUs for overhead threads and unpaired vCPUs of sandboxes; in no other pool",
        example="0",
    )
    shared_minimum: int = setting(
        0, "fewest pCPUs in the shared pool; 0: one core", integer(0, 8192)
    )
    eligibility: Eligibility = setting(
        Eligibility.KUBELET,
        "which containers may have pCPUs of their own, a whole number of them. kubelet: those of "
        "Guaranteed pods; relaxed: any whose limit equals its request",
    )
    options: Mapping[str, str] = setting(
        MappingProxyType({}),
        "options of the kubelet's static policy, by the kubelet's names",
        mapping(NAME, NAME),
        example='{full-pcpus-only: "true"}',
    )
    topology_manager: ManagerPolicy = setting(
        ManagerPolicy.NONE,
        "the kubelet's topologyManagerPolicy, for the policies static and annotation: from which "
        "NUMA nodes a container's exclusive pCPUs come",
        example="single-numa-node",
    )
    allow: tuple[AllowRule, ...] = setting(
        (),
        "pods that may choose by annotation, by namespace and runtime handler: `classes` of CPUs, "
        "`rdt` and `blockio` classes; empty: none",
        listing(ALLOW_RULE),
        example="[{namespace: shop, handler: kata, classes: [share]}]",
    )
    assign: tuple[AssignRule, ...] = setting(
        (),
        "RDT and block-I/O classes of containers, by namespace and runtime handler, the first rule "
        "that names one; the runtime sets them at creation, never for Kata. An unknown class "
        "fails the creation",
        listing(ASSIGN_RULE),
        example="[{namespace: shop, handler: runc, rdt: gold, blockio: fast}]",
    )
    mount_sources: tuple[str, ...] = setting(
        (),
        "folders from which policies of other packages may mount into containers, read-only",
        listing(PATH),
        example="[/run/numa-hints]",
    )
    devices: tuple[str, ...] = setting(
        (),
        "devices that policies of other packages may add to containers: paths below /dev, or "
        "folders with all that is in them",
        listing(PATH),
        example="[/dev/vfio, /dev/hints0]",
    )
    annotation_keys: tuple[str, ...] = setting(
        (),
        "annotations that policies of other packages may add to containers",
        listing(
            matching(
                r"([a-z0-9][a-z0-9.-]{0,252}/)?[A-Za-z0-9][A-Za-z0-9_.-]{0,62}",
                "an annotation's key",
            )
        ),
        example="[hints.example.com/cpus]",
    )
    fail: Fail = setting(
        Fail.BEST_EFFORT,
        "what happens to a container that cannot get what it asks for. best-effort: it runs in the "
        "shared pool; strict: its creation is refused, which needs NRI",
    )
    pin_memory: bool = setting(False, "also limit containers to the memory nodes of their pCPUs")
    max_sharers: int = setting(1, "most containers of class share on one pCPU", integer(1, 64))
    default_vcpus: int = setting(
        1,
        "Kata's default_vcpus: vCPUs of a VM in addition to those of its containers",
        integer(0, 64),
    )
    overhead_millis: int = setting(
        250,
        "CPU time of a VM's overhead threads, for pods that do not state an overhead",
        integer(0, 64_000, "thousandths of a CPU"),
    )
    own_cpus: int = setting(
        0,
        "additional exclusive pCPUs for each VM that has exclusive ones, for its overhead threads "
        "and unpaired vCPUs",
        integer(0, 64),
    )
    pods_url: str = setting(
        "",
        "the kubelet's list of pods, to follow annotations of running pods; unix: and the path of "
        "its Pods API (Kubernetes 1.37) needs no credential, but grpcio; empty: an annotation "
        "counts only when a container is created",
        URL,
        example="https://127.0.0.1:10250/pods",
    )
    pods_name: str = setting(
        "",
        "name in the kubelet's certificate, which is the node's, where alloc.pods_url has another "
        "one or an address; $NAME: the daemon's environment variable of that name",
        NODE_NAME,
        example="$NODE_NAME",
    )
    pods_token: str = setting(
        "",
        "file with the token for the kubelet; it needs `get` on nodes/pods (before Kubernetes "
        "1.33: nodes/proxy). Read for each request, so it can be renewed",
        OPTIONAL_PATH,
        example="/var/run/secrets/kubernetes.io/serviceaccount/token",
    )
    pods_certificate: str = setting(
        "",
        "file with a client certificate and its key for the kubelet, instead of a token; read for "
        "each request",
        OPTIONAL_PATH,
        example="/etc/kata-pin/kubelet-client.pem",
    )
    pods_ca: str = setting(
        "",
        "file with the certificate authority of the kubelet's certificate; empty: the host's "
        "authorities",
        OPTIONAL_PATH,
        example="/var/lib/kubelet/pki/kubelet.crt",
    )
    pods_s: float = setting(
        10.0, "time between two reads of alloc.pods_url", number(1, 3600, "seconds")
    )
    placement_env: bool = setting(
        False,
        "give each container variables with its placement at creation (KATA_PIN_CPUS and others)",
    )
    placement_file: str = setting(
        "",
        "folder in each container with a read-only file, `placement`, that says where it is placed "
        "and is rewritten when that changes; empty: none. It replaces a volume on that path",
        MOUNTED,
        example="/run/kata-pin",
    )
    push: Push = setting(
        Push.AUTO,
        "how cpusets reach containers between two calls of the runtime. auto: at once, by NRI with "
        "runtimes where that is safe, else by CRI if alloc.cri is set; no: with the runtime's next "
        "call",
    )
    cri: str = setting(
        "",
        "the runtime's CRI socket, to update cpusets as the kubelet does; empty: do not use CRI. "
        "Needs grpcio (`pip install 'kata-pin[cri]'`)",
        OPTIONAL_PATH,
        example="/run/containerd/containerd.sock",
    )
    orders: str = setting(
        ORDERS_FILE, "file of `kata-pin policy set`; it is watched and read again on change", PATH
    )

    @property
    def on(self) -> bool:
        """Whether there is an allocator."""
        return self.policy != NO_POLICY


# The settings of caches and memory bandwidth: the section `resctrl`.

MAX_SCHEMATA: Final = 4096

_LINE: Final = re.compile(
    r"[A-Z][A-Z0-9]{0,15}:[0-9]{1,5}=[0-9a-fA-F]{1,16}(;[0-9]{1,5}=[0-9a-fA-F]{1,16})*\Z"
)


def _read_schemata(raw: Raw) -> str:
    text = text_of(raw)
    lines = text.split()
    if not lines or len(text) > MAX_SCHEMATA or not all(map(_LINE.match, lines)):
        raise expected(_SCHEMATA_WORDS, text)
    return " ".join(lines)


def _resctrl_read_rule(raw: Raw) -> ClassRule:
    if not isinstance(raw, dict):
        raise ParseError("expected a mapping with namespace, handler and class")
    unknown = sorted(raw.keys() - {"namespace", "handler", "class"})
    if unknown:
        raise ParseError("expected namespace, handler or class", text=unknown[0])
    if "class" not in raw:
        raise ParseError("expected a class")
    return ClassRule(
        read_pattern(raw.get("namespace", "*")),
        read_pattern(raw.get("handler", "*")),
        class_name=RESCTRL_CLASS.read(raw["class"]),
    )


def _resctrl_write_rule(rule: ClassRule) -> Raw:
    return {"namespace": rule.namespace, "handler": rule.handler, "class": rule.class_name}


RESCTRL_CLASS: Final = NAME
_SCHEMATA_WORDS: Final = (
    "lines of a schemata file with blanks between them, such as L3:0=ff;1=f MB:0=50"
)
SCHEMATA: Final = Kind(_SCHEMATA_WORDS, _read_schemata)
CLASS_RULE: Final = Kind(
    "a mapping with namespace, handler and class", _resctrl_read_rule, _resctrl_write_rule
)


class Resctrl(Struct, frozen=True):
    """Caches and memory bandwidth of sandboxes, counted and limited by the kernel's resctrl."""

    enabled: bool = setting(
        False,
        "measure each sandbox's use of caches and memory bandwidth, in a monitoring group "
        "of resctrl that holds all of its threads; the service needs more rights for it, which "
        "`kata-pin install` gives",
    )
    classes: Mapping[str, str] = setting(
        MappingProxyType({}),
        "classes of sandboxes, each with its schemata; each takes one of the few that the CPU has",
        mapping(RESCTRL_CLASS, SCHEMATA),
        example='{latency: "L3:0=ff0;1=ff0", batch: "L3:0=00f;1=00f MB:0=30;1=30"}',
    )
    rules: tuple[ClassRule, ...] = setting(
        (),
        "which sandboxes get which class, by namespace and runtime handler; the first rule "
        "that matches applies, such as {namespace: prod-*, class: latency}; without one a "
        "sandbox stays in resctrl's default group",
        listing(CLASS_RULE),
    )

    def check(self) -> None:
        """Refuse rules that name no class, or have no effect, with ConfigError without a file."""
        for rule in self.rules:
            if rule.class_name not in self.classes:
                raise ConfigError(f"no class {rule.class_name!r}", key="resctrl.rules")
        if self.rules and not self.enabled:
            raise ConfigError("without effect while resctrl.enabled is false", key="resctrl.rules")

    def class_of(self, namespace: str, handler: str) -> str:
        """Return the class of a sandbox, empty for none."""
        fitting = (rule.class_name for rule in self.rules if rule.matches(namespace, handler))
        return next(fitting, "")
