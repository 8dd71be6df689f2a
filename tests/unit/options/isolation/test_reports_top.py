"""Top documents of real threads, and of nodes that hide something."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from kata_pin.base.documents.state import Cache, State
from kata_pin.cli.render.layout import Output
from kata_pin.linux.files import HOST, HostRoot
from kata_pin.options.isolation import rates, top
from kata_pin.options.isolation.rates import Sampler
from kata_pin.options.isolation.top import Meter
from kata_pin.options.isolation.top_render import once
from tests.support.hosttree import grow
from tests.support.played_threads import played
from tests.unit.cli import documents as docs

RUN = "100 0 1"
STAT = f"4101 (qemu) S {' '.join(['0'] * 18)} 100 {' '.join(['0'] * 16)} 4 0 0 0"
INTERRUPTS = "  CPU4\nLOC:  {}  Local timer interrupts\nRES: 0 Rescheduling interrupts"


@contextmanager
def meter(state: State, root: HostRoot, *, threads: bool = False) -> Iterator[Meter]:
    with closing(Meter(lambda: state, Sampler(root, 100), threads=threads)) as found:
        yield found


def tree(folder: Path, files: Mapping[str, str]) -> HostRoot:
    """Return a node with the thread 4101 of documents.py."""
    task = "proc/4100/task/4101"
    whole = {
        f"{task}/schedstat": RUN,
        f"{task}/stat": STAT,
        f"{task}/sched": "\nnr_involuntary_switches : 5\nse.nr_migrations : 1",
        f"{task}/cgroup": "0::/pod",
        "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
        "sys/fs/cgroup/pod/cpu.stat": "nr_throttled 1\nthrottled_usec 0",
        "proc/stat": "cpu4 0 0 0 100 0 0 0 0 0 0",
        "proc/interrupts": INTERRUPTS.format(100),
        "proc/softirqs": "  CPU4\n RCU: 7",
        "proc/schedstat": "version 17\ncpu4 0 0 0 0 0 0 0 0 10",
    }
    return grow(folder, {**whole, **files})


def one() -> State:
    """Return a state of one vCPU with the exclusive pCPU 4."""
    vcpu = docs.thread(4101, "vcpu", "4", vcpu=0)
    return docs.state(docs.sandbox("shop/web", "4", vcpu, exclusive="4", shared=""))


class Clock:
    """A clock that stands still until it is set."""

    now_ns = 0

    def monotonic_ns(self) -> int:
        return self.now_ns


def test_everything_that_a_node_can_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file of the kernel ends in its place."""
    clock = Clock()
    monkeypatch.setattr(rates, "time", clock)
    root = tree(tmp_path, {})
    with meter(one(), root) as found:
        tree(
            tmp_path,
            {
                "proc/4100/task/4101/schedstat": "200 0 3",
                "proc/4100/task/4101/sched": "\nnr_involuntary_switches : 6\nse.nr_migrations : 1",
                "proc/interrupts": INTERRUPTS.format(200),
                "proc/schedstat": "version 17\ncpu4 0 0 0 0 0 0 0 0 15",
            },
        )
        clock.now_ns = 2_000_000_000
        document = found.document()
    (sandbox,), (pcpu,) = document.sandboxes, document.pcpus
    (vcpu,) = sandbox.vcpus
    assert (vcpu.label, vcpu.cpus, vcpu.last_cpu, vcpu.migrations) == ("vcpu 0", "4", 4, 0)
    assert vcpu.preemptions == 0.5
    assert pcpu.foreign_switches == 1.5
    assert pcpu.interrupts is not None
    assert pcpu.interrupts.tick == 50
    assert document.seconds == 2
    assert pcpu.softirqs == {"RCU": 0}
    assert (pcpu.steal_percent, pcpu.throttled_percent, sandbox.throttled_percent) == (0, 0, 0)
    assert (document.missing, document.notes, document.threads) == ((), (), 1)


