"""What is fuzzed: one target per parser of bytes that others can choose.

A target takes bytes as the parser's caller has them and may raise only the classes of
kata_pin/base/errors.py that the parser documents. `covers` names the functions that it runs; a test
(tests/repo/test_fuzz_targets.py) keeps the list complete.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kata_pin.base import json_text
from kata_pin.base.errors import (
    ConfigError,
    DaemonError,
    KataPinError,
    ParseError,
    RemoteProtocolError,
)
from kata_pin.linux import cgroups as kernel_cgroup
from kata_pin.linux import (
    counters,
    interrupts,
    memory,
    proc,
    process,
    resctrl,
    task_counters,
    tracepoints,
)
from kata_pin.linux.events import is_about_cpu
from kata_pin.options.allocation import orders, requests
from kata_pin.options.cluster import values
from kata_pin.options.quiet import read, services
from kata_pin.peers import cri, kata, oci, ttrpc
from kata_pin.peers.agent import messages
from kata_pin.peers.kubelet import checkpoint, pods
from kata_pin.peers.nri import replies
from kata_pin.records import hooks
from tests.chaos.fuzz import runs
from tests.chaos.fuzz import seeds as s

EXPECTED: Final = (ParseError, RemoteProtocolError)


@dataclass(frozen=True)
class Target:
    """One parser; `seeds` are whole inputs, `words` pieces that inputs of this form are made of."""

    run: runs.Run
    covers: tuple[str, ...]
    seeds: Callable[[], Sequence[bytes]]
    words: tuple[bytes, ...] = ()
    expected: tuple[type[KataPinError], ...] = EXPECTED


def _named(module: str, *names: str) -> tuple[str, ...]:
    return tuple(f"kata_pin.{module}.{name}" for name in names)


def _json_words(*names: str) -> tuple[bytes, ...]:
    words = (b"{", b"}", b"[", b"]", b",", b'""', b"null", b"true", b"-1", b"1e999", b'"\\ud800"')
    return (*words, *(json.dumps(name).encode() + b":" for name in names))


def _kernel(parse: Callable[..., object], pattern: str, *words: bytes) -> Target:
    """Return the target of a parser of the kernel's text; the second argument is CPUs or a size."""
    more: dict[str, tuple[object, ...]] = {
        **dict.fromkeys(("parse_cpu_runs", "parse_cpu_times"), ({0, 1, 3},)),
        **dict.fromkeys(("parse_interrupts", "parse_softirqs"), ({0, 1, 3},)),
        "parse_numa_stat": (4096,),
    }
    return Target(
        lambda data: parse(data, *more.get(parse.__name__, ())),
        _named(parse.__module__.removeprefix("kata_pin."), parse.__name__)
        + _named("linux.proc", "numbers")
        + _named("linux.kernel_text", "check_size", "clipped"),
        lambda: s.kernel_texts(pattern),
        (b"0", b"-1", b"18446744073709551615", b":", b"\n", *words),
    )


STATE_WORDS = _json_words("id", "bundle", "pid", "annotations", "ociVersion", "linux", "resources")
CONFIG_WORDS = _json_words("linux", "resources", "cpu", "cpus", "quota", "shares", "cgroupsPath")
PERSIST_WORDS = _json_words(
    *("HypervisorState", "Config", "ContainerConfigs", "ID", "Annotations", "Resources", "Pid"),
    *("VirtiofsDaemonPid", "EnableVCPUsPinning", "AgentState", "URL", "State", "cpu", "cpus"),
)
QEMU_WORDS = tuple(
    word.encode()
    for word in (
        "\0-smp\0", "\0-numa\0", "\0-name\0", "\0-object\0", "\0-device\0", "\0-machine\0",
        "node,", "cpu,", "cpus=", "sockets=", "cores=", "threads=", "maxcpus=", "socket-id=",
        "node-id=", "memdev=", "host-nodes=", "guest-cid=", "4096", ",,", "sandbox-", '{"driver":',
    )
)  # fmt: skip

AGENT_PARSERS: Final[tuple[Callable[[bytes], object], ...]] = (
    *(messages.parse_metrics,),
    *(messages.parse_usage, messages.parse_read, messages.parse_wait),
)

