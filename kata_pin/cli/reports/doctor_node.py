"""`doctor`: the prerequisites of the node, one row per check.

Each check is one function that returns a Row. Nothing is repaired, Kata's sockets are not used, and
only the self-test writes (a cgroup of its own, removed at once). A check that fails to run is a row
as well. Sandboxes are in doctor_sandbox.py.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Final, Protocol

from kata_pin.cli.node.changes import Node
from kata_pin.cli.reports import (
    doctor_cgroups,
    doctor_guest,
    doctor_install,
    doctor_isolation,
    doctor_kubelet,
    doctor_programs,
    doctor_quiet,
    doctor_sandbox,
    quiet,
    remedies,
    words,
)
from kata_pin.cli.reports.selection import within
from kata_pin.config import DEFAULT_FILE, Config
from kata_pin.config.tree import NewThreads, NriEnabled
from kata_pin.errors import ConfigError, HostError, KataPinError, reason_of
from kata_pin.host.files import read_text
from kata_pin.host.root import HOST, HostRoot
from kata_pin.model.count_noun import count
from kata_pin.model.reports.daemon import Daemon
from kata_pin.model.reports.doctor import DoctorDocument, Row
from kata_pin.model.reports.state import State
from kata_pin.model.reports.watch import WatchDocument
from kata_pin.remedy import here, in_pod
from kata_pin.wire.hook_message import MAX_SPOOLED, UNINSTALLED

CAPABILITIES: Final = {
    23: ("CAP_SYS_NICE", "fail", "affinities of other users' threads cannot be set"),
    19: ("CAP_SYS_PTRACE", "fail", "executables of VMMs and KVM file descriptors cannot be read"),
    2: ("CAP_DAC_READ_SEARCH", "warn", "state and bundles of other users cannot be read"),
    12: ("CAP_NET_ADMIN", "info", "required for process events before Linux 6.6"),
}
"""Capabilities by their bit (capability.h): name, status when it is missing, and why."""


class StateSource(Protocol):
    """Gives the state document."""

    def state(self, sandbox_id: str = "") -> State:
        """Return it, of one sandbox if one is named; raises KataPinError."""

    def watch(self) -> WatchDocument:
        """Return what the daemon saw of exclusive pCPUs; raises DaemonError."""


def examine(
    config: Config,
    provider: StateSource,
    *,
    file: str | None = None,
    wrong: ConfigError | None = None,
    root: HostRoot | None = None,
) -> DoctorDocument:
    """Return the `doctor` document; `ok` is False when a row fails.

    `file` is the configuration file that was named, if one was, `wrong` what is wrong with it.
    """
    host = root or HostRoot(HOST.root, debugfs=config.paths.debugfs)
    rows: list[Row] = []
    state = _state(provider, rows)
    checks: list[Check] = [
        lambda: doctor_install.installation(config),
        lambda: configuration(file or DEFAULT_FILE, wrong),
        lambda: rights(host),
        lambda: pins(host),
        lambda: doctor_cgroups.cgroups(host, state),
        lambda: debugfs(host),
        lambda: process_events(config),
        lambda: doctor_isolation.task_switches(host),
        lambda: doctor_isolation.watch(provider.watch),
        lambda: doctor_isolation.memory_moves(config, host),
        lambda: doctor_install.hooks(by_nri=_by_nri(state)),
        lambda: doctor_kubelet.kubelet(config),
        lambda: doctor_kubelet.pod_resources(config),
        lambda: doctor_kubelet.claims(config),
        lambda: kata(config),
        lambda: spool(config),
        lambda: doctor_programs.programs(state),
    ]
    if state is not None:
        checks += [
            lambda: reload(state),
            lambda: connections(state, config),
            lambda: cpusets(state),
            lambda: isolation(state),
            lambda: quiet.rows(state, config.quiet, host),
            lambda: doctor_quiet.rows(state, config, host),
            *_of_sandboxes(state, config),
        ]
    return _carried_out(checks, rows)


def examine_sandboxes(
    config: Config, provider: StateSource, sandbox_id: str, namespace: str | None
) -> DoctorDocument:
    """Return the `doctor` document of one sandbox, or of those of a namespace, and the daemon."""
    rows: list[Row] = []
    state = _state(provider, rows, sandbox_id)
    if state is None:
        return _carried_out([], rows)
    chosen = replace(state, sandboxes=tuple(within(state.sandboxes, namespace)))
    return _carried_out(_of_sandboxes(chosen, config), rows)


Check = Callable[[], Row | Iterator[Row]]


def _of_sandboxes(state: State, config: Config) -> list[Check]:
    return [
        lambda: doctor_sandbox.sandboxes(state, config),
        lambda: doctor_guest.guests(state, config),
    ]


def _carried_out(checks: Iterable[Check], rows: list[Row]) -> DoctorDocument:
    """Return the document of the rows there are and those of the checks."""
    for check in checks:
        rows += _guarded(check)
    return DoctorDocument(ok=all(row.status != "fail" for row in rows), rows=tuple(rows))


def _guarded(check: Check) -> list[Row]:
    """Run one check; one that fails to run does not stop the others."""
    try:
        found = check()
        return [found] if isinstance(found, Row) else list(found)
    except (KataPinError, OSError) as error:
        return [Row("doctor", "fail", f"a check could not run: {reason_of(error)}")]


def _state(provider: StateSource, rows: list[Row], sandbox_id: str = "") -> State | None:
    """Return the state document, and add a row about the daemon."""
    try:
        state = provider.state(sandbox_id)
    except KataPinError as error:
        rows.append(Row("daemon", "fail", error.message, error.hint))
        return None
    rows.append(daemon_row(state.daemon, wanted=in_pod() or Node().has_service))
    return state


def daemon_row(daemon: Daemon, *, wanted: bool) -> Row:
    """Return whether the daemon runs and answers; where it is not `wanted`, it need not (D19)."""
    if daemon.running:
        return Row("daemon", "ok", f"running, version {daemon.version}, pid {daemon.pid}")
    if daemon.silent:
        return Row("daemon", "fail", f"hangs: {daemon.reason}", here(remedies.RESTART))
    status = "fail" if wanted else "warn"
    return Row("daemon", status, f"not running: {daemon.reason}", here(remedies.START))


def configuration(file: str, wrong: ConfigError | None = None) -> Row:
    """Return whether the configuration file is right, and only root can change it.

    It lists allowed VMMs.
    """
    if wrong is not None:
        remedy = here(remedies.NEW_CONFIG, file=file)
        return Row("configuration", "fail", wrong.message, remedy)
    try:
        status = os.stat(file)
    except FileNotFoundError:
        return Row("configuration", "info", f"{file} does not exist: defaults apply")
    if status.st_uid != 0 or status.st_mode & 0o022:
        text = f"{file} is writable by users other than root"
        return Row("configuration", "warn", text, f"chown root {file}; chmod go-w {file}")
    return Row("configuration", "ok", file)


def reload(state: State) -> Iterator[Row]:
    """Yield a row if the daemon refused the newest configuration."""
    refused = state.daemon.refused
    if refused is not None:
        text = f"refused at {refused.time}, the former one is in force: {refused.error}"
        yield Row("reload", "fail", text, here(remedies.RELOAD))


def rights(root: HostRoot) -> Iterator[Row]:
    """Yield a row for the capabilities of this very process (proc_pid_status(5), CapEff)."""
    status = read_text(root.proc("self", "status"))
    held = next(
        int(line.partition(":")[2], 16) for line in status.splitlines() if line.startswith("CapEff")
    )
    missing = [entry for bit, entry in CAPABILITIES.items() if not held >> bit & 1]
    if not missing:
        names = ", ".join(name for name, _, _ in CAPABILITIES.values())
        yield Row("capabilities", "ok", names)
    for name, status_word, why in missing:
        yield Row(
            "capabilities", status_word, f"{name} is missing: {why}", here(remedies.CAPABILITY)
        )


def pins(root: HostRoot) -> Row:
    """Return whether affinities survive a change of the cpuset, by trying it."""
    from kata_pin.host.self_test import Sticking, pins_stick

    found = pins_stick(root)
    if found.answer is Sticking.STICK:
        return Row("affinities", "ok", "survive cpuset changes")
    lost = "lost on cpuset changes; the daemon sets them again"
    unknown = "unknown whether they survive cpuset changes"
    text = lost if found.answer is Sticking.LOST else unknown
    return Row("affinities", "info", f"{text}: {found.reason}")


def debugfs(root: HostRoot) -> Row:
    """Return whether KVM's directory in debugfs is readable: the best source of vCPU threads."""
    mount, path = root.path(root.debugfs), root.debug("kvm")
    try:
        if not os.listdir(mount):
            text = f"not mounted at {mount}; vCPUs are identified by KVM file descriptors"
            return Row("debugfs", "warn", text, here(remedies.DEBUGFS, mount=mount))
        vms = sum(1 for name in os.listdir(path) if "-" in name)
    except FileNotFoundError as error:
        return Row("debugfs", "warn", f"{error.filename} does not exist: KVM is not loaded")
    except OSError as error:
        text = f"cannot read {path}: {error.strerror}; vCPUs are identified by KVM file descriptors"
        return Row("debugfs", "warn", text)
    return Row("debugfs", "ok", f"{path} is readable, {count(vms, 'VM')}")


