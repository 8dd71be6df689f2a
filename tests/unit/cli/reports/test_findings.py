"""What `check` finds in a state document."""

from typing import Any

import pytest
from msgspec.structs import replace

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.documents.check import CheckDocument, IntruderGroup, Measurement
from kata_pin.base.documents.document import Note
from kata_pin.base.documents.measured import WatchDocument, WatchedPcpu
from kata_pin.base.documents.state import State
from kata_pin.base.values import NoteLevel
from kata_pin.cli.render import findings as render
from kata_pin.cli.render import phrases
from kata_pin.cli.render.layout import NO_LIMIT, Output
from kata_pin.cli.reports import findings, owners, prove, words
from kata_pin.cli.reports.findings import Looked
from tests.unit.cli import documents as docs
from tests.unit.cli.proved import owned, proved

POD = "0d2a8d5e_0ba5_4a2b_8d4e_1c2b3a4d5e6f"


def found(document: State, *intruders: IntruderGroup, fail: bool = False) -> CheckDocument:
    """Run the check."""
    return findings.check(document, intruders, intruders_fail=fail)


def test_everything_in_place_is_ok() -> None:
    """No finding, and what was looked at is counted."""
    document = found(docs.state(docs.database()))
    assert document.ok
    assert document.findings == ()
    assert (document.sandboxes, document.threads) == (1, 8)


@pytest.mark.parametrize(
    ("first", "second", "cpus"),
    [
        pytest.param(("4-7", "4-5"), ("5-8", "5"), ["5"], id="both exclusive"),
        pytest.param(("4-7", "4-5"), ("5-8", ""), ["5"], id="exclusive and shared"),
        pytest.param(("4-5", ""), ("5-8", "5-6"), ["5"], id="shared and exclusive"),
        pytest.param(("4-7", "4-5"), ("6-8", "8"), [], id="shared overlap only"),
        pytest.param(("4-7", "4-7"), ("8-9", "8-9"), [], id="disjoint"),
        pytest.param(("4-7", "4-5"), ("4-7", "6-7"), ["4-5", "6-7"], id="each in the other"),
    ],
)
def test_shared_exclusive_cpus_are_conflicts(
    first: tuple[str, str], second: tuple[str, str], cpus: list[str]
) -> None:
    """A pCPU that one sandbox owns and another may use fails, and is told once."""
    sandboxes = [
        docs.sandbox(f"ns/{n}", mask, exclusive=exclusive)
        for n, (mask, exclusive) in enumerate((first, second))
    ]
    document = found(docs.state(*sandboxes))
    assert [f.cpus for f in document.findings] == cpus
    assert all(f.kind == "conflict" and f.fails for f in document.findings)


def test_three_owners_are_three_pairs() -> None:
    """Every pair of sandboxes is told."""
    document = found(docs.state(*(docs.sandbox(f"n/{n}", "4", exclusive="4") for n in range(3))))
    assert len(document.findings) == 3


@pytest.mark.parametrize(
    ("code", "level", "said"),
    [
        pytest.param("shared-without-vcpu", "warning", ("warning", False), id="a VM too small"),
        pytest.param("runs-on-others", "warning", ("conflict", True), id="on others' pCPUs"),
        pytest.param("conflict-exclusive", "warning", None, id="a finding of its own"),
        pytest.param("held-by-others", "info", None, id="nothing to do"),
    ],
)
def test_warnings_of_passes_are_told(code: str, level: str, said: tuple[str, bool] | None) -> None:
    """What `show` warns of, `check` reports; a thread that is in another pod's way fails."""
    noted = docs.sandbox(
        "shop/web", "0-3", notes=(Note(code, "no vCPU is left", NoteLevel(level)),)
    )
    kinds = [(one.kind, one.fails, one.text) for one in found(docs.state(noted)).findings]
    assert kinds == ([] if said is None else [(*said, "shop/web: no vCPU is left")])


@pytest.mark.parametrize("fail", [True, False])
def test_intruders_fail_by_setting(fail: bool) -> None:
    """The setting decides whether an intruder is a failure; the text has the remedy."""
    document = found(docs.state(), *docs.intruders(docs.intruder(9, "x", threads=2)), fail=fail)
    assert document.ok is not fail
    (finding,) = document.findings
    assert finding.text == (
        "x.service: x (pid 9, user root) may run on exclusive pCPU 4 (2 threads; CPU time 71.6 s); "
        "restrict the unit, but never system.slice, which contains the container runtime; "
        "run: systemctl set-property x.service AllowedCPUs=0-3"
    )
    assert finding.group is not None
    assert finding.group.command == "systemctl set-property x.service AllowedCPUs=0-3"


