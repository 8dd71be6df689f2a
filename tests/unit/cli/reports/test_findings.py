"""What `check` finds in a state document."""

import pytest

from kata_pin.cli.render import phrases
from kata_pin.cli.render.layout import Output
from kata_pin.cli.reports import findings, words
from kata_pin.cli.reports.findings import Intruder
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.reports.check import CheckDocument
from kata_pin.model.reports.state import State
from kata_pin.model.reports.who import ProcessThread
from tests.unit.cli import documents as docs


def found(document: State, *intruders: Intruder, fail: bool = False) -> CheckDocument:
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


@pytest.mark.parametrize("fail", [True, False])
def test_intruders_fail_by_setting(fail: bool) -> None:
    """The setting decides whether an intruder is a failure."""
    process = docs.host_process(9, "x", ProcessThread(9, "x", "4", ""), command="x -y")
    document = found(docs.state(), (process, CpuSet([4])), fail=fail)
    assert document.ok is not fail
    assert document.findings[0].text == (
        "x (pid 9, user root, started 3 d ago, CPU time 71.6 s): "
        "1 thread may run on exclusive pCPU 4; command: x -y"
    )


def test_an_intruder_of_which_nothing_can_be_read() -> None:
    """Without rights, or once it has exited, its name and pid remain."""
    unknown = {"user": "", "command": "", "age_s": None, "cpu_s": None}
    process = docs.host_process(9, "x", ProcessThread(9, "x", "4", ""), **unknown)
    (finding,) = found(docs.state(), (process, CpuSet([4]))).findings
    assert finding.text == "x (pid 9): 1 thread may run on exclusive pCPU 4"


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
