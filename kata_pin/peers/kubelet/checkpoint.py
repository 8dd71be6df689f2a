"""Exclusive CPUs: the kubelet's CPU manager checkpoint, and DRA claims in CDI specs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Final

from msgspec import Struct, field

from kata_pin.base.cpuset import EMPTY, MAX_CPU, CpuSet, union
from kata_pin.base.errors import ParseError, StateError, reason_of
from kata_pin.base.json_text import Fields, load_fields
from kata_pin.base.placement import DoubleAssignment, KubeletState
from kata_pin.linux.owned_files import FileRefused, read_owned, read_state
from kata_pin.rights.calls import DIRECT, Calls

# The kubelet's CPU manager checkpoint (cpu_manager_state), versions 1 to 4, checksum verified.
#
# Format: pkg/kubelet/cm/cpumanager/state/checkpoint.go. The checksum of versions 1 to 3 is FNV-1a
# over Go's dump of the struct, rebuilt here; version 4 hashes the raw text of its `data`. A stored
# checksum of 0 is not checked in versions 1 and 2, as the kubelet does. Keys match in any case, as
# in Go. The kubelet's file is only read; `dump_checkpoint` exports our own state for comparison.

MAX_BYTES: Final = 256 * 1024
"""Longest checkpoint accepted: 250 pods take about 30 KiB, and the hash runs byte by byte."""

MAX_DOUBLES: Final = 16
"""Most pods with doubly assigned CPUs that are named: a file made to hurt could have thousands."""

_SOURCE: Final = "kubelet checkpoint"
_MAX_CHECKSUM: Final = (1 << 64) - 1


class _Content(Struct, frozen=True):
    """The members that all versions share; CPU lists are texts where the dump needs them.

    `entries` has two levels, `flat` the one level of version 1, by container id.
    """

    policy: str
    default: str
    entries: Mapping[str, Mapping[str, str]]
    flat: Mapping[str, str] = field(default_factory=dict)
    pods: Mapping[str, CpuSet] = field(default_factory=dict)
    has_pods: bool = False


def parse_checkpoint(data: bytes) -> KubeletState:
    """Return the checkpoint's state; ParseError if it is damaged or its checksum is wrong.

    Version 1 has no pods: its containers are under the empty pod uid. CPUs that are assigned twice
    are no damage, as the kubelet itself writes them: `doubles` names them.
    """
    outer = load_fields(data, source=_SOURCE, limit=MAX_BYTES).folded()
    version, content = _verified_data(outer) if "data" in outer else _verified_outer(outer)
    entries: dict[str, dict[str, CpuSet]] = {
        pod: {name: _cpus(text, f"entries.{pod}.{name}") for name, text in containers.items()}
        for pod, containers in content.entries.items()
    }
    if content.flat:
        entries[""] = {name: _cpus(text, f"entries.{name}") for name, text in content.flat.items()}
    default = _cpus(content.default, "defaultCpuSet")
    return KubeletState(
        policy=content.policy,
        default=default,
        entries=entries,
        pod_entries=content.pods,
        version=version,
        doubles=tuple(islice(_doubles(default, entries, content.pods), MAX_DOUBLES)),
    )


def dump_checkpoint(state: KubeletState) -> bytes:
    """Return a checkpoint of version 2 (Kubernetes 1.18 to 1.35), as the kubelet would write it.

    Assignments to whole pods are omitted: version 2 has none.
    """
    content = _Content(
        policy=state.policy,
        default=str(state.default),
        entries={
            pod: {name: str(cpus) for name, cpus in sorted(containers.items())}
            for pod, containers in sorted(state.entries.items())
        },
    )
    document: dict[str, object] = {
        "policyName": content.policy,
        "defaultCpuSet": content.default,
        **({"entries": content.entries} if content.entries else {}),
        "checksum": checksum(dict(_dumps(content))[2]),
    }
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


def checksum(text: str) -> int:
    """Return FNV-1a, 32 bit, of the text in UTF-8 (Go's hash/fnv New32a)."""
    value = 0x811C9DC5
    for byte in text.encode():
        value = ((value ^ byte) * 0x01000193) & 0xFFFFFFFF
    return value


def _verified_data(outer: Fields) -> tuple[int, _Content]:
    """Return version 4's content: a document inside a text, with its own checksum."""
    data = outer.text("data", limit=MAX_BYTES)
    stored = outer.need("datachecksum").number("datachecksum", 0, _MAX_CHECKSUM)
    if stored != checksum(f"(string){data}"):
        raise outer.fail("dataChecksum", "does not match the data")
    inner = load_fields(data.encode(), source=f"{_SOURCE}: data", limit=MAX_BYTES)
    return 4, _content(inner.folded())


def _verified_outer(outer: Fields) -> tuple[int, _Content]:
    """Return the content of version 1, 2 or 3: the one whose dump has the checksum."""
    content = _content(outer)
    stored = outer.number("checksum", 0, _MAX_CHECKSUM) or 0
    if stored == 0 and not content.has_pods:
        return (1 if content.flat else 2), content
    for version, dump in _dumps(content):
        if checksum(dump) == stored:
            return version, content
    raise outer.fail("checksum", "does not match the content", str(stored))


def _content(fields: Fields) -> _Content:
    entries = fields.fields("entries")
    pods = fields.fields("podentries")
    flat = all(isinstance(value, str) for value in entries.values())
    return _Content(
        policy=fields.text("policyname", limit=256),
        default=fields.text("defaultcpuset", limit=MAX_BYTES),
        entries={} if flat else {pod: entries.texts(pod) for pod in entries.names},
        flat=fields.texts("entries") if flat else {},
        pods=_pods(pods),
        has_pods="podentries" in fields,
    )


def _doubles(
    default: CpuSet, entries: Mapping[str, Mapping[str, CpuSet]], pods: Mapping[str, CpuSet]
) -> Iterator[DoubleAssignment]:
    """Yield, for each pod, the CPUs that pods before it or the default set have as well.

    The kubelet's writes do not pass through such a state: a CPU leaves one set before it is put in
    another.
    """
    seen = EMPTY
    earlier: dict[str, CpuSet] = {}
    for pod in sorted(entries.keys() | pods.keys()):
        cpus = pods.get(pod, EMPTY) | union(entries.get(pod, {}).values())
        twice = cpus & (seen | default)
        if twice:
            others = [one for one, held in earlier.items() if held & twice]
            yield DoubleAssignment(twice, (*others, pod), in_default=bool(twice & default))
        seen |= cpus
        earlier[pod] = cpus


def _pods(pods: Fields) -> dict[str, CpuSet]:
    """Return the pod-level sets; pods do not share CPUs, so the total is bounded too."""
    found: dict[str, CpuSet] = {}
    total = 0
    for pod in pods.names:
        text = pods.fields(pod).folded().text("cpuset", limit=MAX_BYTES)
        found[pod] = _cpus(text, f"podEntries.{pod}")
        total += len(found[pod])
        if total > MAX_CPU + 1:
            raise pods.fail(pod, "more CPUs than a host can have")
    return found


def _dumps(content: _Content) -> Iterator[tuple[int, str]]:
    """Yield (version, Go's dump of the struct) for each version that the content can be."""
    flat = _go_map(content.flat.items())
    nested = _go_map((pod, _go_map(names.items())) for pod, names in content.entries.items())
    pods = _go_map(
        (pod, f"{{CPUSet:(cpuset.CPUSet){{elems:(map[int]struct {{}}){_go_set(cpus)}}}}}")
        for pod, cpus in content.pods.items()
    )
    old, new = "CPUManagerCheckpoint", "CPUManagerCheckpointV3"
    if not content.has_pods:
        if not content.entries:
            yield 1, _dump(old, content, f"Entries:(map[string]string){flat}")
        if not content.flat:
            yield 2, _dump(old, content, f"Entries:(map[string]map[string]string){nested}")
    if not content.flat:
        members = (
            f"Entries:(map[string]map[string]string){nested} "
            f"PodEntries:(state.PodCPUAssignments){pods}"
        )
        yield 3, _dump(old, content, members)
        yield 3, _dump(new, content, members)


def _dump(struct: str, content: _Content, members: str) -> str:
    return (
        f"(*state.{struct}){{PolicyName:(string){content.policy} "
        f"DefaultCPUSet:(string){content.default} {members} Checksum:(checksum.Checksum)0}}"
    )


def _go_map(items: Iterable[tuple[str, str]]) -> str:
    """Return a map as Go prints it: sorted by the bytes of its keys."""
    ordered = sorted(items, key=lambda item: item[0].encode())
    return "map[" + " ".join(f"{key}:{value}" for key, value in ordered) + "]"


def _go_set(cpus: CpuSet) -> str:
    return "map[" + " ".join(f"{cpu}:{{}}" for cpu in cpus) + "]"


def _cpus(text: str, path: str) -> CpuSet:
    return CpuSet.parse(text, source=f"{_SOURCE}: {path[:120]}")


def read_kubelet(path: str, calls: Calls = DIRECT) -> KubeletState | None:
    """Return the kubelet's CPU assignments, None without such a file (no kubelet here).

    StateError if the file is damaged, has a wrong checksum, or is not a regular file of root's.
    Then the exclusive CPUs are unknown, which is not the same as none being assigned.
    """
    return read_state(path, MAX_BYTES, parse_checkpoint, calls=calls)


# CPUs of DRA claims, from the CDI specs of the DRA driver for CPUs.
#
# The driver (kubernetes-sigs/dra-driver-cpu, pkg/driver/cdi.go) writes a CDI spec of kind
# `dra.k8s.io/cpu` for each prepared claim; its only edit is the variable `DRA_CPUSET_<claim uid>`
# with the claim's CPUs. That is the one place on a node that has them: the kubelet's APIs and
# dra_manager_state name claims, but no CPUs. Specs of other kinds are none of ours.

KIND: Final = "dra.k8s.io/cpu"

_CDI_SOURCE: Final = "CDI spec"
_VARIABLE: Final = re.compile(r"DRA_CPUSET_([0-9a-f-]{36})=(.*)", re.DOTALL)


def parse_claims(data: bytes) -> dict[str, CpuSet]:
    """Return the CPUs of each claim in a CDI spec by the claim's uid; ParseError if damaged.

    No claims for a spec of another kind, and none for a variable without a CPU list.
    """
    spec = load_fields(data, source=_CDI_SOURCE, limit=MAX_BYTES)
    if spec.text("kind") != KIND:
        return {}
    claims: dict[str, CpuSet] = {}
    for device in spec.objects("devices"):
        edits = device.fields("containerEdits")
        for line in edits.items("env"):
            found = _VARIABLE.fullmatch(line) if isinstance(line, str) else None
            with suppress(ParseError):
                if found and (cpus := CpuSet.parse(found[2])):
                    claims[found[1]] = cpus
    return claims


MAX_SPECS: Final = 4096
"""Most files that are read; other drivers' specs are in the same folder."""


def read_claims(folder: str, calls: Calls = DIRECT) -> tuple[dict[str, CpuSet], str]:
    """Return the CPUs of all DRA claims by the claim's uid, and what could not be read.

    A spec that disappears meanwhile has ended. Nothing without such a folder; StateError if it
    cannot be listed.
    """
    claims: dict[str, CpuSet] = {}
    problem = ""
    try:
        names = sorted(name for name in calls.listdir(folder) if name.endswith(".json"))
    except FileNotFoundError:
        return {}, ""
    except OSError as error:
        raise StateError(f"{folder}: {reason_of(error)}") from error
    for name in names[:MAX_SPECS]:
        try:
            claims |= parse_claims(read_owned(f"{folder}/{name}", MAX_BYTES, calls=calls))
        except FileNotFoundError:
            continue
        except (ParseError, FileRefused) as error:
            problem = f"{folder}/{name}: {error}"
        except OSError as error:
            problem = f"{folder}/{name}: {reason_of(error)}"
    if len(names) > MAX_SPECS:
        problem = f"{folder}: more than {MAX_SPECS} specs"
    return claims, problem
