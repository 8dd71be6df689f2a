"""What one input of a fuzz target runs: the parser, and what every value of it must fulfil."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable
from itertools import pairwise

from kata_pin.broker import jails, pages, protocol, tunables
from kata_pin.broker.resctrl import KernelFiles, Resctrl
from kata_pin.config.file import from_text
from kata_pin.errors import ParseError
from kata_pin.host.measure.interrupts import Nesting
from kata_pin.host.measure.slices import Slices
from kata_pin.model.cpuset import MAX_CPU, CpuSet
from kata_pin.model.quiet.interrupts import RowCounts
from kata_pin.model.reports.names import Names
from kata_pin.model.sandbox import ContainerState
from kata_pin.policy.alloc.options import StaticOptions
from kata_pin.sources.process_events import ProcEvents, _acknowledged
from kata_pin.wire import (
    container_id,
    containerd,
    control,
    hook_message,
    ids,
    json_text,
    oci,
    proc,
    reports,
    request,
    ttrpc,
    vmm_cmdline,
)
from kata_pin.wire.annotations import annotations_of
from kata_pin.wire.guest import kernel_image
from kata_pin.wire.kata import persist
from kata_pin.wire.kernel import interrupts, perf, perf_raw
from kata_pin.wire.kube import checkpoint, objects, pod_list
from kata_pin.wire.nri import messages as nri
from kata_pin.wire.nri import mux, versions
from kata_pin.wire.nri.synchronize import SnapshotParts
from kata_pin.wire.qemu import apic, cmdline, options, qmp, smp

Run = Callable[[bytes], object]


def run_broker_changes(data: bytes) -> object:
    """Read a request to set affinities as the broker does; what it accepts survives."""
    try:
        changes = protocol.parse_changes(data)
    except (ValueError, struct.error) as error:
        raise ParseError(str(error)) from error
    assert protocol.parse_changes(protocol.render_changes(changes)) == changes
    assert all(one.tgid > 0 and one.tid > 0 for one in changes), "0 is the caller"
    return changes


def run_broker_answers(data: bytes) -> object:
    """Read the broker's answer to such a request."""
    try:
        return protocol.parse_changed(data)
    except (ValueError, struct.error) as error:
        raise ParseError(str(error)) from error


def run_broker_groups(data: bytes) -> object:
    """Read a request about a group of resctrl; no accepted name leads elsewhere."""
    try:
        group = protocol.parse_group(data)
    except (ValueError, struct.error) as error:
        raise ParseError(str(error)) from error
    made: list[str] = []
    resctrl = Resctrl({}, "/top", _Noted(made))
    with contextlib.suppress(OSError):
        resctrl.remove(group.class_name, group.name)
    assert all(
        part.startswith("kata-pin-") or part == "mon_groups"
        for path in made
        for part in path.removeprefix("/top/").split("/")
    )
    return group


def run_containerd_config(data: bytes) -> object:
    """Read it as a file and as a dump; a drop-in for it names our specs and nothing else."""
    text = data.decode("utf-8", "replace")
    containerd.base_specs(text)
    containerd.parse_imports(text)
    version = containerd.parse_version(text, "file")
    plugins = containerd.handler_plugins(text)
    config = containerd.parse_dump(text)
    assert set(config.handlers) <= set(plugins)
    assert containerd.plugin_of(config, version)
    specs = {name: f"/specs/{name}.json" for name in config.handlers}
    assert containerd.base_specs(containerd.drop_in(config, config.version, specs)) == set(
        specs.values()
    )
    return config.with_base_specs(specs)


def run_base_spec(data: bytes) -> object:
    """Merge hooks into it: once is as good as twice, and other hooks stay."""
    spec = containerd.parse_spec(data, "spec")
    hooks = {"poststop": [{"path": "/hook"}], "createRuntime": [{"path": "/hook"}]}
    merged = containerd.with_hooks(containerd.without_defaults(spec), hooks, "/hook")
    assert containerd.with_hooks(merged, hooks, "/hook") == merged
    assert containerd.runs_program(containerd.encode_spec(merged), "/hook")
    return containerd.parse_spec(containerd.encode_spec(merged), "merged")


