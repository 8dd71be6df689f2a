"""`doctor` for sandboxes.

It reports how threads were identified, the size of VMs, and whether guests can be reached.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import Final

from kata_pin.base.config.tree import Config
from kata_pin.base.cpuset import CpuSet, named_pcpus, pcpus_are, union
from kata_pin.base.documents.document import UNWRITTEN, Note
from kata_pin.base.documents.state import Guest, Network, Row, Sandbox, State, Thread, Vmm
from kata_pin.base.errors import KataPinError
from kata_pin.base.values import KataRuntime, NoteLevel, RowStatus, count, here
from kata_pin.cli.node import containerd
from kata_pin.cli.node.kata_class import INFIX
from kata_pin.cli.reports import findings, words
from kata_pin.cli.reports.activity import read_network
from kata_pin.cli.reports.pcpus import parse
from kata_pin.linux.files import read_text
from kata_pin.peers.kata import KataConfig, KataConfigFile, read_kata_configs
from kata_pin.placement.vm_size import (
    PERIOD_US,
    ContainerCpu,
    Lack,
    PodCpu,
    Sizing,
    Version,
    VmSize,
    exclusive_pod,
    remedies,
    vm_size,
)
from kata_pin.vmm.kinds import QEMU, kind_named

# Pure but for one look at a monitor's path and at the VMM's network. A mode is usable if the cgroup
# of every overhead thread allows a CPU of the mode's set; a VM confined to its own cpuset (D7) can
# use only that.

CERTAIN: Final = frozenset({"debugfs", "qmp", "kvm-fd", "name"})
"""Sources that know a vCPU's index; creation order only infers it (D6)."""

_REMEDIES: Final = {
    "kata": "set enable_vcpus_pinning = false, or vcpus: leave",
    "other": "find the process that sets affinities (taskset, a CPU manager); kata-pin history",
}

_CPUSET: Final = (
    "sandbox_cgroup_only = true in Kata's configuration puts the whole VMM into a cgroup that has"
    " the union of the containers' cpusets"
)
"""Seen with Kata 1.13 (cgroup v1) and 3.21 (v2)."""

LOCKED: Final = "memory-locked"
"""The code of the node's note about processes whose memory is locked."""

_ROW_OF_ITS_OWN: Final = frozenset({"other-writer"})
"""Codes of notes that another row reports."""


def sandboxes(state: State, config: Config) -> Iterator[Row]:
    """Yield the rows of every sandbox, and of processes that keep one from being identified."""
    for note in state.notes:
        if note.code == LOCKED:
            yield Row("processes", "warn", note.text, "cat /proc/PID/task/*/wchan")
        elif note.code == UNWRITTEN:
            yield Row("registry", "fail", note.text, here(words.REGISTRY))
    for sandbox in state.sandboxes:
        name = words.owner(sandbox)
        yield from records(sandbox, name)
        yield from doubles(sandbox, name)
        yield from of_class(sandbox, name)
        if sandbox.vmm is None:
            why = sandbox.vmm_problem or "no VMM process found"
            yield Row("VMM", "warn", why, "allow its executable in hypervisors", name)
            continue
        yield identified(sandbox, name)
        if kind_named(sandbox.vmm.kind).qmp:
            yield monitor(sandbox, sandbox.vmm, config, name)
        yield from claimed(sandbox, name)
        yield from writers(sandbox, name)
        if sandbox.mask:
            yield overhead(sandbox, state, config, name)
            yield confined(sandbox, parse(state.node.online), name)
        yield from network(read_network(sandbox), name)
        for note in sandbox.notes:
            if note.level == "warning" and note.code not in _ROW_OF_ITS_OWN:
                yield Row(note.code, "warn", note.text, "", name)


def records(sandbox: Sandbox, name: str) -> Iterator[Row]:
    """Yield problems with the records of running containers (D4)."""
    for container in sandbox.containers:
        if container.note and container.state not in words.OVER:
            remedy = "see paths.bundle_roots" if "bundle roots" in container.note else ""
            text = f"container {container.name}: {container.note}"
            yield Row("record", "warn", text, remedy, name)


