"""`doctor`: the prerequisites of the node, one row per check."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from kata_pin.base.config.options import function_of, known
from kata_pin.base.config.tree import Config, NewThreads, NriEnabled
from kata_pin.base.documents.document import Daemon
from kata_pin.base.documents.measured import WatchDocument
from kata_pin.base.documents.state import DoctorDocument, Row, State
from kata_pin.base.errors import ConfigError, HostError, KataPinError, TaskGone, reason_of
from kata_pin.base.values import RowStatus, ThreadRole, count, here, in_pod
from kata_pin.cli.doctor import install, sandboxes
from kata_pin.cli.doctor import isolation as doctor_isolation
from kata_pin.cli.node.changes import NodeFiles
from kata_pin.cli.reports import words
from kata_pin.cli.reports.words import within
from kata_pin.linux import process
from kata_pin.linux.cgroup_mounts import CgroupMount, cgroup_mounts
from kata_pin.linux.files import HOST, HostRoot, read_text
from kata_pin.linux.topology import isolated, online
from kata_pin.records.hooks import MAX_SPOOLED, UNINSTALLED
from kata_pin.service.configuration import DEFAULT_FILE

# `doctor`: whether cgroups are visible, and how long sandboxes' threads wait for CPUs.
#
# Without them no cpuset is known, and pins may not be possible. In a container they are visible
# only if it has the host's cgroups and process numbers (ADR 17). Waiting is the kernel's own
# account, which needs no rights: cpu.pressure of cgroup v2 (Documentation/accounting/psi.rst).

WAITS_PERCENT: Final = 10.0
"""Share of a minute in which some thread waited for a CPU, from which on it is a warning."""

_SOME: Final = re.compile(r"some avg10=[0-9.]+ avg60=([0-9.]{1,8}) ")


def pressure(root: HostRoot, state: State) -> Iterator[Row]:
    """Yield in which share of the last minute some thread of each VMM's cgroup waited for a CPU."""
    mounts = [mount for mount in cgroup_mounts(root) if not mount.v1]
    if not mounts:
        yield Row("CPU pressure", "info", "not measured: cgroup v1 has no cpu.pressure")
        return
    if not os.path.exists(root.proc("pressure", "cpu")):
        text = "not measured: pressure stall information (PSI) is off"
        yield Row("CPU pressure", "info", text, "boot with psi=1 (a kernel with CONFIG_PSI)")
        return
    for sandbox in state.sandboxes:
        percent = None if sandbox.vmm is None else _waited(root, mounts, sandbox.vmm.pid)
        if percent is not None:
            name = words.owner(sandbox)
            text = f"some thread waited for a CPU in {percent:.3g} % of the last minute"
            remedy = f"kata-pin top {name} shows which thread waits, and for whom"
            waits = percent >= WAITS_PERCENT
            yield Row("CPU pressure", "warn" if waits else "ok", text, remedy * waits, name)


def _waited(root: HostRoot, mounts: Sequence[CgroupMount], pid: int) -> float | None:
    """Return the share in percent; None if the cgroup does not show it, or once it ended."""
    try:
        entry = process.cgroups(root, pid).unified
    except TaskGone:
        return None
    folders = [mount.folder(entry.path) for mount in mounts] if entry is not None else []
    for folder in filter(None, folders):
        try:
            found = _SOME.match(read_text(os.path.join(folder, "cpu.pressure")))
        except OSError:
            continue
        return float(found[1]) if found else None
    return None


def cgroups(root: HostRoot, state: State | None) -> Iterator[Row]:
    """Yield the cgroup hierarchies with cpusets, and whose cgroups cannot be seen in them."""
    mounts = cgroup_mounts(root)
    if not mounts:
        yield Row("cgroups", "warn", "no cpuset hierarchy is mounted", here(words.CGROUPS))
        return
    processes = {1: ("", "process 1")}
    for one in state.sandboxes if state else ():
        if one.vmm is not None:
            processes[one.vmm.pid] = (words.owner(one), f"the VMM, process {one.vmm.pid},")
    unseen = False
    for pid, (sandbox, name) in processes.items():
        cgroup = _unseen_cgroup(root, mounts, pid)
        if cgroup:
            unseen = True
            text = f"the cgroup of {name} is not visible ({cgroup}): its cpuset is unknown"
            yield Row("cgroups", "fail", text, here(words.CGROUPS), sandbox)
    if not unseen:
        shown = ", ".join(f"{'v1' if m.v1 else 'v2'} at {m.point}" for m in mounts)
        yield Row("cgroups", "ok", shown)


def _unseen_cgroup(root: HostRoot, mounts: Sequence[CgroupMount], pid: int) -> str:
    """Return a process's cgroup if no mount shows it; empty if one does, or the process ended."""
    try:
        entry = process.cgroups(root, pid).cpuset
    except TaskGone:
        return ""
    if entry is None:
        return ""
    if any(m.folder(entry.path) for m in mounts if m.v1 == bool(entry.controllers)):
        return ""
    return entry.path


