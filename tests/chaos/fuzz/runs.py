"""What one input of a fuzz target runs: the parser, and what every value of it must fulfil."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable
from itertools import pairwise

from kata_pin.base import json_text
from kata_pin.base.cpuset import MAX_CPU, CpuSet
from kata_pin.base.documents.answers import Names
from kata_pin.base.errors import ParseError
from kata_pin.base.values import ContainerState
from kata_pin.guest import probe
from kata_pin.linux import descriptors, interrupts, kernel_text, perf, proc, tracepoints
from kata_pin.linux.events import ProcEvents, _acknowledged
from kata_pin.linux.interrupts import RowCounts
from kata_pin.linux.perf import RunSlices
from kata_pin.linux.tracepoints import Key, Nesting
from kata_pin.options.allocation import orders
from kata_pin.options.allocation.demand import StaticOptions
from kata_pin.options.cluster import values
from kata_pin.peers import containerd, kata, oci, qemu, ttrpc, vmm_cmdline
from kata_pin.peers.agent import messages as agent
from kata_pin.peers.agent.client import parse_address
from kata_pin.peers.kubelet import checkpoint, pods
from kata_pin.peers.nri import messages
from kata_pin.peers.nri.messages import SnapshotParts
from kata_pin.peers.oci import annotations_of
from kata_pin.records import hooks
from kata_pin.rights.broker import pages, protocol, threads, tunables
from kata_pin.rights.broker.protocol import parse_settings
from kata_pin.rights.broker.rows import ROWS
from kata_pin.service import protocol as service_protocol
from kata_pin.service.commands import parse_request
from kata_pin.service.configuration import from_text
from tests.support.hooks import encode

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


def run_broker_requests(data: bytes) -> object:
    """Read a request as the broker does; no accepted argument leads to another path."""
    if not data or data[0] >= len(ROWS):
        raise ParseError("no such row")
    row = ROWS[data[0]]
    try:
        values = row.parse(data[1:])
    except (ValueError, struct.error) as error:
        raise ParseError(str(error)) from error
    assert row.parse(row.pack(values)) == values
    parts = row.parts({**values, "checkpoint": "cpu_manager_state"})
    assert len(parts) == (row.path.count("/") + 1 if row.path else 0)
    assert not {"", ".", ".."} & set(parts)
    assert not any("\0" in part or len(part) > 255 for part in parts)
    return values


def run_broker_settings(data: bytes) -> object:
    """Read a first message."""
    try:
        return parse_settings(data)
    except (ValueError, TypeError, RecursionError) as error:
        raise ParseError(str(error)) from error


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
    for base in config.handlers:
        plugins = containerd.with_handler(config, base, "sized", "/sized.toml")
        assert "sized" in containerd.handler_drop_in(config, config.version, plugins, "sized")
    return config.with_base_specs(specs)


def run_base_spec(data: bytes) -> object:
    """Merge hooks into it: once is as good as twice, and other hooks stay."""
    spec = containerd.parse_spec(data, "spec")
    hooks = {"poststop": [{"path": "/hook"}], "createRuntime": [{"path": "/hook"}]}
    merged = containerd.with_hooks(containerd.without_defaults(spec), hooks, "/hook")
    assert containerd.with_hooks(merged, hooks, "/hook") == merged
    assert containerd.runs_program(containerd.encode_spec(merged), "/hook")
    return containerd.parse_spec(containerd.encode_spec(merged), "merged")


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


def run_jail_path(data: bytes) -> object:
    """Read the path of a jail as the broker does: its parts are names and make it up."""
    path = os.fsdecode(data)
    try:
        base, program, name = threads.parts_of(path)
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
    columns = interrupts.parse_columns(head)
    numbered = [line for line in lines if interrupts.is_numbered(line)]
    rows = [interrupts.parse_row(line, columns) for line in numbered]
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
    slices = RunSlices(0, 1 << 40, 1 << 30, 60)
    slices.add(found.events)
    window = slices.end((1 << 40) + (1 << 30), found.records)
    assert all(one.ran_ns >= 0 for one in window.tasks)
    assert all(0 <= part < 60 for one in window.tasks for part, _ in one.parts)


def run_perf_samples(data: bytes) -> None:
    """Read samples of interrupts, and add up what they say."""
    found = tracepoints.parse_traced(data)
    nested = Nesting()
    for hit in found.hits:
        key: Key = ("softirq", str(hit.number), -1)
        (nested.begin if hit.event & 1 else nested.end)(key, hit.time_ns)
    assert all(one.total_ns >= one.longest_ns >= 0 for one in nested.sums.values())


# ---- hooks and bundles -----------------------------------------------------------------------


def run_hook_stream(data: bytes) -> None:
    whole = hooks.HookDecoder().feed(data)
    cut = hooks.HookDecoder()
    first = cut.feed(data[: len(data) // 2])
    second = None if first is not None else cut.feed(data[len(data) // 2 :])
    if whole is not None and first is None:
        assert second == whole, "cut in two it reads otherwise"
    assert whole is None or encode(whole) == data, "another message"


def run_answers(data: bytes) -> None:
    line = hooks.unpinned(text(data))
    assert line.count(b"\n") == 1, "an answer of two lines"
    assert hooks.refused(text(data)).count(b"\n") == 1, "an answer of two lines"


def run_record(data: bytes) -> None:
    head, _, tail = data.partition(b"\0")
    state = oci.parse_state(head)
    config = oci.parse_config(tail) if tail else None
    for phase in oci.Phase:
        one = oci.record(phase, state, config, stamp_ns=1)
        assert json_text.is_id(one.id), "an id that is none"
        assert json_text.is_id(one.sandbox_id), "a sandbox id that is none"
        one.note.encode()
        assert "\n" not in one.note, "a note of two lines"
        service_protocol.encode({"id": one.id, "note": one.note, "bundle": one.bundle})
        oci.identify(phase, state, config)


def run_ids(data: bytes) -> None:
    word = text(data)
    shown = json_text.printable(word)
    assert shown.isprintable(), "not printable"
    assert len(shown) <= json_text.MAX_SHOWN + 3, "too long for a log"
    assert json_text.one_line(word).isprintable(), "a log line that a terminal would obey"
    shown.encode()
    json_text.is_name(word)
    if json_text.is_id(word):
        assert json_text.check_id(word, source="fuzz") == word
        assert word.isascii(), "an id that is no ASCII"
        assert "/" not in word, "an id that is a path"
    else:
        json_text.check_id(word, source="fuzz")


def run_fields(data: bytes) -> None:
    fields = json_text.load_fields(data, source="fuzz")
    annotations_of(fields, "annotations")
    oci.parse_cpu(fields.fields("linux").fields("resources").fields("cpu"))


# ---- Kata, Kubernetes ------------------------------------------------------------------------


def run_persist(data: bytes) -> None:
    sandbox = kata.parse_persist(data)
    for one in kata.to_containers(sandbox, stamp_ns=1, source="fuzz"):
        assert json_text.is_id(one.id), "an id that is none"
        one.note.encode()


def run_pods(data: bytes) -> None:
    for spec in pods.parse_pods(data).specs.values():
        pods.about_cpus(spec.annotations)


def run_api_answer(data: bytes) -> None:
    message = values.parse_refusal(data)
    message.encode()
    assert message.isprintable(), "a message that a terminal would obey"
    values.is_object_name(text(data))
    values.parse_series(data)
    values.parse_rollout(data)


def run_node_object(data: bytes) -> None:
    """Who writes an object, and a patch that removes one taint and nothing else."""
    values.parse_writers(data, "f:zones")
    patch = values.encode_taint_removal(data, "ours")
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
    command = qemu.parse_qemu(argv)
    assert qemu.parse_qemu_name(argv).sandbox_id == command.sandbox_id
    assert "/" not in command.sandbox_id, "a sandbox id that is a path"
    assert len(command.problems) <= 8, "as many as a hostile line has"
    command.names("p1")
    guest = command.guest
    for index in (0, 1, max(0, guest.maximum - 1)):
        known = qemu.apic_id(guest, index)
        qemu.cpu_index(guest, known)
        place = qemu.place_of(guest, index)
        qemu.index_of(guest, place.socket, place.die, place.core, place.thread)


VMM_PARSERS = {
    name: parse for name, parse in vars(vmm_cmdline).items() if name.startswith("parse_")
}
"""What reads the command lines of VMMs other than QEMU, and of shims."""


def run_other_vmms(data: bytes) -> None:
    argv = proc.parse_cmdline(data)
    for parse in VMM_PARSERS.values():
        assert "/" not in parse(argv).sandbox_id, "a sandbox id that is a path"
    vmm_cmdline.names_sandbox(argv, "p1")


def run_smp(data: bytes) -> None:
    values = proc.parse_cmdline(data) or ("",)
    guest = qemu.parse_smp(values[:4], values[0])
    qemu.parse_numa(guest, values[1:], {"m0": CpuSet([0])})


def run_options(data: bytes) -> None:
    for _, value in vmm_cmdline.options(proc.parse_cmdline(data)):
        found = vmm_cmdline.properties(value, first="x")
        for key in list(found)[:4]:
            vmm_cmdline.number(vmm_cmdline.last(found, key), source="fuzz", high=10)


def run_qmp(data: bytes) -> None:
    qemu.check_answers(json_value(data), None)


def run_qmp_iothreads(data: bytes) -> None:
    qemu.check_answers([], json_value(data))


def run_kvm_names(data: bytes) -> None:
    word = text(data)
    proc.vcpu_of_link(word)
    proc.kernel_worker(word)
    descriptors.interface_of_fdinfo(data)


def run_stat(data: bytes) -> None:
    proc.parse_stat(data)
    kernel_text.parse_starttime(data)


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
    whole = list(ttrpc.FrameDecoder(limit=65536).feed(data))
    cut, size = ttrpc.FrameDecoder(limit=65536), 1 + len(data) // 3
    pieces = (data[start : start + size] for start in range(0, len(data), size))
    found = [frame for piece in pieces for frame in cut.feed(piece)]
    assert found == whole, "cut in pieces it reads otherwise"


def run_nri_stream(data: bytes) -> None:
    frames = ttrpc.FrameDecoder()
    for _, piece in ttrpc.MuxDecoder().feed(data):
        for frame in frames.feed(piece):
            if frame.data is not None:
                messages.parse_event("StateChange", ttrpc.parse_request(frame.data).payload)


def run_nri_event(method: str) -> Run:
    def run(data: bytes) -> None:
        event = messages.parse_event(method, data, tuple(messages.EventKind))
        if event is None:
            return
        state = ContainerState.CREATED
        if event.container is not None:
            one = messages.container_record(
                event.pod, event.container, state, stamp_ns=1, source="nri:fuzz"
            )
        else:
            one = messages.pod_record(event.pod, state, stamp_ns=1, source="nri:fuzz")
        assert json_text.is_id(one.id), "an id that is none"
        assert one.id == (event.container or event.pod).id
        one.note.encode()

    return run


def run_cpuinfo(data: bytes) -> None:
    table = agent.parse_cpuinfo(data)
    assert len(set(table.values())) == len(table) > 0, "two CPUs with one id"


def run_cpu_times(data: bytes) -> None:
    assert agent.parse_cpu_times(text(data))


def run_address(data: bytes) -> None:
    address = parse_address(text(data))
    assert parse_address(str(address)) == address, "not the same again"


def run_nri_configure(data: bytes) -> None:
    messages.updates_problem(messages.parse_configure(data))


def run_nri_synchronize(data: bytes) -> None:
    parts = SnapshotParts()
    parts.feed(data)
    parts.feed(data)


def run_kernel(data: bytes) -> None:
    probe.find_banner(data)
    if not probe.is_vmlinux(data):
        probe.parse_release(data)


# ---- the control sockets, netlink, our own files ---------------------------------------------


def run_control(data: bytes) -> None:
    for line in data.split(b"\n"):
        _, arguments = parse_request(line)
        arguments.text("sandbox")


def run_reply(data: bytes) -> None:
    service_protocol.as_data(service_protocol.decode(service_protocol.parse_reply(data), Names))


def run_reports(data: bytes) -> None:
    service_protocol.encode(json_value(data))


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


def run_orders(data: bytes) -> None:
    assert all(map(orders.is_pod, orders.parse_orders(data))), "an order for what is no pod"


def run_static_options(data: bytes) -> None:
    pairs = (line.partition("=") for line in text(data).split("\n"))
    StaticOptions.parse({name: value for name, _, value in pairs})


def run_settings(data: bytes) -> None:
    try:
        from_text(data.decode("utf-8-sig"))
    except UnicodeDecodeError:  # read_text refuses it before
        return