def of_class(sandbox: Sandbox, name: str) -> Iterator[Row]:
    """Yield that a pod of a class by size has another number of exclusive CPUs (`kata-class`)."""
    base, infix, size = sandbox.handler.rpartition(INFIX)
    if not infix or not size.isdecimal() or not sandbox.mask:
        return
    cpus = sum(len(parse(container.exclusive)) for container in sandbox.containers)
    if cpus != int(size):
        text = f"class {sandbox.handler} is for {size}, the pod has {count(cpus, 'exclusive CPU')}"
        remedy = f"kata-pin kata-class --cpus {cpus} --handler {base}" if cpus else f"use {base}"
        yield Row("VM size", "warn", text, remedy, name)


def doubles(sandbox: Sandbox, name: str) -> Iterator[Row]:
    """Yield exclusive CPUs that the kubelet gave to two running containers of the pod.

    A container may have those of an init container, which has ended by then.
    """
    held = [
        (container.name, parse(container.exclusive))
        for container in sandbox.containers
        if container.provenance == "kubelet" and container.state not in words.OVER
    ]
    for (first, cpus), (second, others) in combinations(held, 2):
        if both := cpus & others:
            text = f"{pcpus_are(both)} assigned to {first} and {second}"
            yield Row("kubelet", "warn", text, words.DOUBLE_REMEDY, name)


def claimed(sandbox: Sandbox, name: str) -> Iterator[Row]:
    """Yield CPUs of DRA claims for which the VM has no vCPUs: Kata sizes VMs by limits alone."""
    held = union(
        parse(container.exclusive)
        for container in sandbox.containers
        if container.provenance == "claim" and container.state not in words.OVER
    )
    vcpus = sum(thread.role == "vcpu" for thread in sandbox.threads)
    if vcpus < len(held):
        text = f"{named_pcpus(held)} by DRA claim, and the VM has {count(vcpus, 'vCPU')}"
        remedy = "Kata sizes VMs by CPU limits: set those of the containers to their claims' CPUs"
        yield Row("DRA claims", "warn", text, remedy, name)


def identified(sandbox: Sandbox, name: str) -> Row:
    """Return where the roles of the vCPU threads came from."""
    vcpus = [thread for thread in sandbox.threads if thread.role == "vcpu"]
    if not vcpus:
        return Row("vCPUs", "warn", "no vCPU thread was identified", "", name)
    counts: dict[str, int] = {}
    for thread in vcpus:
        counts[thread.source] = counts.get(thread.source, 0) + 1
    text = f"{len(vcpus)} identified by " + ", ".join(f"{s} ({n})" for s, n in counts.items())
    if any(thread.conflict for thread in vcpus):
        return Row("vCPUs", "warn", f"{text}; sources disagree", "kata-pin explain", name)
    if not counts.keys() <= CERTAIN:
        kvm = sandbox.vmm is not None and sandbox.vmm.kvm
        remedy = here(words.ROLES) if kvm else ""
        why = "their order is inferred" + ("" if kvm else ", as always without KVM")
        return Row("vCPUs", "warn", f"{text}: {why}", remedy, name)
    return Row("vCPUs", "ok", text, "", name)


def writers(sandbox: Sandbox, name: str) -> Iterator[Row]:
    """Yield other processes that set affinities of the sandbox's threads (D13)."""
    for writer in sandbox.writers:
        status: RowStatus = "info" if writer.name == "kata" and not writer.active else "warn"
        yield Row("writer", status, words.writer(writer), _REMEDIES[writer.name], name)


def network(found: Network | None, name: str) -> Iterator[Row]:
    """Yield the interfaces that the VMM has open, with their vhost workers."""
    if found is not None and found.problem:
        yield Row("network", "info", f"interfaces unknown: {found.problem}", "", name)
    for interface in found.interfaces if found else ():
        if interface.attached:
            yield Row("network", "ok", words.interface(interface), "", name)