# Each check is one function that returns a Row or yields some. Nothing is repaired, Kata's sockets
# are not used, and only the self-test writes (a cgroup of its own, removed at once). A check that
# fails to run is a row as well. Sandboxes are in sandboxes.py.

CAPABILITIES: Final[dict[int, tuple[str, RowStatus, str]]] = {
    23: ("CAP_SYS_NICE", "fail", "affinities of other users' threads cannot be set"),
    19: ("CAP_SYS_PTRACE", "fail", "executables of VMMs and KVM file descriptors cannot be read"),
    2: ("CAP_DAC_READ_SEARCH", "warn", "state and bundles of other users cannot be read"),
    12: ("CAP_NET_ADMIN", "info", "required for process events before Linux 6.6"),
}
"""Capabilities by their bit (capability.h): name, status when it is missing, and why."""


class Examined(Struct, frozen=True):
    """What options check (`Option.doctor`).

    `state` is None where it could not be had; `node` is False where only its sandboxes are asked
    for.
    """

    config: Config
    root: HostRoot
    state: State | None
    node: bool = True


Ask = Callable[[str], State]
"""Returns the state document, of one sandbox if one is named; raises KataPinError."""


def examine(
    config: Config,
    ask: Ask,
    watch: Callable[[], WatchDocument],
    *,
    file: str | None = None,
    wrong: ConfigError | None = None,
) -> DoctorDocument:
    """Return the `doctor` document; `ok` is False when a row fails.

    `watch` returns what the daemon saw of exclusive pCPUs; raises DaemonError. `file` is the
    configuration file that was named, if one was, `wrong` what is wrong with it.
    """
    host = HostRoot(HOST.root, debugfs=config.paths.debugfs)
    rows: list[Row] = []
    state = _state(ask, rows)
    checks: list[Check] = [
        lambda: install.installation(config),
        lambda: configuration(file or DEFAULT_FILE, wrong),
        lambda: rights(host),
        lambda: pins(host),
        lambda: cgroups(host, state),
        lambda: debugfs(host, state.daemon.pid if state is not None else None),
        lambda: process_events(config),
        lambda: doctor_isolation.task_switches(host),
        lambda: doctor_isolation.scheduler(host),
        lambda: doctor_isolation.watch(watch),
        lambda: install.hooks(by_nri=_by_nri(state)),
        lambda: install.kubelet(config),
        lambda: install.pod_resources(config),
        lambda: install.dra_claims(config),
        lambda: kata(config),
        lambda: sandboxes.rows(config, state),
        lambda: spool(config),
        lambda: install.programs(state),
        lambda: install.narrow_runtimes(
            online(host) - isolated(host), shims=ThreadRole.SHIM not in config.overhead_roles
        ),
    ]
    if state is not None:
        checks += [
            lambda: reload(state),
            lambda: connections(state, config),
            lambda: cpusets(state),
            lambda: isolation(state),
            lambda: pressure(host, state),
            lambda: doctor_isolation.rows(state, config, host),
        ]
    return _carried_out(checks, rows, Examined(config, host, state))


def examine_sandboxes(
    config: Config, ask: Ask, sandbox_id: str, namespace: str | None
) -> DoctorDocument:
    """Return the `doctor` document of one sandbox, or of those of a namespace, and the daemon."""
    rows: list[Row] = []
    state = _state(ask, rows, sandbox_id)
    if state is not None:
        state = replace(state, sandboxes=tuple(within(state.sandboxes, namespace)))
    return _carried_out([], rows, Examined(config, HOST, state, node=False))


Check = Callable[[], Row | Iterator[Row]]


def _carried_out(checks: Iterable[Check], rows: list[Row], examined: Examined) -> DoctorDocument:
    """Return the document of the rows there are, those of the checks, sandboxes, and options."""
    config, state = examined.config, examined.state
    if state is not None:
        checks = (
            *checks,
            lambda: sandboxes.sandboxes(state, config),
            lambda: sandboxes.guests(state, config),
        )
    for check in checks:
        rows += _guarded(check)
    for option in known(config):
        if option.doctor:
            asked = partial(_of_option, option.doctor, examined)
            rows += _guarded(asked, f" of option {option.name}")
    return DoctorDocument(ok=all(row.status != "fail" for row in rows), rows=tuple(rows))


def _of_option(place: str, examined: Examined) -> Iterator[Row]:
    """Yield an option's rows; what cannot be imported is an error of the check."""
    yield from function_of(place)(examined)


def _guarded(check: Check, of: str = "") -> list[Row]:
    """Run one check; one that fails to run does not stop the others. `of` says whose it is."""
    try:
        found = check()
        return [found] if isinstance(found, Row) else list(found)
    except Exception as error:  # noqa: BLE001 - a fault barrier: options may be of other packages
        return [Row("doctor", "fail", f"a check{of} could not run: {reason_of(error)}")]


