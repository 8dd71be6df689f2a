"""The settings of our own allocator, off by default (DESIGN D14): the section `alloc`.

Out of scope: what they mean for a decision (policy/alloc), and which CPUs exist: that is checked
when the policy is made for the host.
"""

# ruff: noqa: RUF009 - setting() makes a dataclass field, it is not a default shared by instances

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final
from urllib.parse import urlsplit

from kata_pin.config.kinds import (
    BOOLEAN,
    CPUS,
    NAME,
    PATH,
    Kind,
    Raw,
    choice,
    integer,
    listing,
    mapping,
    number,
    text_of,
)
from kata_pin.config.row import setting
from kata_pin.errors import ParseError
from kata_pin.model.cpuset import EMPTY, CpuSet
from kata_pin.model.settings import (
    AllocSettings,
    AllowRule,
    CpuClass,
    Eligibility,
    ManagerPolicy,
    VmSettings,
)

NO_POLICY: Final = "none"
"""The policy's name that means: no allocator."""

ORDERS_FILE: Final = "/etc/kata-pin/policies"
MAX_PATTERN: Final = 253


class Fail(StrEnum):
    """What becomes of a container that cannot have what it asks for."""

    BEST_EFFORT = "best-effort"
    STRICT = "strict"


class Push(StrEnum):
    """Whether cpusets are sent without waiting for the runtime's next call."""

    AUTO = "auto"
    NO = "no"


def _read_rule(raw: Raw) -> AllowRule:
    if not isinstance(raw, dict):
        raise ParseError("expected a mapping with namespace, handler or classes")
    unknown = sorted(raw.keys() - {"namespace", "handler", "classes"})
    if unknown:
        raise ParseError("expected namespace, handler or classes", text=unknown[0])
    if not raw.keys() & {"namespace", "handler"}:
        raise ParseError("expected a namespace, a handler or both")
    classes = frozenset(listing(choice(CpuClass)).read(raw.get("classes", ["share", "exclusive"])))
    if not classes or CpuClass.NONE in classes:
        raise ParseError("classes: expected share, exclusive or both")
    return AllowRule(
        _pattern(raw.get("namespace", "*")), _pattern(raw.get("handler", "*")), classes
    )


def _pattern(raw: Raw) -> str:
    text = text_of(raw)
    if not text or len(text) > MAX_PATTERN or not text.isascii() or not text.isprintable():
        raise ParseError("expected a name, * and ? match anything", text=text or "(nothing)")
    return text


def _write_rule(rule: AllowRule) -> Raw:
    classes: list[Raw] = [one.value for one in sorted(rule.classes)]
    return {"namespace": rule.namespace, "handler": rule.handler, "classes": classes}


def _read_url(raw: Raw) -> str:
    """Read an http or https address; plain http may not leave this host."""
    text = text_of(raw)
    if not text:
        return ""
    if len(text) > MAX_URL or not text.isascii() or not text.isprintable() or " " in text:
        raise ParseError("not an address", text=text)
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname or "", parts.port
    except ValueError as error:
        raise ParseError("not an address", text=text) from error
    if parts.scheme not in {"http", "https"} or not host or parts.username is not None:
        raise ParseError("expected https://host:port/path", text=text)
    if parts.scheme == "http" and host not in _LOOPBACK:
        raise ParseError("http is for this host only, take https", text=text)
    return text


URL: Final = Kind("an address, https or http on this host", _read_url)

_LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})
MAX_URL: Final = 2048


def _read_optional_path(raw: Raw) -> str:
    return PATH.read(raw) if text_of(raw) else ""


OPTIONAL_PATH: Final = Kind("an absolute path, or nothing", _read_optional_path)

ALLOW_RULE: Final = Kind("a mapping with namespace, handler and classes", _read_rule, _write_rule)


