"""QEMU: its command line, its answers over QMP, and the APIC ids of the guest's CPUs."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from kata_pin.base.cpuset import CpuSet, union
from kata_pin.base.errors import ParseError, RemoteProtocolError
from kata_pin.base.json_text import is_id
from kata_pin.base.sandbox import GuestTopology
from kata_pin.peers.oci import MAX_PID
from kata_pin.peers.vmm_cmdline import Properties, VmmCommand, last, number, options, properties

# A vCPU's cpu-index, its place in the guest topology, and its APIC id.
#
# KVM calls an x86 vCPU by its APIC id (debugfs `vcpuN`, descriptor `kvm-vcpu:N`), QMP by cpu-index:
# they are compared only after conversion here (D6). Index to place is division by -smp's numbers.
# An APIC id gives each level its own bits, as many as the highest number on that level needs (Intel
# SDM volume 3, "Hierarchical mapping of shared resources"; QEMU include/hw/i386/topology.h,
# x86_apicid_from_cpu_idx), so ids have gaps when a level's count is not a power of two. Kata's Go
# runtime uses sockets only and runtime-rs one socket of single-thread cores: there all three
# numbers are equal. Not covered: EPYC topologies of QEMU 5.0 and 5.1, and other architectures,
# where KVM's vCPU id is the cpu-index itself.


class VcpuPlace(NamedTuple):
    """Where a vCPU sits in its guest."""

    socket: int
    die: int
    core: int
    thread: int


def place_of(guest: GuestTopology, index: int) -> VcpuPlace:
    """Return the place of a cpu-index (x86_topo_ids_from_idx)."""
    rest, thread = divmod(index, max(1, guest.threads))
    rest, core = divmod(rest, max(1, guest.cores))
    socket, die = divmod(rest, max(1, guest.dies))
    return VcpuPlace(socket, die, core, thread)


def index_of(guest: GuestTopology, socket: int, die: int, core: int, thread: int) -> int:
    """Return the cpu-index at a place, the inverse of place_of."""
    return ((socket * guest.dies + die) * guest.cores + core) * guest.threads + thread


def apic_id(guest: GuestTopology, index: int) -> int:
    """Return the APIC id of a cpu-index."""
    place = place_of(guest, index)
    thread_bits, core_bits, die_bits = _widths(guest)
    number = place.socket << die_bits | place.die
    number = number << core_bits | place.core
    return number << thread_bits | place.thread


def cpu_index(guest: GuestTopology, apic: int) -> int | None:
    """Return the cpu-index of an APIC id, None when no vCPU of this guest can have it."""
    thread_bits, core_bits, die_bits = _widths(guest)
    rest, thread = _split(apic, thread_bits)
    rest, core = _split(rest, core_bits)
    socket, die = _split(rest, die_bits)
    inside = (
        apic >= 0
        and thread < guest.threads
        and core < guest.cores
        and die < guest.dies
        and socket < guest.sockets
    )
    return index_of(guest, socket, die, core, thread) if inside else None


def _widths(guest: GuestTopology) -> tuple[int, int, int]:
    """Return the bits for thread, core and die (apicid_bitwidth_for_count)."""
    return _bits_for(guest.threads), _bits_for(guest.cores), _bits_for(guest.dies)


def _bits_for(count: int) -> int:
    return max(0, count - 1).bit_length()


def _split(value: int, bits: int) -> tuple[int, int]:
    return value >> bits, value & ((1 << bits) - 1)


# QEMU's -smp and -numa as a GuestTopology.
#
# The arithmetic is QEMU's (hw/core/machine-smp.c, machine_parse_smp_config): what is left out is
# computed from what is there, cores before sockets since machine version 6.2, sockets before cores
# in older ones. The newest rule is assumed unless -machine names an older version. dies, clusters,
# modules, drawers and books: dies are kept, the others multiply the cores (or sockets) they hold.
# Kata's Go runtime spells everything out; runtime-rs gives only cpus and maxcpus.

MAX_VCPUS: Final = 4096
"""More than any KVM guest can have (KVM_MAX_VCPUS); cpu-index stays below it (D5)."""

MAX_PLACED: Final = 2 * MAX_VCPUS
"""vCPUs that all -numa arguments may place: QEMU places each once."""

MAX_NODES: Final = 128  # QEMU's own limit (MAX_NODES of include/sysemu/numa.h)

_VERSIONED: Final = re.compile(r"-([0-9]{1,2})\.([0-9]{1,2})\Z")


def parse_smp(values: Iterable[str], machine: str = "") -> GuestTopology:
    """Return the topology of all -smp arguments of a command line (QEMU merges them).

    No argument at all is one vCPU. ParseError for numbers above MAX_VCPUS, for more boot vCPUs than
    maxcpus, and for a product that is not maxcpus (QEMU refuses to start with it).
    """
    given: dict[str, int] = {}
    for value in values:
        for key, texts in properties(value, first="cpus").items():
            given[key] = number(texts[-1], source=f"-smp {key}", high=MAX_VCPUS)
    shape = _shape(given, prefer_sockets=_prefers_sockets(machine))
    total = shape.sockets * shape.dies * shape.cores * shape.threads
    maximum = given.get("maxcpus") or given.get("cpus") or total
    boot = given.get("cpus") or maximum
    if not 0 < boot <= maximum <= MAX_VCPUS or total != maximum:
        raise ParseError(
            f"{boot} of {maximum} vCPUs in {total} places do not fit together", source="-smp"
        )
    return replace(shape, boot=boot, maximum=maximum)


def _shape(given: Mapping[str, int], *, prefer_sockets: bool) -> GuestTopology:
    sockets = given.get("sockets", 0)
    cores = given.get("cores", 0)
    threads = given.get("threads", 0)
    dies = given.get("dies") or 1
    above = (given.get("drawers") or 1) * (given.get("books") or 1)
    within = (given.get("clusters") or 1) * (given.get("modules") or 1)
    wanted = given.get("maxcpus") or given.get("cpus") or 0
    fixed = dies * above * within
    if not wanted:
        sockets, cores, threads = sockets or 1, cores or 1, threads or 1
    elif prefer_sockets and not sockets:
        cores, threads = cores or 1, threads or 1
        sockets = wanted // (fixed * cores * threads)
    elif not cores:
        sockets, threads = sockets or 1, threads or 1
        cores = wanted // (fixed * sockets * threads)
    elif not sockets:
        threads = threads or 1
        sockets = wanted // (fixed * cores * threads)
    if not threads:
        threads = wanted // (fixed * sockets * cores)
    return GuestTopology(sockets=sockets * above, dies=dies, cores=cores * within, threads=threads)


def _prefers_sockets(machine: str) -> bool:
    match = _VERSIONED.search(machine)
    return match is not None and (int(match[1]), int(match[2])) < (6, 2)


def parse_numa(
    guest: GuestTopology,
    values: Iterable[str],
    memory: Mapping[str, CpuSet],
    *,
    work: int = MAX_PLACED,
) -> GuestTopology:
    """Return `guest` with the guest nodes of its vCPUs and the host nodes of their memory.

    `values` are the -numa arguments, `memory` the host nodes of each memory backend by id. One node
    means nothing and leaves `numa` empty. Nodes without any `cpus=` get whole sockets in turn, as
    QEMU does on x86 (hw/i386/x86.c, x86_get_default_cpu_node_id). ParseError where the arguments
    place more vCPUs than `work` in all: each may name every vCPU again.
    """
    numa: dict[int, int] = {}
    host_nodes: dict[int, CpuSet] = {}
    count = 0
    for value in values:
        found = properties(value, first="type")
        kind = last(found, "type")
        if kind == "node":
            node = _node(found, "nodeid", count)
            count += 1
            if count > MAX_NODES:
                raise ParseError(f"more than {MAX_NODES} nodes", source="-numa")
            indexes = _indexes(found, guest)
            work = _less(work, len(indexes))
            numa |= dict.fromkeys(indexes, node)
            bound = memory.get(last(found, "memdev"))
            if bound:
                host_nodes[node] = bound
        elif kind == "cpu":
            ranges = _ranges(found, guest)
            work = _less(work, math.prod(len(one) for one in ranges))
            numa |= dict.fromkeys(_matching(ranges, guest), _node(found, "node-id", 0))
    if count <= 1:
        numa = {}
    elif not numa:
        numa = {index: place_of(guest, index).socket % count for index in range(guest.maximum)}
    return replace(guest, numa=numa, host_nodes=host_nodes)


def _node(found: Properties, key: str, default: int) -> int:
    text = last(found, key)
    return number(text, source=f"-numa {key}", high=MAX_NODES - 1) if text else default


def _less(work: int, done: int) -> int:
    """Return what is left of the work; raises ParseError when nothing is."""
    if done > work:
        raise ParseError("the arguments place more vCPUs than are read", source="-numa")
    return work - done


def _indexes(found: Properties, guest: GuestTopology) -> CpuSet:
    """Return the cpu-indexes of `cpus=0-3`, which may be repeated."""
    named = union(CpuSet.parse(text, source="-numa cpus") for text in found.get("cpus", []))
    return named & CpuSet.from_bits((1 << guest.maximum) - 1)


def _ranges(found: Properties, guest: GuestTopology) -> list[range]:
    """Return the sockets, dies, cores and threads of `cpu,socket-id=1`: one left out means all."""
    ranges = []
    for key, count in (
        ("socket-id", guest.sockets),
        ("die-id", guest.dies),
        ("core-id", guest.cores),
        ("thread-id", guest.threads),
    ):
        text = last(found, key)
        only = number(text, source=f"-numa {key}", high=MAX_VCPUS) if text else None
        ranges.append(range(count) if only is None else range(only, min(only + 1, count)))
    return ranges


def _matching(ranges: Sequence[range], guest: GuestTopology) -> Iterator[int]:
    """Yield the cpu-indexes of these sockets, dies, cores and threads."""
    for socket, die, core, thread in itertools.product(*ranges):
        yield index_of(guest, socket, die, core, thread)


# QEMU's command line: which sandbox, and what machine.
#
# A part that cannot be read is a problem in the result and not an error: a hostile -smp must not
# hide a sandbox. Any process can show any line, so a stranger's is read for its name only, and the
# rest is bounded: at most MAX_WORK options, properties and vCPUs of -numa together, about 20 ms.

MAX_IOTHREADS: Final = 1024
MAX_BACKENDS: Final = 1024

MAX_WORK: Final = 8192
"""Options, properties and vCPUs of -numa that are read of one line. Kata's lines have 400."""