class _Noted(KernelFiles):
    """Files of which only the removals are noted."""

    def __init__(self, removed: list[str]) -> None:
        self._removed = removed

    def rmdir(self, path: str) -> None:
        """Note it."""
        self._removed.append(path)


def run_broker_writes(data: bytes) -> object:
    """Read a request to write tunables as the broker does: no name leads elsewhere."""
    try:
        writes = tunables.parse_writes(data)
    except ValueError as error:
        raise ParseError(str(error)) from error
    assert tunables.parse_writes(tunables.render_writes(writes)) == writes
    for one in writes:
        assert not set("/.\0\n ") & set(one.name + one.value)
    return writes


def run_broker_written(data: bytes) -> object:
    """Read the broker's answer to such a request."""
    try:
        return tunables.parse_written(data)
    except ValueError as error:
        raise ParseError(str(error)) from error


def run_broker_pages(data: bytes) -> object:
    """Read a request to move pages as the broker does: what it accepts survives and is bounded."""
    try:
        window = pages.parse_window(data)
    except (ValueError, struct.error) as error:
        raise ParseError(str(error)) from error
    assert pages.parse_window(pages.render_window(window)) == window
    assert 0 < window.most <= window.pages <= pages.MAX_PAGES
    assert window.pid > 0, "0 is the caller"
    return window


def run_broker_moved(data: bytes) -> object:
    """Read the broker's answer to such a request."""
    try:
        return pages.parse_moved(data)
    except struct.error as error:
        raise ParseError(str(error)) from error


def run_jail_path(data: bytes) -> object:
    """Read the path of a jail as the broker does: its parts are names and make it up."""
    path = os.fsdecode(data)
    try:
        base, program, name = jails.parts_of(path)
    except ValueError as error:
        raise ParseError(str(error)) from error
    assert f"{base}/{program}/{name}/root" == path
    assert not any("/" in part or part in {"", ".", ".."} for part in (program, name))
    return base


def text(data: bytes) -> str:
    """Return bytes as Python holds a foreign text: bytes that are no UTF-8 become half pairs."""
    return data.decode("utf-8", "surrogateescape")


def json_value(data: bytes) -> object:
    """Return the value of a JSON document, for what is checked after JSON was read."""
    return json_text.load(data, source="fuzz")


def run_interrupt_rows(data: bytes) -> object:
    """Read the rows, and each row again as the newer line of the one before it."""
    head, *lines = data.split(b"\n")
    rows = interrupts.parse_rows(data)
    columns = interrupts.parse_columns(head)
    numbered = [line for line in lines if interrupts.is_numbered(line)]
    for before, line in pairwise(numbered):
        row = interrupts.recounted(interrupts.parse_row(before, columns), before, line)
        if row is not None and isinstance(row.counts, RowCounts):
            with contextlib.suppress(ParseError):
                row.counts.since(interrupts.parse_row(before, columns).counts, columns)
    return rows


def run_perf_ring(data: bytes) -> None:
    """Read a ring whose positions are the first 16 bytes, and add up what it says."""
    (tail, head), area = struct.unpack("=QQ", data[:16].ljust(16, b"\0")), data[16:]
    found = perf.parse_records(perf.between(area, tail, head))
    assert len(found.events) <= found.records <= len(area) // 8
    slices = Slices(0, 1 << 40, 1 << 30, 60)
    slices.take(found.events)
    window = slices.end((1 << 40) + (1 << 30), found.records)
    assert all(one.ran_ns >= 0 for one in window.tasks)
    assert all(0 <= part < 60 for one in window.tasks for part, _ in one.parts)


def run_perf_samples(data: bytes) -> None:
    """Read samples of interrupts, and add up what they say."""
    found = perf_raw.parse_traced(data)
    nested = Nesting()
    for hit in found.hits:
        key = ("softirq", str(hit.number), -1)
        (nested.begin if hit.event & 1 else nested.end)(key, hit.time_ns)
    assert all(one.total_ns >= one.longest_ns >= 0 for one in nested.sums.values())


# ---- hooks and bundles -----------------------------------------------------------------------