TARGETS: Final[dict[str, Target]] = {
    "hook-stream": Target(
        runs.run_hook_stream,
        _named("records.hooks", "HookDecoder"),
        lambda: s.HOOKS,
        (b"KP1 ",),
    ),
    "hook-file": Target(hooks.decode, _named("records.hooks", "decode"), lambda: s.HOOKS),
    "hook-answers": Target(
        runs.run_answers, _named("records.hooks", "unpinned", "refused"), lambda: s.ANSWERS
    ),
    "spool-name": Target(
        lambda data: hooks.parse_spool_name(runs.text(data)),
        _named("records.hooks", "parse_spool_name"),
        lambda: [b"123456789-4242.msg"],
    ),
    "state": Target(
        oci.parse_state, _named("peers.oci", "parse_state"), lambda: s.STATES, STATE_WORDS
    ),
    "config-json": Target(
        oci.parse_config,
        _named("peers.oci", "parse_config", "kept"),
        lambda: s.CONFIGS,
        CONFIG_WORDS,
    ),
    "record": Target(
        runs.run_record,
        _named("peers.oci", "record", "identify", "build"),
        lambda: [b"\0".join(pair) for pair in zip(s.STATES, s.CONFIGS, strict=True)],
        STATE_WORDS + CONFIG_WORDS,
    ),
    "ids": Target(
        runs.run_ids,
        _named("base.json_text", "is_id", "check_id", "is_name", "printable", "one_line"),
        lambda: [b"p1", b"a/b"],
    ),
    "json": Target(
        lambda data: json_text.load(data, source="fuzz"),
        _named("base.json_text", "load", "check_bounds"),
        lambda: [*s.STATES, *s.CONFIGS],
        STATE_WORDS,
    ),
    "json-fields": Target(
        runs.run_fields,
        _named("base.json_text", "load_fields", "Fields")
        + _named("peers.oci", "annotations_of", "quiet_keys")
        + _named("peers.oci", "parse_cpu"),
        lambda: [*s.STATES, *s.CONFIGS],
        CONFIG_WORDS,
    ),
    "persist": Target(
        runs.run_persist,
        _named("peers.kata", "parse_persist", "to_containers")
        + _named("peers.oci", "identify_annotated"),
        s.persisted,
        PERSIST_WORDS,
    ),
    "rs-state": Target(
        kata.parse_rs_state,
        _named("peers.kata", "parse_rs_state"),
        s.persisted,
        PERSIST_WORDS,
    ),
    "container-state": Target(
        kata.container_state,
        _named("peers.kata", "container_state"),
        s.persisted,
        PERSIST_WORDS,
    ),
    "kata-config": Target(
        lambda data: kata.parse_kata_config(data.decode("utf-8", "replace")),
        (*_named("peers.kata", "parse_kata_config"), *_named("base.toml_text", "load")),
        lambda: [s.TOML],
        (
            b".a",
            b"[",
            b"]",
            b"[[",
            b"]]",
            b"{",
            b"=",
            b"'''",
            b'"""',
            b"\n",
            b"[a.b]\n",
            b"1.5",
            b"nan",
        ),
    ),
    "containerd-config": Target(
        runs.run_containerd_config,
        _named("peers.containerd", "parse_dump", "parse_imports", "base_specs", "drop_in")
        + _named("peers.containerd", "table_of", "plugin_of", "parse_version", "handler_plugins")
        + _named("peers.containerd", "with_handler", "handler_drop_in"),
        lambda: [s.CONTAINERD_TOML],
        (b"[plugins.", b'"', b"runtimes", b"base_runtime_spec", b"imports", b"version", b"[", b"{"),
    ),
    "base-spec": Target(
        runs.run_base_spec,
        _named("peers.containerd", "parse_spec", "without_defaults", "with_hooks")
        + _named("peers.containerd", "runs_program", "encode_spec"),
        lambda: [s.BASE_SPEC],
        _json_words("hooks", "poststop", "path", "process", "linux"),
    ),
    "checkpoint": Target(
        runs.run_checkpoint,
        _named("peers.kubelet.checkpoint", "parse_checkpoint", "dump_checkpoint", "checksum"),
        s.checkpoints,
        _json_words("policyName", "defaultCpuSet", "entries", "podEntries", "cpuSet", "checksum"),
    ),
    "dra-claims": Target(
        checkpoint.parse_claims,
        _named("peers.kubelet.checkpoint", "parse_claims"),
        lambda: [s.CDI],
        _json_words("kind", "devices", "containerEdits", "env"),
    ),
    "cri-containers": Target(
        cri.parse_containers,
        _named("peers.cri", "parse_containers"),
        lambda: [s.CRI_LIST],
        (b"\x0a", b"\x12", b"\x30\x02"),
    ),
    "token": Target(
        values.parse_token,
        _named("options.cluster.values", "parse_token"),
        lambda: [s.SERVICE_TOKEN],
        (b".", b"e30", b"=", b"-_"),
    ),
    "api-answer": Target(
        runs.run_api_answer,
        _named(
            "options.cluster.values",
            "parse_refusal",
            "parse_series",
            "parse_rollout",
            "is_object_name",
        ),
        lambda: [s.API_STATUS, s.API_EVENT],
        _json_words("kind", "message", "series", "count"),
    ),
    "kubelet-pods": Target(
        pods.parse_listed_pods,
        _named("peers.kubelet.pods", "parse_listed_pods"),
        lambda: [s.KUBELET_PODS],
        (b"\x0a", b"\x62", b"\xa2\x01", b"u1"),
    ),
    "pod-resources": Target(
        lambda data: pods.parse_pod_resources(data, data),
        _named("peers.kubelet.pods", "parse_pod_resources"),
        lambda: [s.POD_RESOURCES],
        (b"\x0a", b"\x12", b"\x18", b"\x10\xff\xff\xff\xff\x0f"),
    ),
    "node-object": Target(
        runs.run_node_object,
        _named("options.cluster.values", "parse_writers", "encode_taint_removal"),
        lambda: [s.API_NODE],
        _json_words("spec", "taints", "key", "metadata", "managedFields", "fieldsV1", "f:zones"),
    ),
    "pod-list": Target(
        runs.run_pods,
        _named("peers.kubelet.pods", "parse_pods", "about_cpus"),
        lambda: [s.PODS],
        _json_words("kind", "items", "metadata", "uid", "annotations"),
    ),
    "qemu": Target(
        runs.run_qemu,
        _named("peers.qemu", "parse_qemu", "parse_qemu_name")
        + _named("peers.qemu", "place_of", "index_of", "apic_id", "cpu_index")
        + _named("linux.proc", "parse_cmdline", "parse_exe"),
        s.command_lines,
        QEMU_WORDS,
    ),
    "other-vmms": Target(
        runs.run_other_vmms,
        _named("peers.vmm_cmdline", *runs.VMM_PARSERS, "names_sandbox"),
        s.command_lines,
        (b"\0--id\0", b"\0-id\0", b"--api-socket=", b"/run/vc/vm/", b"/root/"),
    ),
    "smp": Target(
        runs.run_smp,
        _named("peers.qemu", "parse_smp", "parse_numa"),
        lambda: [
            b"4,sockets=2,cores=1,threads=2\0node,cpus=0-1,memdev=m0\0cpu,node-id=1,core-id=0"
        ],
        QEMU_WORDS,
    ),
    "qemu-options": Target(
        runs.run_options,
        _named("peers.vmm_cmdline", "options", "properties", "last", "number"),
        s.command_lines,
        QEMU_WORDS,
    ),
    "qmp-cpus": Target(
        runs.run_qmp,
        _named("peers.qemu", "check_answers"),
        lambda: [s.QMP_CPUS],
        _json_words("cpu-index", "thread-id", "props", "qom-path", "socket-id", "node-id"),
    ),
    "qmp-iothreads": Target(
        runs.run_qmp_iothreads,
        _named("peers.qemu", "check_answers"),
        lambda: [s.QMP_IOTHREADS],
        _json_words("id", "thread-id"),
    ),
    "stat": Target(
        runs.run_stat,
        _named("linux.proc", "parse_stat") + _named("linux.kernel_text", "parse_starttime"),
        lambda: [s.STAT],
    ),
    "syscall": Target(runs.run_syscall, _named("linux.proc", "parse_syscall"), lambda: s.SYSCALLS),
    "cgroup": Target(runs.run_cgroup, _named("linux.proc", "parse_cgroup"), lambda: s.CGROUPS),
    "status": Target(
        lambda data: proc.status_field(data, "NSpid"),
        _named("linux.proc", "status_field"),
        lambda: s.STATUSES,
    ),
    "kvm-names": Target(
        runs.run_kvm_names,
        _named("linux.proc", "vcpu_of_link", "kernel_worker")
        + _named("linux.descriptors", "interface_of_fdinfo"),
        lambda: [b"anon_inode:kvm-vcpu:3", b"vhost-4242", b"pos:\t0\niff:\ttap0\n"],
    ),
    "perf-ring": Target(
        runs.run_perf_ring,
        _named("linux.perf", "parse_records", "between"),
        s.perf_rings,
        (b"\x0f\0\0\0\0\x20\x28\0", b"\2\0\0\0\0\0\x30\0", b"\xff\xff", bytes(8)),
    ),
    "perf-samples": Target(
        runs.run_perf_samples,
        _named("linux.tracepoints", "parse_traced"),
        s.perf_samples,
        (b"\x09\0\0\0\0\0\x28\0", b"\2\0\0\0\0\0\x18\0", bytes(8)),
    ),
    "hist": Target(
        tracepoints.parse_hist,
        _named("linux.tracepoints", "parse_hist"),
        lambda: [s.HIST],
        (b"{ common_cpu: 1, pid: 2 } hitcount: 3  runtime: 4\n", b"    Dropped: 0\n"),
    ),
    "task-run": _kernel(task_counters.parse_task_run, "*-schedstat"),
    "task-ready": _kernel(task_counters.parse_ready, "*-stat"),
    "task-class": _kernel(counters.parse_scheduling, "*-stat"),
    "task-cpu": _kernel(task_counters.parse_last_cpu, "*-stat"),
    "task-sched": _kernel(task_counters.parse_sched, "*-sched", b"\nse.nr_migrations : 7\n"),
    "task-status": _kernel(task_counters.parse_switches, "*-status"),
    "schedstat": _kernel(counters.parse_cpu_runs, "schedstat", b"version 17\n", b"cpu1 "),
    "cpu-times": _kernel(counters.parse_cpu_times, "stat", b"cpu1 "),
    "interrupts": _kernel(interrupts.parse_interrupts, "interrupts", b"CPU1 ", b"LOC:"),
    "interrupt-rows": Target(
        runs.run_interrupt_rows,
        _named("linux.interrupts", "parse_row", "parse_columns", "is_numbered")
        + _named("linux.interrupts", "recounted"),
        lambda: s.kernel_texts("interrupts"),
        (b"CPU1 ", b"  IO-APIC   1-edge  ", b"\n 24:", b"18446744073709551615"),
    ),
    "cpu-mask": Target(
        lambda data: proc.parse_mask(data, "a mask"),
        _named("linux.proc", "parse_mask"),
        lambda: [b"00000001,0000000f\n", b"ff"],
        (b",", b"00000000", b"ffffffff", b"0x", b"g"),
    ),
    "mountinfo": Target(
        lambda data: process.is_read_only(data, "/proc/irq"),
        _named("linux.process", "is_read_only"),
        lambda: [
            b"21 1 8:1 / / rw - ext4 /dev/vda1 rw\n22 21 0:20 /irq /proc/irq ro - proc proc rw\n"
        ],
        (b" ", b"\n", b"/", b"\\040", b"\\777", b"ro"),
    ),
    "boot-line": Target(
        read.parse_bootline,
        _named("options.quiet.read", "parse_bootline"),
        lambda: [b'ro isolcpus=managed_irq,4-7 dyndbg="file a.c +p" nohz_full=4 -- quiet\n'],
        (b'"', b"=", b" -- ", b"\n", b"nohz-full="),
    ),
    "irqbalance": Target(
        services.parse_setup,
        _named("options.quiet.services", "parse_setup"),
        lambda: [b"SLEEP 10 IRQ 24 LOAD 3 DIFF 0 CLASS 2 BANNED 0000000c"],
        (b"SLEEP ", b"BANNED ", b" 10", b"\0"),
    ),
    "softirqs": _kernel(interrupts.parse_softirqs, "softirqs", b"CPU1 ", b"RCU:"),
    "cpu-stat": _kernel(kernel_cgroup.parse_cpu_stat, "*cpu.stat", b"nr_throttled "),
    "numa-stat": _kernel(memory.parse_numa_stat, "*-memory.numa_stat", b"hierarchical_anon=1"),
    "hugetlb": _kernel(memory.parse_hugetlb, "*MB.numa_stat", b"hierarchical_total=1 "),
    "resctrl-tasks": Target(
        resctrl.parse_tasks,
        _named("linux.resctrl", "parse_tasks"),
        lambda: [b"1000\n1100\n4194303\n"],
        (b"\n", b"-1", b"99999999999"),
    ),
    "resctrl-counter": Target(
        resctrl.parse_counter,
        _named("linux.resctrl", "parse_counter"),
        lambda: [b"1234567890123\n", b"Unavailable\n"],
        (b"Error", b"-1"),
    ),
    "resctrl-domain": Target(
        lambda data: resctrl.l3_domain(data.decode("latin-1")),
        _named("linux.resctrl", "l3_domain"),
        lambda: [b"mon_L3_00", b"mon_sub_L3_01"],
        (b"mon_L3_", b"99999", b"\n"),
    ),
    "numa-maps": _kernel(memory.parse_numa_maps, "*-numa_maps", b" N1=9", b" huge "),
    "mappings": _kernel(
        memory.parse_placed,
        "*-numa_maps",
        b" prefer (many):0",
        b" file=/memfd:",
        b" bind:1",
    ),
    "extents": _kernel(memory.parse_extents, "*-maps", b"-7fff0 rw-s ", b" 00:00 0 \n"),
    "node-meminfo": _kernel(memory.parse_node_meminfo, "*-meminfo", b"Node 1 MemFree: ", b" kB\n"),
    "ttrpc-stream": Target(
        runs.run_ttrpc_stream,
        _named("peers.ttrpc", "FrameDecoder"),
        lambda: [ttrpc.encode_response(1, ttrpc.Response(b"abc")) * 3],
    ),
    "ttrpc-request": Target(
        ttrpc.parse_request, _named("peers.ttrpc", "parse_request", "parsed"), s.envelopes
    ),
    "ttrpc-response": Target(
        ttrpc.parse_response, _named("peers.ttrpc", "parse_response"), s.envelopes
    ),
    "nri-stream": Target(
        runs.run_nri_stream, _named("peers.ttrpc", "MuxDecoder"), lambda: [s.nri_trunk()[:3000]]
    ),
    **{
        f"nri-{method}": Target(
            runs.run_nri_event(method),
            _named("peers.nri.messages", "parse_event", "pod_record", "container_record")
            + _named("peers.nri.messages", "pod_of", "container_of"),
            s.nri_payloads,
        )
        for method in ("StateChange", "CreateContainer", "UpdateContainer", "RunPodSandbox")
    },
    "nri-configure": Target(
        runs.run_nri_configure,
        _named("peers.nri.messages", "parse_configure")
        + _named("peers.nri.messages", "updates_problem"),
        s.nri_payloads,
    ),
    "nri-synchronize": Target(
        runs.run_nri_synchronize,
        _named("peers.nri.messages", "SnapshotParts"),
        s.nri_payloads,
    ),
    "nri-updated": Target(
        replies.parse_update_response,
        _named("peers.nri.replies", "parse_update_response"),
        s.nri_payloads,
    ),
    **{
        f"agent-{parse.__name__.removeprefix('parse_')}": Target(
            parse, (f"{parse.__module__}.{parse.__name__}",), s.agent_answers
        )
        for parse in AGENT_PARSERS
    },
    "guest-cpuinfo": Target(
        runs.run_cpuinfo,
        _named("peers.agent.messages", "parse_cpuinfo"),
        lambda: [s.CPUINFO],
        (b"processor\t: ", b"apicid\t: ", b"\n"),
    ),
    "guest-status": Target(
        messages.parse_allowed, _named("peers.agent.messages", "parse_allowed"), lambda: s.STATUSES
    ),
    "guest-metrics": Target(
        runs.run_cpu_times,
        _named("peers.agent.messages", "parse_cpu_times"),
        lambda: [s.METRICS],
        (b'kata_guest_cpu_time{cpu="', b'",item="user"} ', b"1e309", b"\n"),
    ),
    "guest-kernel": Target(
        runs.run_kernel,
        _named("guest.probe", "find_banner", "is_vmlinux", "parse_release"),
        lambda: [s.BZIMAGE, b"\x7fELF\0Linux version 6.12.47-kata (a@b)"],
        (b"Linux version ", b"HdrS"),
    ),
    "agent-address": Target(
        runs.run_address,
        _named("peers.agent.client", "parse_address"),
        lambda: s.ADDRESSES,
    ),
    "control": Target(
        runs.run_control,
        _named("service.protocol", "check_version") + _named("service.commands", "parse_request"),
        lambda: s.REQUESTS,
        _json_words("version", "verb", "sandbox"),
    ),
    "reply": Target(
        runs.run_reply,
        _named("service.protocol", "parse_reply") + _named("service.protocol", "decode", "as_data"),
        lambda: s.REPLIES,
        _json_words("version", "ok", "document", "sandboxes", "error", "hint"),
        expected=(*EXPECTED, DaemonError),
    ),
    "report-texts": Target(
        runs.run_reports,
        _named("service.protocol", "encode"),
        lambda: [*s.STATES, b'["\\ud800", {"\\udfff": 1}]'],
    ),
    "orders": Target(
        runs.run_orders,
        _named("options.allocation.orders", "parse_orders"),
        lambda: s.ORDERS,
        (b" share\n", b"#"),
    ),
    "order-pod": Target(
        lambda data: orders.is_pod(runs.text(data)),
        _named("options.allocation.orders", "is_pod"),
        lambda: [b"shop/web", b"0c7a4d2be81f"],
    ),
    "allocations": Target(
        requests.parse_state,
        _named("options.allocation.requests", "parse_state"),
        s.allocations,
        _json_words("version", "cpus", "grants", "request", "pod", "exclusive", "reasons"),
    ),
    "process-event": Target(
        runs.run_process_event,
        _named("linux.events", "ProcEvents"),
        s.process_events,
    ),
    "broker-changes": Target(
        runs.run_broker_changes,
        _named("rights.broker.protocol", "parse_changes"),
        s.broker_changes,
        (b"\0\0", b"\1\0", b"\xff\xff", bytes(26)),
    ),
    "broker-answers": Target(
        runs.run_broker_answers,
        _named("rights.broker.protocol", "parse_changed"),
        s.broker_answers,
        (b"\0\0\0\0", b"\1\0", b"\xff\xff"),
    ),
    "broker-requests": Target(
        runs.run_broker_requests,
        _named("rights.broker.rows", "Row"),
        s.broker_requests,
        (b"\0", b"\2\0", b"..", b"/", b"\0\0\0\0", b"\xff\xff\xff\xff"),
    ),
    "broker-settings": Target(
        runs.run_broker_settings,
        _named("rights.broker.protocol", "parse_settings"),
        lambda: [b'{"vmms": ["/usr/bin/qemu"], "vc": "/run/vc", "rt": ["x"], "classes": []}'],
        _json_words("vmms", "shims", "vc", "kata", "bundle_roots", "classes"),
    ),
    "broker-writes": Target(
        runs.run_broker_writes,
        _named("rights.broker.tunables", "parse_writes"),
        lambda: [b"interrupt 24 0-3,8\ndefault-mask  ff,ffffffff"],
        (b"interrupt ", b"default-mask ", b"/", b"..", b"\n", b"0-3"),
    ),
    "broker-pages": Target(
        runs.run_broker_pages,
        _named("rights.broker.pages", "parse_window"),
        s.broker_pages,
        (b"\0\0\0\0", b"\x10\0\0", b"\xff\xff\xff\xff"),
    ),
    "jail-path": Target(
        runs.run_jail_path,
        _named("rights.broker.threads", "parts_of"),
        lambda: [b"/run/vc/firecracker/0123456789abcdef/root", b"/a/../root", b"root"],
        (b"/", b"..", b"/root"),
    ),
    "uevent": Target(is_about_cpu, _named("linux.events", "is_about_cpu"), lambda: s.UEVENTS),
    "cpu-list": Target(
        runs.run_cpu_list,
        _named("base.cpuset", "CpuSet"),
        lambda: s.CPU_LISTS,
        (b"-", b",", b"8191", b"8192", b"999999"),
    ),
    "static-options": Target(
        runs.run_static_options,
        _named("options.allocation.demand", "StaticOptions"),
        lambda: [b"full-pcpus-only=true\nalign-by-socket=false", b"strict-cpu-reservation=1"],
        (b"=true\n", b"distribute-cpus-across-numa", b"distribute-cpus-across-cores"),
        expected=(ConfigError,),
    ),
    "settings": Target(
        runs.run_settings,
        _named("service.configuration", "from_text") + _named("service.configuration", "parse"),
        lambda: [s.YAML],
        (b"- ", b": ", b"\n  ", b"&a ", b"*a", b"!!str ", b"{", b"[", b"|\n", b"---\n", b"? "),
        expected=(ConfigError,),
    ),
}
"""By the name that `scripts/chaos fuzz NAME` takes."""