def test_an_intruder_of_which_nothing_can_be_read() -> None:
    """Without rights, or once it has exited, its name and pid remain."""
    unknown: dict[str, Any] = {"user": "", "command": "", "age_s": None, "cpu_s": None}
    (group,) = docs.intruders(docs.intruder(9, "x", cgroup="/", **unknown))
    (finding,) = found(docs.state(), group).findings
    assert finding.text.startswith(
        "cgroup /: x (pid 9) may run on exclusive pCPU 4 (1 thread; CPU time 0"
    )
    assert group.command == "taskset -a -p -c 0-3 9"


def test_intruders_are_grouped_by_unit_and_sorted_by_what_they_used_there() -> None:
    """Those of processes that ran there just now, then that ran there last, then by CPU time."""
    groups = docs.intruders(
        docs.intruder(1, "idle", cpu_s=900.0),
        docs.intruder(2, "lately", there_s=5.0, last_there=1, cpu_s=8.0),
        docs.intruder(3, "lately", cpu_s=80.0),
        docs.intruder(4, "now", cpu_s=0.5),
        docs.intruder(5, "web", cgroup=f"/kubepods.slice/kubepods-pod{POD}.slice/cri-o-01.scope"),
        ran_ms={4: 12.5},
    )  # fmt: skip
    assert [(one.name, len(one.processes), one.threads) for one in groups] == [
        ("now.service", 1, 1),
        ("lately.service", 2, 2),
        ("idle.service", 1, 1),
        (f"pod {POD.replace('_', '-')}", 1, 1),
    ]
    assert [one.pid for one in groups[1].processes] == [2, 3]
    text = found(docs.state(), *groups).findings[1].text
    assert "lately (pid 2, user root) and 1 more process may run on" in text
    assert "CPU time 88.0 s, 1 thread with 5.0 s ran there last" in text
    assert "12.5 ms there just now" in found(docs.state(), *groups).findings[0].text
    assert "cpuManagerPolicy: static" in groups[3].remedy


def test_what_runs_in_a_pod_is_named_after_it_whatever_its_program_is_called() -> None:
    """A program there that calls itself kata-pin hides behind nobody; a command of ours does."""
    pod = f"/kubepods.slice/kubepods-pod{POD}.slice/cri-o-01.scope"
    groups = docs.intruders(
        docs.intruder(5, "kata-pin", cgroup=pod),
        docs.intruder(6, "kata-pin", cgroup="/user.slice/user-0.slice/session-1.scope"),
    )
    names = {one.name: [process.pid for process in one.processes] for one in groups}
    assert names == {f"pod {POD.replace('_', '-')}": [5], "kata-pin itself": [6]}


def test_processes_without_a_unit_are_moved_one_by_one() -> None:
    """Where systemd cannot do it at once (cgroup v1), the command names every process."""
    first, second = docs.intruder(7, "a", cgroup="/"), docs.intruder(8, "a", cgroup="/")
    (group,) = docs.intruders(first, second)
    assert group.command == "for pid in 7 8; do taskset -a -p -c 0-3 $pid; done"
    (group,) = docs.intruders(*(docs.intruder(pid, "a", cgroup="/") for pid in range(7, 28)))
    assert group.command == "", "nobody reads a command of so many numbers"


def test_a_group_without_a_unit_leaves_the_container_runtime_alone() -> None:
    """The command names the others."""
    runtime = docs.intruder(9, "containerd", cgroup="/")
    runtime = replace(runtime, task=replace(runtime.task, by_root=True))
    others = (docs.intruder(pid, "a", cgroup="/", cpu_s=100.0) for pid in (7, 8))
    (group,) = docs.intruders(*others, runtime)
    assert group.command == "for pid in 7 8; do taskset -a -p -c 0-3 $pid; done"