def test_a_thread_that_may_run_elsewhere_is_not_a_pcpus_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How much of its time was on this pCPU is unknown."""
    clock = Clock()
    monkeypatch.setattr(rates, "time", clock)
    vcpu = docs.thread(4101, "vcpu", "4-5", vcpu=0)
    state = docs.state(docs.sandbox("shop/web", "4-5", vcpu, exclusive="4", shared="5"))
    with meter(state, tree(tmp_path, {})) as found:
        tree(tmp_path, {"proc/4100/task/4101/schedstat": "1000000100 0 3"})
        clock.now_ns = 2_000_000_000
        document = found.document()
    assert document.sandboxes[0].cpu_percent == 50
    assert document.pcpus[0].own_percent == 0


def test_throttling_is_that_of_a_vcpus_cgroup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may be in a cgroup of their own, whose quota stops no vCPU."""
    clock = Clock()
    monkeypatch.setattr(rates, "time", clock)
    emulator = docs.thread(4102, "emulator", "5")
    state = one()
    (sandbox,) = state.sandboxes
    state = replace(state, sandboxes=(replace(sandbox, threads=(emulator, *sandbox.threads)),))
    task, stopped = "proc/4100/task/4102", "sys/fs/cgroup/overhead/cpu.stat"
    other = {
        f"{task}/schedstat": RUN,
        f"{task}/stat": STAT.replace("4101", "4102"),
        f"{task}/cgroup": "0::/overhead",
    }
    root = tree(tmp_path, {**other, stopped: "nr_throttled 1\nthrottled_usec 0"})
    with meter(state, root) as found:
        tree(tmp_path, {**other, stopped: "nr_throttled 2\nthrottled_usec 1000000"})
        clock.now_ns = 2_000_000_000
        document = found.document()
    assert document.sandboxes[0].throttled_percent == 0


@pytest.mark.parametrize(
    ("file", "figures"),
    [
        ("proc/schedstat", {"foreign_switches"}),
        ("proc/stat", {"steal_percent"}),
        ("proc/interrupts", {"interrupts"}),
        ("proc/softirqs", {"softirqs"}),
        ("proc/4100/task/4101/sched", {"migrations"}),
        ("sys/fs/cgroup/pod/cpu.stat", {"throttled_percent"}),
    ],
)
def test_a_file_that_a_node_lacks_is_named(tmp_path: Path, file: str, figures: set[str]) -> None:
    """Its figures are null, nothing else is; the reason is in the document."""
    root = tree(tmp_path, {"proc/4100/task/4101/status": "nonvoluntary_ctxt_switches:\t5"})
    status = tmp_path / "proc/4100/task/4101/status"
    status.write_text("Name:\tx\nnonvoluntary_ctxt_switches:\t5\n")
    (tmp_path / file).unlink()
    with meter(one(), root) as found:
        document = found.document()
    assert {one.figure for one in document.missing} == figures
    (pcpu,), (sandbox,) = document.pcpus, document.sandboxes
    values = {
        "foreign_switches": pcpu.foreign_switches,
        "steal_percent": pcpu.steal_percent,
        "interrupts": pcpu.interrupts,
        "softirqs": pcpu.softirqs,
        "migrations": sandbox.vcpus[0].migrations,
        "throttled_percent": pcpu.throttled_percent,
    }
    assert {name for name, value in values.items() if value is None} == figures


def test_a_node_that_hides_processes_says_so(tmp_path: Path) -> None:
    """hidepid=2: what is hidden looks as if it had ended."""
    root = tree(tmp_path, {})
    for name in ("schedstat", "stat", "sched"):
        (tmp_path / "proc/4100/task/4101" / name).unlink()
    with meter(one(), root) as found:
        document = found.document()
    assert [one.code for one in document.notes] == ["threads-hidden"]
    assert document.sandboxes[0].vcpus[0].cpu_percent is None
    assert document.pcpus[0].own_percent is None