def _state(ask: Ask, rows: list[Row], sandbox_id: str = "") -> State | None:
    """Return the state document, and add a row about the daemon."""
    try:
        state = ask(sandbox_id)
    except KataPinError as error:
        rows.append(Row("daemon", "fail", error.message, error.hint))
        return None
    rows.append(daemon_row(state.daemon, wanted=in_pod() or NodeFiles().has_service))
    return state


def daemon_row(daemon: Daemon, *, wanted: bool) -> Row:
    """Return whether the daemon runs and answers; where it is not `wanted`, it need not (D19)."""
    if daemon.running:
        return Row("daemon", "ok", f"running, version {daemon.version}, pid {daemon.pid}")
    if daemon.silent:
        return Row("daemon", "fail", f"hangs: {daemon.reason}", here(words.RESTART))
    status: RowStatus = "fail" if wanted else "warn"
    return Row("daemon", status, f"not running: {daemon.reason}", here(words.START))


def configuration(file: str, wrong: ConfigError | None = None) -> Row:
    """Return whether the configuration file is right, and only root can change it.

    It lists allowed VMMs.
    """
    if wrong is not None:
        remedy = here(words.NEW_CONFIG, file=file)
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
        yield Row("reload", "fail", text, here(words.RELOAD))


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
        yield Row("capabilities", status_word, f"{name} is missing: {why}", here(words.CAPABILITY))


def pins(root: HostRoot) -> Row:
    """Return whether affinities survive a change of the cpuset, by trying it."""
    from kata_pin.linux.affinity import Sticking, pins_stick

    found = pins_stick(root)
    if found.answer is Sticking.STICK:
        return Row("affinities", "ok", "survive cpuset changes")
    lost = "lost on cpuset changes; the daemon sets them again"
    unknown = "unknown whether they survive cpuset changes"
    text = lost if found.answer is Sticking.LOST else unknown
    return Row("affinities", "info", f"{text}: {found.reason}")


def debugfs(root: HostRoot, daemon: int | None = None) -> Row:
    """Return whether KVM's directory in debugfs is readable: the best source of vCPU threads.

    It is read by the daemon of this pid, if there is one, which may have mounts of its own: what
    was mounted here only after its start may not be there.
    """
    mounted = False
    with suppress(OSError):
        mounted = bool(os.listdir(root.path(root.debugfs)))
    theirs = root.proc(daemon or 0, "root")
    if os.access(theirs, os.X_OK):
        root = replace(root, root=theirs)
    mount, path = root.path(root.debugfs), root.debug("kvm")
    try:
        if not os.listdir(mount):
            text = f"not mounted at {mount}; vCPUs are identified by KVM file descriptors"
            remedy = here(words.RESTART if mounted else words.DEBUGFS, mount=root.debugfs)
            return Row("debugfs", "warn", text, remedy)
        vms = sum(1 for name in os.listdir(path) if "-" in name)
    except FileNotFoundError as error:
        return Row("debugfs", "warn", f"{error.filename} does not exist: KVM is not loaded")
    except OSError as error:
        text = f"cannot read {path}: {error.strerror}; vCPUs are identified by KVM file descriptors"
        return Row("debugfs", "warn", text)
    return Row("debugfs", "ok", f"{path} is readable, {count(vms, 'VM')}")


def process_events(config: Config) -> Row:
    """Return whether the kernel reports new threads."""
    from kata_pin.linux.events import ProcEvents

    async def subscribe() -> None:
        events = ProcEvents(frozenset())
        await events.open()
        events.close()

    try:
        asyncio.run(subscribe())
    except HostError as error:
        status: RowStatus = "fail" if config.new_threads is NewThreads.EVENTS else "warn"
        period = f"{config.audit.affinity_s:g} s"
        text = f"{error.message}; new threads are pinned only at the next audit, every {period}"
        return Row("process events", status, text, here(words.EVENTS, hint=error.hint))
    if config.new_threads is NewThreads.AUDIT:
        return Row("process events", "info", "available, disabled by new_threads: audit")
    return Row("process events", "ok", "process connector: available")


def kata(config: Config) -> Iterator[Row]:
    """Yield Kata's configurations with the settings that matter for pinning."""
    from kata_pin.peers.kata import read_kata_configs

    files = read_kata_configs(config.paths.kata_configs)
    if not files:
        looked = ", ".join(config.paths.kata_configs)
        remedy = here(words.KATA_CONFIGS)
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
        return Row("spool", "warn", text, here(words.HOOKS_LEFT))
    left = [name for name in names if name.endswith(".msg")]
    if left:
        text = f"{count(len(left), 'pending message')} in {path}"
        if len(left) >= MAX_SPOOLED:
            text += ", which is full: hooks leave no more"
        return Row("spool", "warn", text, here(words.RESTART))
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
        status: RowStatus = "warn" if config.nri.enabled is NriEnabled.YES else "info"
        yield Row("NRI", status, text, here(words.NRI))
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