def run_hook_stream(data: bytes) -> None:
    whole = hook_message.HookDecoder().feed(data)
    cut = hook_message.HookDecoder()
    first = cut.feed(data[: len(data) // 2])
    second = None if first is not None else cut.feed(data[len(data) // 2 :])
    if whole is not None and first is None:
        assert second == whole, "cut in two it reads otherwise"


def run_answers(data: bytes) -> None:
    line = hook_message.unpinned(text(data))
    assert line.count(b"\n") == 1, "an answer of two lines"
    assert hook_message.refused(text(data)).count(b"\n") == 1, "an answer of two lines"


def run_record(data: bytes) -> None:
    head, _, tail = data.partition(b"\0")
    state = oci.parse_state(head)
    config = oci.parse_config(tail) if tail else None
    for phase in oci.Phase:
        one = container_id.record(phase, state, config, stamp_ns=1)
        assert ids.is_id(one.id), "an id that is none"
        assert ids.is_id(one.sandbox_id), "a sandbox id that is none"
        one.note.encode()
        reports.encode({"id": one.id, "note": one.note, "bundle": one.bundle})
        container_id.identify(phase, state, config)


def run_ids(data: bytes) -> None:
    word = text(data)
    shown = ids.printable(word)
    assert shown.isprintable(), "not printable"
    assert ids.one_line(word).isprintable(), "a log line that a terminal would obey"
    shown.encode()
    ids.is_name(word)
    if ids.is_id(word):
        assert ids.check_id(word, source="fuzz") == word
        assert word.isascii(), "an id that is no ASCII"
        assert "/" not in word, "an id that is a path"
    else:
        ids.check_id(word, source="fuzz")


def run_fields(data: bytes) -> None:
    fields = json_text.load_fields(data, source="fuzz")
    annotations_of(fields, "annotations")
    oci.parse_cpu(fields.fields("linux").fields("resources").fields("cpu"))


# ---- Kata, Kubernetes ------------------------------------------------------------------------


def run_persist(data: bytes) -> None:
    sandbox = persist.parse_persist(data)
    for one in persist.to_containers(sandbox, stamp_ns=1, source="fuzz"):
        assert ids.is_id(one.id), "an id that is none"
        one.note.encode()


def run_pods(data: bytes) -> None:
    for spec in pod_list.parse_pods(data).specs.values():
        pod_list.about_cpus(spec.annotations)


def run_api_answer(data: bytes) -> None:
    message = objects.parse_refusal(data)
    message.encode()
    assert message.isprintable(), "a message that a terminal would obey"
    objects.is_object_name(text(data))
    objects.parse_series(data)
    objects.parse_rollout(data)


def run_node_object(data: bytes) -> None:
    """Who writes an object, and a patch that removes one taint and nothing else."""
    objects.parse_writers(data, "f:zones")
    patch = objects.encode_taint_removal(data, "ours")
    for step in json_text.load(patch, source="patch") if patch else ():  # type: ignore[attr-defined]
        assert step["path"].startswith("/spec/taints/")


def run_checkpoint(data: bytes) -> None:
    state = checkpoint.parse_checkpoint(data)
    checkpoint.dump_checkpoint(state)
    checkpoint.checksum(text(data).encode("utf-8", "replace").decode())


# ---- VMMs ------------------------------------------------------------------------------------


def run_qemu(data: bytes) -> None:
    with contextlib.suppress(ParseError):
        proc.parse_exe(data)
    argv = proc.parse_cmdline(data)
    command = cmdline.parse_qemu(argv)
    assert cmdline.parse_qemu_name(argv).sandbox_id == command.sandbox_id
    assert "/" not in command.sandbox_id, "a sandbox id that is a path"
    command.names("p1")
    guest = command.guest
    for index in (0, 1, max(0, guest.maximum - 1)):
        known = apic.apic_id(guest, index)
        apic.cpu_index(guest, known)
        place = apic.place_of(guest, index)
        apic.index_of(guest, place.socket, place.die, place.core, place.thread)


def run_other_vmms(data: bytes) -> None:
    argv = proc.parse_cmdline(data)
    for parse in (
        vmm_cmdline.parse_cloud_hypervisor,
        vmm_cmdline.parse_firecracker,
        vmm_cmdline.parse_shim,
    ):
        assert "/" not in parse(argv).sandbox_id, "a sandbox id that is a path"
    vmm_cmdline.names_sandbox(argv, "p1")


def run_smp(data: bytes) -> None:
    values = proc.parse_cmdline(data) or ("",)
    guest = smp.parse_smp(values[:4], values[0])
    smp.parse_numa(guest, values[1:], {"m0": CpuSet([0])})


def run_options(data: bytes) -> None:
    for _, value in options.options(proc.parse_cmdline(data)):
        found = options.properties(value, first="x")
        for key in list(found)[:4]:
            options.number(options.last(found, key), source="fuzz", high=10)


def run_qmp(data: bytes) -> None:
    qmp.check_answers(json_value(data), None)


def run_qmp_iothreads(data: bytes) -> None:
    qmp.check_answers([], json_value(data))


def run_kvm_names(data: bytes) -> None:
    word = text(data)
    proc.vcpu_of_link(word)
    proc.kernel_worker(word)
    proc.interface_of_fdinfo(data)


def run_stat(data: bytes) -> None:
    proc.parse_stat(data)
    proc.parse_starttime(data)


def run_syscall(data: bytes) -> None:
    found = proc.parse_syscall(data)
    if found is not None:
        found.kvm_run_fd()


def run_cgroup(data: bytes) -> None:
    found = proc.parse_cgroup(data)
    found.names("p1")
    assert found.paths is not None
    del found


# ---- NRI, ttrpc, the agent -------------------------------------------------------------------


def run_ttrpc_stream(data: bytes) -> None:
    list(ttrpc.FrameDecoder(limit=65536).feed(data))
    cut = ttrpc.FrameDecoder(limit=65536)
    for start in range(0, len(data), 1 + len(data) // 3):
        list(cut.feed(data[start : start + 1 + len(data) // 3]))


def run_nri_stream(data: bytes) -> None:
    frames = ttrpc.FrameDecoder()
    for _, piece in mux.MuxDecoder().feed(data):
        for frame in frames.feed(piece):
            if frame.data is not None:
                nri.parse_event("StateChange", ttrpc.parse_request(frame.data).payload)


def run_nri_event(method: str) -> Run:
    def run(data: bytes) -> None:
        event = nri.parse_event(method, data, tuple(nri.EventKind))
        if event is None:
            return
        state = ContainerState.CREATED
        if event.container is not None:
            one = nri.container_record(
                event.pod, event.container, state, stamp_ns=1, source="nri:fuzz"
            )
        else:
            one = nri.pod_record(event.pod, state, stamp_ns=1, source="nri:fuzz")
        assert ids.is_id(one.id), "an id that is none"
        one.note.encode()

    return run


def run_nri_configure(data: bytes) -> None:
    versions.updates_problem(nri.parse_configure(data))


def run_nri_synchronize(data: bytes) -> None:
    parts = SnapshotParts()
    parts.feed(data)
    parts.feed(data)


def run_kernel(data: bytes) -> None:
    kernel_image.find_banner(data)
    if not kernel_image.is_vmlinux(data):
        kernel_image.parse_release(data)


# ---- the control sockets, netlink, our own files ---------------------------------------------


def run_control(data: bytes) -> None:
    for line in control.LineDecoder().feed(data):
        asked = request.parse_request(line)
        asked.fields.text("sandbox")


def run_reply(data: bytes) -> None:
    reports.as_data(reports.decode(control.parse_reply(data), Names))


def run_reports(data: bytes) -> None:
    reports.encode(json_value(data))


def run_process_event(data: bytes) -> None:
    events = ProcEvents({7})
    piece = data[: len(events._buffer)]
    events._buffer[: len(piece)] = piece
    events._take(len(piece))
    _acknowledged(events._buffer, len(piece), 7)


def run_cpu_list(data: bytes) -> None:
    one = CpuSet.parse(text(data))
    assert not one or max(one) <= MAX_CPU
    assert CpuSet.parse(str(one)) == one, "not the same again"


def run_static_options(data: bytes) -> None:
    pairs = (line.partition("=") for line in text(data).split("\n"))
    StaticOptions.parse({name: value for name, _, value in pairs})


def run_settings(data: bytes) -> None:
    try:
        from_text(data.decode("utf-8-sig"))
    except UnicodeDecodeError:  # read_text refuses it before
        return