MAX_NAMES: Final = 64  # -name options; Kata gives one

_NAME_PREFIX: Final = "sandbox-"
_MAX_CID: Final = (1 << 32) - 1


@dataclass
class _Collected:
    """The arguments of interest, by option, while the line is walked."""

    machine: Properties = field(default_factory=dict)
    accels: list[str] = field(default_factory=list)
    smp: list[str] = field(default_factory=list)
    numa: list[str] = field(default_factory=list)
    memory: dict[str, CpuSet] = field(default_factory=dict)
    iothreads: list[str] = field(default_factory=list)
    guest_cid: int = 0
    kernel: str = ""
    monitor: bool = False
    loads: bool = False
    problems: list[str] = field(default_factory=list)


def parse_qemu_name(argv: Sequence[str]) -> VmmCommand:
    """Return only which sandbox QEMU's arguments name, by `-name sandbox-<id>`.

    Raises ParseError for more than MAX_ARGUMENTS arguments or MAX_NAMES names.
    """
    values = [value for option, value in options(argv) if option == "name"]
    if len(values) > MAX_NAMES:
        raise ParseError(f"more than {MAX_NAMES} names", source="-name")
    found: Properties = {}
    for value in values:
        found |= properties(value, first="guest")
    name = last(found, "guest")
    sandbox_id = name.removeprefix(_NAME_PREFIX)
    is_kata = name != sandbox_id and is_id(sandbox_id)
    return VmmCommand(sandbox_id if is_kata else "")


