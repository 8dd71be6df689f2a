"""`doctor` for sandboxes: how threads were identified, and which overhead modes are usable.

Pure but for one look at a monitor's path and at the VMM's network. A mode is usable if the cgroup
of every overhead thread allows a CPU of the mode's set; a VM confined to its own cpuset (D7) can
use only that.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from itertools import combinations
from typing import Final

from kata_pin.cli.reports import pcpus, remedies, words
from kata_pin.cli.reports.memory import by_cgroup, far_from_vcpus, remedy
from kata_pin.cli.reports.network import read_network
from kata_pin.cli.reports.pcpus import parse
from kata_pin.config import Config
from kata_pin.model.count_noun import count
from kata_pin.model.cpuset import CpuSet, union
from kata_pin.model.reports.doctor import Row
from kata_pin.model.reports.memory import SandboxMemory
from kata_pin.model.reports.network import Network
from kata_pin.model.reports.sandbox import Sandbox, Thread
from kata_pin.model.reports.state import State
from kata_pin.policy.memory import REMOTE_PERCENT
from kata_pin.remedy import here
from kata_pin.vmm.kinds import kind_named

CERTAIN: Final = frozenset({"debugfs", "qmp", "kvm-fd", "name"})
"""Sources that know a vCPU's index; creation order only infers it (D6)."""

_REMEDIES: Final = {
    "kata": "set enable_vcpus_pinning = false, or vcpus: leave",
    "other": "find the process that sets affinities (taskset, a CPU manager); kata-pin history",
}

LOCKED: Final = "memory-locked"
"""The code of the node's note about processes whose memory is locked."""

_ROW_OF_ITS_OWN: Final = frozenset({"other-writer"})
"""Codes of notes that another row reports."""


def sandboxes(state: State, config: Config) -> Iterator[Row]:
    """Yield the rows of every sandbox, and of processes that keep one from being identified."""
    for note in state.notes:
        if note.code == LOCKED:
            yield Row("processes", "warn", note.text, "cat /proc/PID/task/*/wchan")
    memories = by_cgroup(state)
    for sandbox in state.sandboxes:
        name = words.owner(sandbox)
        yield from records(sandbox, name)
        yield from doubles(sandbox, name)
        if sandbox.vmm is None:
            why = sandbox.vmm_problem or "no VMM process found"
            yield Row("VMM", "warn", why, "allow its executable in hypervisors", name)
            continue
        yield identified(sandbox, name)
        if kind_named(sandbox.vmm.kind).qmp:
            yield monitor(sandbox, config, name)
        yield from claimed(sandbox, name)
        yield from writers(sandbox, name)
        if sandbox.mask:
            yield overhead(sandbox, state, config, name)
        yield from network(read_network(sandbox), name)
        yield from remote_memory(memories[sandbox.id], name)
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
            which = f"{pcpus.named(both)} {'is' if len(both) == 1 else 'are'}"
            text = f"{which} assigned to {first} and {second}"
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
        text = f"{pcpus.named(held)} by DRA claim, and the VM has {count(vcpus, 'vCPU')}"
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
        remedy = here(remedies.ROLES) if kvm else ""
        why = "their order is inferred" + ("" if kvm else ", as always without KVM")
        return Row("vCPUs", "warn", f"{text}: {why}", remedy, name)
    return Row("vCPUs", "ok", text, "", name)


def writers(sandbox: Sandbox, name: str) -> Iterator[Row]:
    """Yield other processes that set affinities of the sandbox's threads (D13)."""
    for writer in sandbox.writers:
        status = "info" if writer.name == "kata" and not writer.active else "warn"
        yield Row("writer", status, words.writer(writer), _REMEDIES[writer.name], name)


def remote_memory(found: SandboxMemory, name: str) -> Iterator[Row]:
    """Yield a warning where much of a sandbox's memory is far from its vCPUs.

    Why the daemon cannot move it is a note of the sandbox.
    """
    moving = found.move is not None and found.move.state in {"moving", "stopped"}
    if (found.remote_percent or 0) >= REMOTE_PERCENT and not moving:
        yield Row("memory", "warn", far_from_vcpus(found), remedy(found), name)


def network(found: Network | None, name: str) -> Iterator[Row]:
    """Yield the interfaces that the VMM has open, with their vhost workers."""
    if found is not None and found.problem:
        yield Row("network", "info", f"interfaces unknown: {found.problem}", "", name)
    for interface in found.interfaces if found else ():
        if interface.attached:
            yield Row("network", "ok", words.interface(interface), "", name)


def monitor(sandbox: Sandbox, config: Config, name: str) -> Row:
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


def _reaches(threads: list[Thread], cpus: CpuSet, online: CpuSet) -> bool:
    """Return whether every thread may run on a CPU of the set."""
    return bool(cpus) and all(not _allowed(t, online).isdisjoint(cpus) for t in threads)


def _allowed(thread: Thread, online: CpuSet) -> CpuSet:
    """Return what the thread's cgroup allows; an unknown cpuset limits nothing."""
    return (parse(thread.cpuset) or online) & online