def process_events(config: Config) -> Row:
    """Return whether the kernel reports new threads."""
    from kata_pin.sources.process_events import ProcEvents

    async def subscribe() -> None:
        events = ProcEvents(frozenset())
        await events.open()
        events.close()

    try:
        asyncio.run(subscribe())
    except HostError as error:
        status = "fail" if config.new_threads is NewThreads.EVENTS else "warn"
        period = f"{config.audit.affinity_s:g} s"
        text = f"{error.message}; new threads are pinned only at the next audit, every {period}"
        return Row("process events", status, text, here(remedies.EVENTS, hint=error.hint))
    if config.new_threads is NewThreads.AUDIT:
        return Row("process events", "info", "available, disabled by new_threads: audit")
    return Row("process events", "ok", "process connector: available")


def kata(config: Config) -> Iterator[Row]:
    """Yield Kata's configurations with the settings that matter for pinning."""
    from kata_pin.sources.kata_config import read_kata_configs

    files = read_kata_configs(config.paths.kata_configs)
    if not files:
        looked = ", ".join(config.paths.kata_configs)
        remedy = here(remedies.KATA_CONFIGS)
        yield Row("kata", "warn", f"no configuration found in {looked}", remedy)
    for file in files:
        if file.problem:
            yield Row("kata", "warn", f"{file.path}: {file.problem}")
        for table in file.configs:
            facts = [
                f"default_vcpus {table.default_vcpus:g}",
                f"default_maxvcpus {table.default_maxvcpus or 'all'}",
                f"sandbox_cgroup_only {str(table.sandbox_cgroup_only).lower()}",
                f"enable_vcpus_pinning {str(table.vcpu_pinning).lower()}",
                f"static_sandbox_resource_mgmt {str(table.static_sizing).lower()}",
                f"extra monitor {table.extra_monitor if table.debug else ''}".rstrip(),
            ]
            text = f"{file.path} [{table.hypervisor}]: {', '.join(facts)}"
            if table.vcpu_pinning:
                remedy = "set enable_vcpus_pinning = false, or vcpus: leave"
                yield Row("kata", "warn", f"{text}; Kata pins vCPUs too", remedy)
            else:
                yield Row("kata", "ok", text.removesuffix(", extra monitor"))