def parse_qemu(argv: Sequence[str]) -> VmmCommand:
    """Read QEMU's arguments, argv[0] included; raises as parse_qemu_name does.

    `kvm` is whether KVM is the first accelerator.
    """
    named = parse_qemu_name(argv)
    found = _Collected()
    left = MAX_WORK
    for option, value in options(argv):
        left -= 1 + value.count(",")
        if left < 0:
            _complain(found.problems, f"more than {MAX_WORK} options and properties")
            break
        try:
            _collect(found, option, value)
        except ParseError as error:
            _complain(found.problems, str(error))
    return replace(
        named,
        guest=_guest(found, left),
        kvm=_first_accel(found) == "kvm",
        iothreads=tuple(dict.fromkeys(found.iothreads)),
        guest_cid=found.guest_cid,
        kernel=found.kernel,
        monitor=found.monitor,
        loads=found.loads,
        problems=tuple(found.problems),
    )


def _collect(found: _Collected, option: str, value: str) -> None:
    match option:
        case "machine" | "M":
            found.machine |= properties(value, first="type")
        case "accel":
            found.accels.append(last(properties(value, first="accel"), "accel"))
        case "enable-kvm":
            found.accels.append("kvm")
        case "smp":
            found.smp.append(value)
        case "numa":
            found.numa.append(value)
        case "object":
            _collect_object(found, properties(value, first="qom-type"))
        case "device":
            _collect_device(found, properties(value, first="driver"))
        case "kernel":
            found.kernel = value
        case "qmp" | "qmp-pretty":
            found.monitor = True
        case "incoming":
            found.loads = True