def test_threads_that_are_not_known_are_not_others(tmp_path: Path) -> None:
    """Without a VMM that may be verified, who runs on the pCPU can be its owner."""
    state = one()
    state = replace(state, sandboxes=(replace(state.sandboxes[0], threads=(), state="no-vmm"),))
    with meter(state, tree(tmp_path, {})) as found:
        (pcpu,) = found.document().pcpus
    assert (pcpu.own_percent, pcpu.foreign_percent, pcpu.foreign_switches) == (None, None, None)
    assert pcpu.steal_percent is not None


def test_overhead_is_summed_by_role_and_opened() -> None:
    """Real threads: three roles, of which one has two threads."""
    with played("sleeps", "sleeps", "sleeps") as process:
        state = docs.state(
            docs.sandbox(
                "shop/web",
                None,
                process.thread(0, "vhost"),
                process.thread(1, "vhost", state="drift"),
                process.thread(2, "shim"),
            )
        )
        with meter(state, HOST) as found:
            roles = found.document().sandboxes[0].overhead
            assert [(one.role, one.count, one.drifting) for one in roles] == [
                ("vhost", 2, 1), ("shim", 1, 0),
            ]  # fmt: skip
            assert all(one.threads == () for one in roles)
            found.expand(threads=True)
            found.document()
            roles = found.document().sandboxes[0].overhead
            assert [len(one.threads) for one in roles] == [2, 1]
            assert roles[0].threads[0].preemptions is not None


def test_an_exclusive_pcpu_of_two_sandboxes_and_one_that_is_offline(tmp_path: Path) -> None:
    """A conflict is a conflict; where nothing runs nothing is measured."""
    state = one()
    twin = replace(state.sandboxes[0], id="ee" * 32, exclusive="4,99")
    both = replace(state, sandboxes=(*state.sandboxes, twin))
    with meter(both, tree(tmp_path, {})) as found:
        pcpus = found.document().pcpus
    assert [(one.cpu, one.conflict, one.online) for one in pcpus] == [
        (4, True, True), (99, False, False),
    ]  # fmt: skip
    assert pcpus[1].foreign_percent is None


def test_sandboxes_are_asked_for_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those that came meanwhile are shown after a while, with their rates."""
    monkeypatch.setattr(top, "REFRESH_S", 0.0)
    answers = iter([docs.state(), one(), one()])
    reader = Sampler(tree(tmp_path, {}), 100)
    with closing(Meter(lambda: next(answers), reader, threads=False)) as found:
        assert found.document().sandboxes == ()
        (sandbox,) = found.document().sandboxes
        assert sandbox.vcpus[0].cpu_percent is not None


def test_caches_between_two_samples(tmp_path: Path) -> None:
    """L3 bytes as of now, bandwidth as a rate; both in the table, which has them only then."""
    (sandbox,) = one().sandboxes
    group = "mon_groups/kata-pin-x"
    state = replace(one(), sandboxes=(replace(sandbox, cache=Cache(group, "", "")),))
    folder = f"sys/fs/resctrl/{group}/mon_data/mon_L3_00"
    counters = {
        f"{folder}/llc_occupancy": str(3 << 20),
        f"{folder}/mbm_total_bytes": "1000",
        f"{folder}/mbm_local_bytes": "Unavailable",
    }
    root = tree(tmp_path, counters)
    with closing(Meter(lambda: state, Sampler(root, 100), threads=False)) as found:
        (tmp_path / folder / "mbm_total_bytes").write_text("5001000\n")
        document = found.document()
    (shown,) = document.sandboxes
    assert shown.l3_bytes == 3 << 20
    assert shown.memory_bytes_per_s
    assert shown.local_bytes_per_s is None
    text = "\n".join(line.plain for line in once(document, Output(120)))
    assert "MEM/s" in text
    assert "3.0 MiB" in text