@dataclass(frozen=True)
class Alloc:
    """Our own allocator: which CPUs each container gets."""

    policy: str = setting(
        NAME,
        NO_POLICY,
        "who gets which CPUs. none: kata-pin decides nothing; static: as the kubelet's static "
        "policy; annotation: as pods' annotations and `kata-pin policy set` say; topology: NUMA "
        "nodes and caches are kept together; other names: policies of other packages",
        example="annotation",
    )
    cpus: CpuSet = setting(
        CPUS, EMPTY, "pCPUs that may be given out; empty: those online and not isolated"
    )
    reserved: CpuSet = setting(
        CPUS,
        EMPTY,
        "pCPUs never given to one container alone; they stay in the shared pool",
        example="0-1",
    )
    strict_reserved: bool = setting(
        BOOLEAN, default=False, help_text="keep alloc.reserved out of the shared pool too"
    )
    housekeeping: CpuSet = setting(
        CPUS,
        EMPTY,
        "pCPUs for overhead threads and surplus vCPUs of sandboxes; in no other pool",
        example="0",
    )
    shared_minimum: int = setting(
        integer(0, 8192), 0, "fewest pCPUs that the shared pool may have; 0: those of one core"
    )
    eligibility: Eligibility = setting(
        choice(Eligibility),
        Eligibility.KUBELET,
        "who can have pCPUs of its own, a whole number of them. kubelet: containers of Guaranteed "
        "pods; relaxed: any container whose limit equals its request",
    )
    options: Mapping[str, str] = setting(
        mapping(NAME, NAME),
        MappingProxyType({}),
        "options of the kubelet's static policy, by their names",
        example='{full-pcpus-only: "true"}',
    )
    topology_manager: ManagerPolicy = setting(
        choice(ManagerPolicy),
        ManagerPolicy.NONE,
        "what the kubelet's topologyManagerPolicy is for its static policy, for static and "
        "annotation: the NUMA nodes that each container's exclusive pCPUs are from",
        example="single-numa-node",
    )
    allow: tuple[AllowRule, ...] = setting(
        listing(ALLOW_RULE),
        (),
        "pods that may ask for CPUs by annotation, by namespace and runtime handler; nobody by "
        "default",
        example="[{namespace: shop, handler: kata, classes: [share]}]",
    )
    fail: Fail = setting(
        choice(Fail),
        Fail.BEST_EFFORT,
        "who cannot have what it asks for. best-effort: it runs in the shared pool; strict: its "
        "creation is refused, which needs NRI",
    )
    pin_memory: bool = setting(
        BOOLEAN, default=False, help_text="give containers the memory nodes of their pCPUs too"
    )
    max_sharers: int = setting(
        integer(1, 64), 1, "how many containers of class share may have the same pCPU"
    )
    default_vcpus: int = setting(
        integer(0, 64), 1, "Kata's default_vcpus: vCPUs of a VM beside those of its containers"
    )
    overhead_millis: int = setting(
        integer(0, 64_000),
        250,
        "CPU time of a VM's overhead threads, for pods that tell no overhead",
        unit="thousandths of a CPU",
    )
    own_cpus: int = setting(
        integer(0, 64),
        0,
        "pCPUs that each VM with exclusive ones gets beside them, for overhead and surplus vCPUs",
    )
    pods_url: str = setting(
        URL,
        "",
        "where the kubelet lists its pods, to follow annotations of running ones; empty: they "
        "count when a container is made only",
        example="https://node-7:10250/pods",
    )
    pods_token: str = setting(
        OPTIONAL_PATH,
        "",
        "file with the token that is shown to the kubelet; it needs `get` on nodes/proxy",
        example="/etc/kata-pin/token",
    )
    pods_ca: str = setting(
        OPTIONAL_PATH,
        "",
        "file of the certificate authority that the kubelet's certificate is from; empty: the "
        "host's",
        example="/etc/kubernetes/pki/ca.crt",
    )
    pods_s: float = setting(
        number(1, 3600), 10.0, "time between two looks at alloc.pods_url", unit="seconds"
    )
    push: Push = setting(
        choice(Push),
        Push.AUTO,
        "how cpusets reach containers between two calls of the runtime. auto: at once, by NRI "
        "where the runtime is known to stand it, else by CRI where alloc.cri names its socket; no: "
        "with the runtime's next call",
    )
    cri: str = setting(
        OPTIONAL_PATH,
        "",
        "the runtime's CRI socket, to change cpusets as the kubelet does; empty: not by CRI. Needs "
        "grpcio (`pip install 'kata-pin[cri]'`)",
        example="/run/containerd/containerd.sock",
    )
    orders: str = setting(
        PATH, ORDERS_FILE, "the file of `kata-pin policy set`; watched, and read again on change"
    )

    @property
    def on(self) -> bool:
        """Whether there is an allocator."""
        return self.policy != NO_POLICY

    @property
    def settings(self) -> AllocSettings:
        """The settings that policies need."""
        return AllocSettings(
            cpus=self.cpus or None,
            reserved=self.reserved,
            strict_reserved=self.strict_reserved,
            housekeeping=self.housekeeping,
            shared_min=self.shared_minimum or None,
            eligibility=self.eligibility,
            options=self.options,
            manager=self.topology_manager,
            allow=self.allow,
            strict=self.fail is Fail.STRICT,
            vm=VmSettings(self.default_vcpus, self.overhead_millis, self.own_cpus),
            pin_memory=self.pin_memory,
            max_sharers=self.max_sharers,
        )