def _collect_object(found: _Collected, values: Properties) -> None:
    kind, name = last(values, "qom-type"), last(values, "id")
    if kind == "iothread" and name:
        if len(found.iothreads) >= MAX_IOTHREADS:
            raise ParseError(f"more than {MAX_IOTHREADS} iothreads", source="-object")
        found.iothreads.append(name)
    elif kind.startswith("memory-backend-") and "host-nodes" in values:
        if len(found.memory) >= MAX_BACKENDS:
            raise ParseError(f"more than {MAX_BACKENDS} memory backends", source="-object")
        nodes = (CpuSet.parse(text, source="-object host-nodes") for text in values["host-nodes"])
        found.memory[name] = union(nodes)


def _collect_device(found: _Collected, values: Properties) -> None:
    if last(values, "driver").startswith("vhost-vsock") and "guest-cid" in values:
        cid = number(last(values, "guest-cid"), source="-device guest-cid", low=3, high=_MAX_CID)
        found.guest_cid = cid


def _guest(found: _Collected, work: int) -> GuestTopology:
    """Return the topology; `work` is how many vCPUs -numa may place, below 0 for a line cut off."""
    if work < 0:
        return GuestTopology()
    try:
        guest = parse_smp(found.smp, last(found.machine, "type"))
    except ParseError as error:
        _complain(found.problems, str(error))
        return GuestTopology()
    try:
        return parse_numa(guest, found.numa, found.memory, work=work)
    except ParseError as error:
        _complain(found.problems, str(error))
        return guest


def _first_accel(found: _Collected) -> str:
    """Return the accelerator tried first: `-accel a -accel b`, or `-machine accel=a:b`."""
    names = found.accels or last(found.machine, "accel").split(":")
    return names[0]


def _complain(problems: list[str], text: str) -> None:
    if len(problems) < 8:  # enough to see what is wrong; a hostile line has thousands
        problems.append(text)


# Checks of what QEMU answers over QMP (qemu-qmp-ref(7)).
#
# QEMU runs the tenant's devices, so an answer is a hint: shape and bounds are checked here, and
# whether a thread id is QEMU's own is checked against /proc by the caller (D5). Any violation makes
# the whole answer worthless: RemoteProtocolError.

_Tid = Annotated[int, msgspec.Meta(ge=1, le=MAX_PID)]


class QmpCpu(msgspec.Struct, frozen=True):
    """One entry of query-cpus-fast: `index` is the cpu-index, `thread_id` the host tid."""

    index: Annotated[int, msgspec.Meta(ge=0, lt=MAX_VCPUS)] = msgspec.field(name="cpu-index")
    thread_id: _Tid = msgspec.field(name="thread-id")


class QmpIothread(msgspec.Struct, frozen=True):
    """One entry of query-iothreads."""

    id: Annotated[str, msgspec.Meta(max_length=256)]
    thread_id: _Tid = msgspec.field(name="thread-id")


_Cpus = Annotated[tuple[QmpCpu, ...], msgspec.Meta(max_length=MAX_VCPUS)]
_Iothreads = Annotated[tuple[QmpIothread, ...], msgspec.Meta(max_length=MAX_IOTHREADS)]


class QmpAnswers(msgspec.Struct, frozen=True):
    """All that one session asked."""

    cpus: _Cpus = msgspec.field(name="query-cpus-fast", default=())
    iothreads: _Iothreads = msgspec.field(name="query-iothreads", default=())


def check_answers(cpus: object, iothreads: object) -> QmpAnswers:
    """Check both replies (the values of `return`): every index, id and thread id is there once.

    Raises RemoteProtocolError, also for a key with a lone surrogate, which JSON lets through.
    """
    replies = {"query-cpus-fast": cpus, "query-iothreads": iothreads}
    try:
        answers = msgspec.convert(replies, QmpAnswers)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise RemoteProtocolError(f"QMP answers: {error}") from error
    tids = [cpu.thread_id for cpu in answers.cpus] + [io.thread_id for io in answers.iothreads]
    _check_unique("cpu-index", [cpu.index for cpu in answers.cpus])
    _check_unique("iothread id", [iothread.id for iothread in answers.iothreads])
    _check_unique("thread-id", tids)
    return answers


def _check_unique(what: str, values: Sequence[int | str]) -> None:
    if len(set(values)) != len(values):
        raise RemoteProtocolError(f"QMP answers: the same {what} appears twice")