def monitor(sandbox: Sandbox, vmm: Vmm, config: Config, name: str) -> Row:
    """Return whether QEMU can be queried; the socket that Kata holds is never used (D6)."""
    if not config.qmp.enabled:
        return Row("QMP", "info", "disabled by qmp.enabled", "", name)
    path = os.path.join(config.paths.vc, "vm", sandbox.id, "extra-monitor.sock")
    try:
        there = stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        there = False
    if there:
        return Row("QMP", "ok", f"extra monitor at {path}", "", name)
    text = "QMP socket held by Kata; queried only during the pod's first hook"
    if vmm.runtime == KataRuntime.RUST:
        text = "runtime-rs holds QMP's socket and has no extra monitor: never queried"
    elif vmm.orphan:
        text = "not queried: Kata's shim, which held QMP's socket, has exited"
    return Row("QMP", "info", text, "", name)


def overhead(sandbox: Sandbox, state: State, config: Config, name: str) -> Row:
    """Return which values of the setting `overhead` are usable in this sandbox."""
    threads = [t for t in sandbox.threads if t.role not in {"vcpu", "shim"}]
    online = parse(state.node.online)
    kubelet = state.node.kubelet
    default = parse(kubelet.default) if kubelet and kubelet.policy == "static" else CpuSet()
    sets = {
        "auto (shared CPUs)": parse(sandbox.shared),
        "auto (kubelet's default set)": default,
        "sandbox": parse(sandbox.mask),
        "housekeeping": config.housekeeping,
        "reserve:k": parse(sandbox.exclusive),
    }
    works = [mode for mode, cpus in sets.items() if _reaches(threads, cpus, online)]
    fails = [mode for mode, cpus in sets.items() if cpus and mode not in works]
    text = f"usable modes: {', '.join(works) or 'none'}"
    if fails:
        limits = union(_allowed(thread, online) for thread in threads)
        text += f"; not usable: {', '.join(fails)} (cgroups allow {limits})"
    return Row("overhead", "ok" if works else "warn", text, "", name)


def confined(sandbox: Sandbox, online: CpuSet, name: str) -> Row:
    """Return what keeps the VMM on its pCPUs, should it resist (D5)."""
    text = findings.in_words(sandbox, online)
    if not findings.reachable(sandbox, online):
        return Row("confinement", "ok", text, "", name)
    resists = any(one.name == "other" for one in sandbox.writers)
    remedy = _CPUSET if any(one.cpus for one in sandbox.containers) else ""
    return Row("confinement", "warn" if resists else "info", text, remedy, name)


def _reaches(threads: list[Thread], cpus: CpuSet, online: CpuSet) -> bool:
    """Return whether every thread may run on a CPU of the set."""
    return bool(cpus) and all(not _allowed(t, online).isdisjoint(cpus) for t in threads)


def _allowed(thread: Thread, online: CpuSet) -> CpuSet:
    """Return what the thread's cgroup allows; an unknown cpuset limits nothing."""
    return (parse(thread.cpuset) or online) & online


VHOST_VSOCK: Final = ("/dev/vhost-vsock", "/sys/devices/virtual/misc/vhost-vsock")
"""The host's device, and where a container without the host's devices sees it."""

_STATUS: Final[dict[str, RowStatus]] = {
    "applied": "ok",
    "idle": "ok",
    "off": "info",
    "pending": "info",
    "denied": "warn",
    "unreachable": "warn",
    "failed": "warn",
}

_GUEST_REMEDIES: Final = {
    "denied": "allow UpdateContainerRequest in the pod's policy",
    "unreachable": "kata-pin map shows what is known; guest.enabled: false turns the attempts off",
    "failed": "see kata-pin map, and kata-agent's log in the guest",
}

_UNAFFECTED: Final = "; guest cpusets are not applied, pinning on the host is unaffected"


def guests(state: State, config: Config) -> Iterator[Row]:
    """Yield whether guests can be reached, then the rows of every sandbox."""
    yield reachable(config)
    for sandbox in state.sandboxes:
        guest = sandbox.guest
        if guest is not None and guest.vcpus:
            yield from _sandbox(guest, words.owner(sandbox))