@pytest.mark.parametrize(
    ("mask", "command"), [("4-5", "kata-pin explain ab"), ("5", "kata-pin pin ab")]
)
def test_a_sandbox_that_may_run_there_too(mask: str, command: str) -> None:
    """Its threads are where their own pod's CPUs put them."""
    (group,) = docs.intruders(
        docs.intruder(9, "qemu", sandbox="ab", pod="shop/db"), masks={"ab": CpuSet.parse(mask)}
    )
    assert group.command == command


def test_what_was_measured_decides() -> None:
    """User processes and other sandboxes on an exclusive pCPU fail; the kernel's are a note."""
    looked = prove.judged(replace(proved(), max_foreign_percent=0.001))
    document = findings.check(owned(), (), intruders_fail=False, looked=looked)
    assert (document.verdict, [one.fails for one in document.findings]) == (
        "findings",
        [True, False],
    )
    culprit, kernel = document.findings
    assert culprit.text == (
        "others ran on pCPU 4 of shop/database for 15.1 % of 10.0 s: sh \\x1b[31m (pid 900 of "
        "cron.service) 1506.0 ms, cc1 (pid 901) 0.3 ms; restrict the unit, but never system.slice, "
        "which contains the container runtime; run: systemctl set-property cron.service "
        "AllowedCPUs=0-3,7-15"
    ).replace("\\x1b", "\x1b")
    assert culprit.foreign is not None
    assert [one.pid for one in culprit.foreign.tasks] == [900, 901]
    assert "kworker/u32:3-events (pid 41)" in kernel.text
    assert document.unknown == ("pCPU 6 of shop/cache: measurement incomplete: it is offline",)
    page = [line.plain for line in render.check(document, Output(NO_LIMIT))]
    assert page[0] == (
        "FAIL: 1 exclusive pCPU that others ran on; 2 sandboxes, 4 threads checked, "
        "3 exclusive pCPUs measured for 10 s by perf records"
    )
    assert page[-1] == (
        "report only: 1 exclusive pCPU that kernel threads or unknown tasks ran on; "
        "--all lists them"
    )


def test_foreign_time_within_the_limit_is_ok() -> None:
    """What the setting allows is no finding; what was not measured whole cannot be told."""
    whole = proved(about={owned().sandboxes[0].id})
    looked = prove.judged(replace(whole, max_foreign_percent=20.0))
    document = findings.check(owned(), (), intruders_fail=False, looked=looked)
    assert (document.verdict, document.findings) == ("ok", ())
    unproved = prove.judged(proved(about={owned().sandboxes[1].id}))
    document = findings.check(owned(), (), intruders_fail=False, looked=unproved)
    assert (document.verdict, document.ok) == ("unknown", False)


def watched(**fields: Any) -> WatchDocument:
    """Return what the daemon saw: foreign tasks on pCPU 4 for 35 s, nobody on 5 and 6."""
    owned_by = {one.cpu: one for one in proved().pcpus}
    known: dict[str, Any] = {
        "age_s": 3.0, "over_s": 10.0, "waited_percent": 12.0, "others_percent": 0.0,
        "others_slices": None, "episode_s": None, "window_age_s": None, "window": None,
    }  # fmt: skip
    seen: dict[str, Any] = {"episode_s": 35.0, "window_age_s": 33.0, "window": owned_by[4]}
    rows = []
    for cpu, row in owned_by.items():
        own = {**seen, **fields} if cpu == 4 else {}
        rows.append(WatchedPcpu(cpu=cpu, sandbox=row.sandbox, pod=row.pod, **{**known, **own}))
    return WatchDocument(time="", max_foreign_percent=0.1, problem="", pcpus=tuple(rows))


def watch_found(looked: Looked, *, alive: bool = True, **fields: Any) -> CheckDocument:
    """Run the check with that."""
    document = watched(**fields)
    known = owners.owners(owned())
    both = prove.with_watch(looked, document, known, lambda task, _: alive and task.pid != 901)
    return findings.check(owned(), (), intruders_fail=False, looked=both)