def spool(config: Config) -> Row:
    """Return whether spooled hook messages are pending."""
    path = os.path.join(config.runtime_dir, "spool")
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return Row("spool", "info", f"{path} does not exist: no spooled messages")
    except OSError as error:
        return Row("spool", "warn", f"cannot read {path}: {error.strerror}")
    if UNINSTALLED in names:
        text = f"kata-pin was uninstalled, and no daemon has run since: hooks do not use {path}"
        return Row("spool", "warn", text, here(remedies.HOOKS_LEFT))
    left = [name for name in names if name.endswith(".msg")]
    if left:
        text = f"{count(len(left), 'pending message')} in {path}"
        if len(left) >= MAX_SPOOLED:
            text += ", which is full: hooks leave no more"
        return Row("spool", "warn", text, here(remedies.RESTART))
    return Row("spool", "ok", f"{path} is empty")


def _by_nri(state: State | None) -> bool:
    nri = state.daemon.nri if state else None
    return nri is not None and nri.connected_s is not None


def connections(state: State, config: Config) -> Iterator[Row]:
    """Yield the NRI connection and the metrics endpoint; nothing without a daemon."""
    daemon = state.daemon
    if not daemon.running:
        return
    nri, metrics = daemon.nri, daemon.metrics
    if nri is None:
        yield Row(
            "NRI", "info", "disabled by nri.enabled: updates of cpusets are read from persist.json"
        )
    elif nri.connected_s is None:
        text = f"{nri.socket}: {nri.problem}; updates of cpusets are read from persist.json"
        status = "warn" if config.nri.enabled is NriEnabled.YES else "info"
        yield Row("NRI", status, text, here(remedies.NRI))
    else:
        since = words.age(nri.connected_s)
        yield Row("NRI", "ok", f"{nri.runtime} on {nri.socket}, connected for {since}")
    if metrics is None:
        yield Row("metrics", "info", "disabled by metrics.listen")
    elif metrics.problem:
        yield Row("metrics", "warn", f"not served: {metrics.problem}", "see metrics.listen")
    else:
        yield Row("metrics", "ok", metrics.address)


def cpusets(state: State) -> Iterator[Row]:
    """Yield how cpusets of the allocator reach containers; nothing if it is off."""
    allocation = state.allocation
    if allocation is None or allocation.push is None or allocation.suspended:
        return
    push = allocation.push
    text = f"changed cpusets {words.way(push)}"
    failed = len(push.failures)
    if push.problem:
        yield Row("cpusets", "warn", f"{text}; pending: {push.problem}")
    elif failed:
        kept = count(failed, "container was", "containers were")
        yield Row("cpusets", "warn", f"{text}; {kept} not changed", "kata-pin pools shows why")
    elif push.channel:
        yield Row("cpusets", "ok", text)
    else:
        yield Row("cpusets", "info", text, "set alloc.cri to the runtime's CRI socket")


def isolation(state: State) -> Row:
    """Return the pCPUs that are excluded from load balancing."""
    node = state.node
    if not node.isolated:
        return Row("isolation", "info", "no isolated CPUs")
    text = f"isolated {node.isolated}: no load balancing, each thread is pinned to one CPU"
    return Row("isolation", "info", text)