def reachable(config: Config) -> Row:
    """Return whether this host supports vsock, which reaches QEMU's guests."""
    if not config.guest.enabled:
        return Row("guest", "info", "disabled by guest.enabled")
    problem = "" if any(map(os.path.exists, VHOST_VSOCK)) else f"{VHOST_VSOCK[0]} does not exist"
    try:
        socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).close()
    except OSError as error:
        problem = f"no vsock support in this kernel ({error.strerror})"
    if problem:
        text = f"{problem}: guests of QEMU are unreachable"
        return Row("guest", "warn", text, here(words.VSOCK))
    programs = "; guest.exec allows programs to run in guests" if config.guest.exec else ""
    return Row("guest", "ok", f"vsock: available{programs}")


def _sandbox(guest: Guest, name: str) -> Iterator[Row]:
    state = guest.state
    text = words.GUEST_STATES.get(state, state) + (f": {guest.detail}" if guest.detail else "")
    text += _UNAFFECTED if state in {"denied", "unreachable"} else ""
    yield Row("guest", _STATUS.get(state, "info"), text, _GUEST_REMEDIES.get(state, ""), name)
    yield _numbers(guest, name)
    owned = any(one.container for one in guest.vcpus)
    for one in guest.containers:
        if owned and one.cpus is None:
            text = f"container {one.name} may run on any guest CPU: {one.reason}"
            yield Row("guest", "warn", text, "", name)


def _numbers(guest: Guest, name: str) -> Row:
    """Return how well the guest CPU of each vCPU is known."""
    counts: dict[str, int] = {}
    for one in guest.vcpus:
        counts[one.state] = counts.get(one.state, 0) + 1
    text = ", ".join(f"{count} {state}" for state, count in counts.items())
    if counts.keys() <= {"measured", "proven"}:
        return Row("guest CPUs", "ok", text, "", name)
    if not any(one.container for one in guest.vcpus):
        return Row("guest CPUs", "info", text, "", name)
    remedy = "guest.exec: true measures them; guest.act_on_inferred: true uses inferred ones"
    return Row("guest CPUs", "warn", text, remedy, name)


# `doctor` on VM sizes: what pods with exclusive CPUs get by each handler's configuration.

SIZES: Final = (1, 2, 4, 8)
"""Exclusive CPUs of the pods that a row tells about."""

_BEFORE_OVERHEAD: Final = (3, 32)
"""The newest runtime-rs whose configuration has no overhead_vcpus."""

_VERSION: Final = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})\.")


def rows(config: Config, state: State | None) -> Iterator[Row]:
    """Yield a row for each configuration in use."""
    for title, file in configurations(config):
        yield _row(title, file, state)


def of_limit(config: Config, state: State | None, millis: int) -> Iterator[Note]:
    """Yield how many vCPUs a pod gets whose one container has a CPU limit, in thousandths."""
    quota = millis * PERIOD_US // 1000
    pod = PodCpu(quota, PERIOD_US, memory=1 << 30, containers=(ContainerCpu(quota),))
    told = pod if not _is_crio(state) else PodCpu(containers=pod.containers)
    for title, file in configurations(config):
        size = vm_size(sizing_of(file.configs[0], file.path, os.cpu_count() or 1), told)
        yield Note("vm-size", f"{title}: its VM has {count(size.running, 'vCPU')}", NoteLevel.INFO)


def configurations(config: Config) -> Iterator[tuple[str, KataConfigFile]]:
    """Yield the configurations that handlers of containerd name, with their names, else each one.

    Without a handler's name, a configuration has its path.
    """
    files = [file for file in read_kata_configs(config.paths.kata_configs) if file.configs]
    handlers = handlers_by_file()
    named = [file for file in files if file.path in handlers]
    for file in named or files:
        yield ", ".join(handlers.get(file.path, ())) or file.path, file