def test_what_the_daemon_saw_counts_while_it_goes_on() -> None:
    """An intruder that rested while check looked is a finding, unless it is gone or was moved."""
    calm = Looked(measured=Measurement("4-6", 2.0, "perf", 0.1))
    document = watch_found(calm)
    (finding,) = document.findings
    assert (finding.kind, finding.fails, finding.cpus) == ("foreign", True, "4")
    assert "for 15.1 % of 10.0 s: sh " in finding.text
    assert finding.text.endswith("; the daemon has seen this for 35 s")
    assert finding.foreign is not None
    assert (finding.foreign.seen_s, [one.pid for one in finding.foreign.tasks]) == (33.0, [900])
    assert watch_found(calm, alive=False).verdict == "ok"
    assert watch_found(calm, episode_s=None).verdict == "ok"
    ours = prove.judged(replace(proved(), max_foreign_percent=0.1))
    assert len(watch_found(ours).findings) == len(ours.findings), "one finding for one pCPU"


def test_the_daemons_watch_is_used_where_this_user_may_not_measure() -> None:
    """A member of the group gets an answer; without counters it stays unknown."""
    refused = Looked(unknown=("exclusive pCPUs were not measured: not permitted",))
    document = watch_found(refused, episode_s=None)
    assert (document.verdict, document.unknown) == ("ok", ())
    assert document.measured == Measurement("4-6", 10.0, "watch", 0.1)
    assert "by the daemon's watch" in render.check(document, Output(NO_LIMIT))[0].plain
    assert watch_found(refused, over_s=None, episode_s=None).verdict == "unknown"
    nameless = watch_found(refused, window=None, others_percent=3.2)
    assert nameless.verdict == "findings"
    assert nameless.findings[0].text == (
        "others ran on pCPU 4 of shop/database for 3.2 % of 10.0 s; who it was is not "
        "recorded; the daemon has seen this for 35 s"
    )
    assert watch_found(Looked(measured=document.measured), window=None).verdict == "ok"


def test_what_the_watch_cannot_tell_is_not_ok() -> None:
    """Counters grew and who it was is not recorded: perhaps the pod's own threads, perhaps not."""
    refused = Looked(unknown=("exclusive pCPUs were not measured: not permitted",))
    facts: dict[str, Any] = {"episode_s": None, "window": None, "others_percent": 3.2}
    document = watch_found(refused, **facts)
    assert document.verdict == "unknown"
    (why,) = document.unknown
    assert why.endswith("for at most 3.2 % of 10.0 s; the daemon has not recorded who")
    measured = Looked(measured=Measurement("4-6", 2.0, "perf", 0.1))
    assert watch_found(measured, **facts).verdict == "ok", "this command saw that nobody was there"


def test_an_orphan_fails() -> None:
    """A VMM that outlived its shim keeps CPUs that nobody will free."""
    left = docs.database()
    assert left.vmm is not None
    orphan = replace(left, vmm=replace(left.vmm, orphan=True))
    document = found(docs.state(orphan))
    assert not document.ok
    (finding,) = document.findings
    assert (finding.kind, finding.sandbox) == ("orphan", left.id)
    assert f"qemu (pid {left.vmm.pid}) still runs on pCPUs" in finding.text


@pytest.mark.parametrize(
    ("name", "active", "last_s", "fails"),
    [
        ("other", True, 1.0, True),
        ("other", False, 30.0, True),
        ("other", False, 3600.0, False),
        ("kata", True, None, False),
    ],
)
def test_a_vmm_that_changes_its_affinities_fails(
    name: str, active: bool, last_s: float | None, fails: bool
) -> None:
    """Also between two repairs, when every thread is where it should be; not for ever."""
    writer = replace(docs.writer(name, active=active, evidence="e"), last_s=last_s)
    document = found(docs.state(docs.sandbox("p", "1", writers=[writer])))
    kinds = [one.kind for one in document.findings if one.fails]
    assert kinds == (["other-writer"] if fails else [])
    assert document.ok is not fails


def test_sandboxes_that_can_not_be_placed_are_told() -> None:
    """No VMM and no mask are notes, not failures."""
    unconfined = docs.sandbox("a/b", None, state="unpinned")
    document = found(docs.state(docs.lost(), unconfined))
    assert document.ok
    assert [f.kind for f in document.findings] == ["no-vmm", "unpinned"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.04, "0.0 s"), (9.94, "9.9 s"), (10, "10 s"), (119, "119 s"), (120, "2 m"),
     (7199, "120 m"), (7200, "2 h"), (172799, "48 h"), (172800, "2 d"), (1e7, "116 d")],
)  # fmt: skip
def test_ages(seconds: float | None, text: str) -> None:
    """Ages have one unit that suits them."""
    assert words.age(seconds) == text


