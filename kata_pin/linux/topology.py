"""The CPUs of this host from sysfs, or of a captured host."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from kata_pin.base.cpuset import EMPTY, CpuPlace, CpuSet, HostTopology
from kata_pin.base.errors import HostError, ParseError
from kata_pin.linux.files import HostRoot, host_errors, read_bytes, read_once, read_text

# Read again whenever CPUs come or go: nothing is kept. What sysfs leaves out has a documented
# default (a virtual machine may have no NUMA nodes, no cache files, no dies); what is there but is
# not a number or a CPU list is a ParseError that names the file.
#
# Facts are in Documentation/ABI/stable/sysfs-devices-system-cpu and sysfs-devices-node,
# Documentation/admin-guide/cputopology.rst and cgroup-v2.rst (isolated partitions) of the kernel.

CORE_TYPES: Final = {
    "cpu_core": "performance",
    "cpu_atom": "efficient",
    "cpu_lowpower": "low-power",
}
"""The event sources by which the kernel tells the core types of a hybrid part apart."""

_NUMBER: Final = re.compile(r"-?[0-9]{1,9}\Z")
_CACHE: Final = re.compile(r"index[0-9]+\Z")
_NODE: Final = re.compile(r"node([0-9]{1,6})\Z")


def online(root: HostRoot) -> CpuSet:
    """Return the CPUs that are online: one small read.

    Raises HostError when the kernel does not say, ParseError when it makes no sense.
    """
    path = root.sys("devices/system/cpu/online")
    with host_errors("read", path):
        return CpuSet.parse(read_once(path).decode("utf-8", "replace"), source=path)


def isolated(root: HostRoot) -> CpuSet:
    """Return the CPUs that nothing balances: isolated at boot, or now, by a cgroup's partition.

    Only Linux 6.7 and later list the partitions' CPUs. Raises ParseError.
    """
    partitions = _cpus(root, "fs/cgroup/cpuset.cpus.isolated")
    return _cpus(root, "devices/system/cpu/isolated") | partitions


def read_topology(root: HostRoot) -> HostTopology:
    """Return the host's topology; offline CPUs are in `present` only.

    Columns of `distances` follow ascending node numbers, as in the kernel's own rows. Raises
    HostError when there is no list of online CPUs, ParseError naming the file that is damaged.
    """
    up = online(root)
    nodes = _nodes(root)
    node_of = {cpu: node for node in sorted(nodes) for cpu in nodes[node]}
    kinds = _kinds(root)
    return HostTopology(
        cpus=tuple(_cpu(root, cpu, up, node_of.get(cpu, 0), kinds.get(cpu, "")) for cpu in up),
        online=up,
        present=_cpus(root, "devices/system/cpu/present") | up,
        isolated=isolated(root),
        nohz_full=_cpus(root, "devices/system/cpu/nohz_full"),
        distances={node: _distances(root, node) for node in sorted(nodes)},
    )


def _cpu(root: HostRoot, cpu: int, up: CpuSet, node: int, kind: str) -> CpuPlace:
    base = f"devices/system/cpu/cpu{cpu}"
    core = _group(root, f"{base}/topology", ("core_cpus_list", "thread_siblings_list"), cpu, up)
    package = _number(root, f"{base}/topology/physical_package_id", 0)
    llc = _last_level_cache(root, base, cpu, up)
    return CpuPlace(
        cpu,
        node=node,
        package=max(package, 0),  # -1 where the firmware does not say (arm64, some VMs)
        llc=llc.first,
        core=core.first,
        thread=sum(1 for sibling in core if sibling < cpu),
        kind=kind,
    )


def _last_level_cache(root: HostRoot, base: str, cpu: int, up: CpuSet) -> CpuSet:
    """Return the CPUs that share the CPU's highest cache of level 3 or more.

    Without one: its die where the kernel knows dies, else its package (D10 sorts by it).
    """
    best, shared = 2, EMPTY
    for index in _names(root, f"{base}/cache", _CACHE):
        place = f"{base}/cache/{index}"
        level = _number(root, f"{place}/level", 0)
        if level > best and _text(root, f"{place}/type") != "Instruction":
            best, shared = level, _group(root, place, ("shared_cpu_list",), cpu, up)
    wider = ("die_cpus_list", "package_cpus_list", "core_siblings_list")
    return shared or _group(root, f"{base}/topology", wider, cpu, up)


def _group(root: HostRoot, folder: str, names: Iterable[str], cpu: int, up: CpuSet) -> CpuSet:
    """Return the online CPUs that the first of the files which exists lists; alone without any.

    The CPU itself has to be among them: a list that leaves it out describes another CPU.
    """
    for name in names:
        members = _cpus(root, f"{folder}/{name}") & up
        if cpu in members:
            return members
        if members:
            path = root.sys(folder, name)
            raise ParseError(f"does not list CPU {cpu} itself", source=path, text=str(members))
    return CpuSet([cpu])


def _nodes(root: HostRoot) -> dict[int, CpuSet]:
    """Return the CPUs of every NUMA node, those with memory only included."""
    base = "devices/system/node"
    names = _names(root, base, _NODE)
    return {int(name[4:]): _cpus(root, f"{base}/{name}/cpulist") for name in names}


def _distances(root: HostRoot, node: int) -> tuple[int, ...]:
    where = f"devices/system/node/node{node}/distance"
    words = (_text(root, where) or "").split()
    if not all(_NUMBER.match(word) for word in words):
        raise ParseError("not a list of numbers", source=root.sys(where), text=" ".join(words))
    return tuple(int(word) for word in words)


def _kinds(root: HostRoot) -> dict[int, str]:
    return {
        cpu: kind
        for source, kind in CORE_TYPES.items()
        for cpu in _cpus(root, f"devices/{source}/cpus")
    }


def _names(root: HostRoot, folder: str, pattern: re.Pattern[str]) -> list[str]:
    try:
        return [name for name in sorted(os.listdir(root.sys(folder))) if pattern.match(name)]
    except FileNotFoundError:
        return []


def _text(root: HostRoot, where: str) -> str | None:
    """Return a file's text, None if the kernel has no such file."""
    path = root.sys(where)
    try:
        return read_text(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise HostError("read", path, error.errno or 0) from error


def _number(root: HostRoot, where: str, default: int) -> int:
    text = _text(root, where)
    if text is None:
        return default
    if _NUMBER.match(text) is None:
        raise ParseError("not a number", source=root.sys(where), text=text)
    return int(text)


def _cpus(root: HostRoot, where: str) -> CpuSet:
    """Return a file's CPU list, empty if there is none.

    ``(null)`` is what nohz_full says on kernels that have it but were not booted with it.
    """
    text = _text(root, where)
    return CpuSet.parse(text, source=root.sys(where)) if text and text != "(null)" else EMPTY


# A captured host: the topology of another machine, from a file or a folder.
#
# Either a folder with a `sys` in it, as copied from a host, or a listing as `scripts/capture-host`
# prints it: one `path<TAB>content` a line, paths below `sys/`. A listing is grown into a folder
# that is gone when this returns.

MAX_BYTES: Final = 16 * 1024 * 1024
MAX_FILES: Final = 200_000
"""Twenty files each of 8,192 CPUs, and as many again."""

_PLACE: Final = re.compile(r"sys(?:/[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}){1,12}\Z")


def read_capture(path: str) -> HostTopology:
    """Return the captured topology; raises HostError or ParseError naming what is wrong."""
    if os.path.isdir(path):
        return read_topology(HostRoot(path))
    with host_errors("read", path):
        data = read_bytes(path, MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ParseError(f"longer than {MAX_BYTES} bytes", source=path)
    files = _listed(data.decode("utf-8", "replace"), path)
    with TemporaryDirectory(prefix="kata-pin-capture-") as folder:
        with host_errors("unfold", path):  # a file where another line needs a folder, or no room
            for place, content in files.items():
                target = Path(folder, place)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(f"{content}\n", encoding="utf-8")
        return read_topology(HostRoot(folder))


def _listed(text: str, source: str) -> dict[str, str]:
    """Return the files of a listing by their places."""
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > MAX_FILES:
        raise ParseError(f"more than {MAX_FILES} files", source=source)
    files: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        place, tab, content = line.partition("\t")
        if not tab or _PLACE.match(place) is None:
            raise ParseError("not `sys/...<TAB>content`", source=f"{source}:{number}", text=line)
        files[place] = content
    return files