def handlers_by_file() -> Mapping[str, list[str]]:
    """Return the names of containerd's handlers of Kata by their configuration files.

    Empty where there is no containerd, or none that says its configuration.
    """
    if not shutil.which("containerd"):
        return {}
    try:
        found = containerd.dump(containerd.run_program, containerd.CONFIG)
    except KataPinError:  # `install --containerd` says why; the rows name the files then
        return {}
    names: dict[str, list[str]] = {}
    for handler in found.handlers.values():
        if handler.is_kata and handler.config_path:
            names.setdefault(os.path.realpath(handler.config_path), []).append(handler.name)
    return names


def sizing_of(table: KataConfig, path: str, host_cpus: int) -> Sizing:
    """Return what sizes VMs by a configuration, its values bounded as Kata bounds them."""
    default, most = table.default_vcpus or 1, table.default_maxvcpus or host_cpus
    version = _version(path)
    if not version and table.runtime is KataRuntime.RUST and table.overhead_vcpus is None:
        version = _BEFORE_OVERHEAD
    return Sizing(
        table.runtime,
        table.static_sizing,
        host_cpus if default < 0 else min(default, host_cpus),
        table.overhead_vcpus or 0,
        min(most, host_cpus),
        version,
        template=table.runtime is KataRuntime.RUST and table.static_sizing and table.template,
    )


def _version(path: str) -> Version:
    """Return Kata's version, which its releases keep in a file above share/; empty if unknown."""
    try:
        found = _VERSION.match(read_text(f"{path.partition('/share/')[0]}/VERSION", 100))
    except OSError:
        return ()
    return (int(found[1]), int(found[2])) if found else ()


def _row(title: str, file: KataConfigFile, state: State | None) -> Row:
    table = file.configs[0]
    sizing = sizing_of(table, file.path, os.cpu_count() or 1)
    annotated = not _is_crio(state)
    plain = _sizes(sizing, quota=False, annotated=annotated)
    way = "static" if table.static_sizing else "dynamic"
    way = "VM template" if sizing.template else f"{way} sizing"
    text = (
        f"{title} ({table.runtime}, {table.hypervisor}, {way}): pods with {_listed(SIZES)}"
        f" exclusive CPUs get VMs of {_counts(plain)} vCPUs"
    )
    kept = _sizes(sizing, quota=True, annotated=annotated)
    if _counts(kept) != _counts(plain):
        text += f", or of {_counts(kept)} if they keep a CPU quota"
    failing = [cpus for cpus, size in plain.items() if size.updated is None]
    if failing:
        text += (
            f"; Kata fails updates of pods with {_listed(failing)} (VM larger than their cpuset)"
        )
    lacking = [cpus for cpus, size in plain.items() if size.running < cpus]
    if not failing and not lacking:
        return Row("VM size", "ok", text)
    cpus = max(SIZES)
    lack = Lack(
        table.runtime,
        cpus,
        plain[cpus].running,
        table.hypervisor == QEMU.name and annotated,
        sizing.default_vcpus,
        sizing.template,
    )
    told = "; or ".join(
        f"{row.text(lack)} ({row.path}: {' '.join(row.content(lack).split(chr(10))).strip()})"
        for row in remedies(lack)
    )
    given = state.node.kubelet if state is not None else None
    static = given is not None and given.policy == "static"
    return Row("VM size", "warn" if static or failing else "info", text, told)


def _sizes(sizing: Sizing, *, quota: bool, annotated: bool) -> dict[int, VmSize]:
    pods = {cpus: exclusive_pod(cpus, quota=quota, annotated=annotated) for cpus in SIZES}
    return {cpus: vm_size(sizing, pod) for cpus, pod in pods.items()}


def _counts(sizes: Mapping[int, VmSize]) -> str:
    return _listed(size.running for size in sizes.values())


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _is_crio(state: State | None) -> bool:
    """Whether the runtime, as NRI knows it, is CRI-O, which does not annotate a sandbox's size."""
    nri = state.daemon.nri if state is not None else None
    return nri is not None and nri.runtime.lower().startswith(("cri-o", "crio"))