@pytest.mark.parametrize(
    ("places", "text"),
    [
        pytest.param([(0, "4")], "0→4", id="one"),
        pytest.param([(0, "4"), (1, "5")], "0→4 1→5", id="two are no run"),
        pytest.param([(0, "4"), (1, "5"), (2, "6")], "0..2→4..6", id="run"),
        pytest.param([(0, "6"), (1, "5"), (2, "4")], "0→6 1→5 2→4", id="backwards"),
        pytest.param([(0, "4"), (2, "5"), (4, "6")], "0→4 2→5 4→6", id="gaps"),
        pytest.param([(0, "6-7"), (1, "4"), (2, "6-7")], "0,2→6-7 1→4", id="shared set"),
        pytest.param([(0, "4"), (1, "4"), (2, "4")], "0,1,2→4", id="all on one"),
        pytest.param([(None, "0-3"), (None, "0-3")], "?,?→0-3", id="unknown indexes"),
        pytest.param([(15, "9"), (14, "8"), (0, "7")], "0→7 14→8 15→9", id="hotplugged"),
        pytest.param([(0, "")], "0→?", id="unread"),
        pytest.param([], "-", id="none"),
    ],
)
def test_pairs(places: list[tuple[int | None, str]], text: str) -> None:
    """vCPUs and where they may run, in as few words as are unambiguous."""
    threads = [
        docs.thread(n, "vcpu", cpus or "0", vcpu=index, affinity=cpus)
        for n, (index, cpus) in enumerate(places)
    ]
    assert phrases.pairs(threads, Output()).plain == text


def test_overhead_names_the_commonest_place_first() -> None:
    """The commonest set stands alone, others with their roles; what is left alone is not shown."""
    threads = [
        docs.thread(1, "emulator", "6-7"),
        docs.thread(2, "vhost", "6-7"),
        docs.thread(3, "iothread", "4"),
        docs.thread(4, "emulator", "0-3", state="drift"),
        docs.thread(5, "shim", "0-15", state="unmanaged"),
    ]
    assert phrases.overhead(threads).plain == "6-7; iothread 4; emulator 0-3!"


def test_host_processes_are_one_line_until_they_are_asked_for() -> None:
    """Report-only findings are counted; --all lists them, with one remedy and few commands."""
    many = docs.intruders(*(docs.intruder(5000 + n, f"p{n}", cpu_s=float(n)) for n in range(40)))
    document = found(docs.state(docs.sandbox("shop/db", "4", exclusive="4")), *many)
    page = [line.plain for line in render.check(document, Output(NO_LIMIT))]
    assert page[0].startswith("ok: 1 sandbox, ")
    assert page[1:] == [
        "",
        (
            "report only: 40 host processes in 40 units or cgroups allowed on exclusive pCPUs; "
            "--all lists them"
        ),
    ]
    lines = render.check(document, Output(NO_LIMIT), everything=True)
    page = [line.plain for line in lines]
    rows = [line.split() for line in page if " intruder " in line]
    assert [row[:3] for row in rows] == [["4", "shop/db", "intruder"]] * 40
    (first,) = [n for n, line in enumerate(page) if line.startswith("intruder: restrict the unit")]
    assert page[first + 1] == "    systemctl set-property p39.service AllowedCPUs=0-3"
    assert page[first + 6] == "    and 35 more; --json lists them"
    assert page[first + 7].startswith("intruder: reservedSystemCPUs: 0-3,5-15 in the kubelet's")
    assert "do not set CPUAffinity= in /etc/systemd/system.conf" in page[first + 7]
    failing = render.check(found(docs.state(), *many, fail=True), Output(NO_LIMIT))
    assert len([line for line in failing if " intruder " in line.plain]) == 40


def test_the_table_says_how_much_and_since_when() -> None:
    """SHARE is of the time that was measured, SINCE of the daemon's watch."""
    document = watch_found(Looked(), episode_s=200.0)
    (finding,) = document.findings
    assert (finding.owner, finding.since_s) == ("shop/database", 200.0)
    (row,) = (line.plain for line in render.check(document, Output(200)) if "%" in line.plain)
    assert row.split()[-4:] == ["15.1", "%", "3", "m"]
