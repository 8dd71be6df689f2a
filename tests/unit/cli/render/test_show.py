"""One sandbox on a terminal: what repeats is said once, and 80 columns are enough."""

import re

import pytest
from msgspec.structs import replace

from kata_pin.base.documents.measured import ProcessThread
from kata_pin.base.documents.state import Sandbox, State, Thread
from kata_pin.base.values import GuestState
from kata_pin.cli.commands.inspect import map_document
from kata_pin.cli.render.layout import NO_LIMIT, Output
from kata_pin.cli.render.show import single
from kata_pin.cli.render.who import guest_map, who
from tests.unit.cli import documents as docs


def _lines(sandbox: Sandbox, width: int = 80) -> list[str]:
    return [line.plain for line in single(docs.state(sandbox), Output(width))]


def _row(lines: list[str], tid: int) -> list[str]:
    """Return the cells of a thread's row."""
    (line,) = (one for one in lines if one.startswith(f"{tid} "))
    return re.split(r"  +", line)


def _of(*threads: Thread) -> Sandbox:
    return docs.sandbox("a/b", "4-5", *threads)


@pytest.mark.parametrize("width", [80, 120, NO_LIMIT])
def test_a_reason_is_said_once(width: int) -> None:
    """Threads with the same reason name a footnote; its text stands below the table."""
    many = [docs.thread(n, "emulator", "4", reason="shared CPUs") for n in range(1000, 1040)]
    lines = _lines(_of(*many, docs.thread(1040, "vcpu", "5", vcpu=0)), width)
    (note,) = (line for line in lines if "shared CPUs" in line)
    mark, _, text = note.partition(" ")
    assert text == "shared CPUs"
    assert {_row(lines, n)[-1] for n in range(1000, 1040)} == {mark}


def test_a_reason_of_one_thread_stays_in_its_row_where_there_is_room() -> None:
    """So that grep finds the whole answer in a pipe; on a narrow terminal it is a footnote."""
    sandbox = docs.database()
    wide = _row(_lines(sandbox, NO_LIMIT), 4101)
    assert wide[-1] == "unpaired vCPU: shared CPUs (overhead: auto)"
    assert "[1] unpaired vCPU: shared CPUs (overhead: auto)" in _lines(sandbox)


def test_at_80_columns_each_thread_is_one_line() -> None:
    """No reason is broken into a column of single words, and where it ran last is shown."""
    lines = _lines(docs.database())
    head = next(n for n, line in enumerate(lines) if line.lstrip().startswith("TID"))
    assert "LAST-CPU" in lines[head]
    left_out = "not shown at this width: SOURCE, CPU-TIME, RUN-DELAY, PREEMPTED, MIGRATED,"
    end = lines.index(left_out)
    assert lines[end + 1].strip() == "LAST-MOVE"
    body = lines[head + 1 : end]
    broken = [line for line in body if not re.match(r" *\d+ ", line)]
    assert broken == [" " * 6 + "0123456789abcdef"]  # the id of an iothread


def test_a_thread_that_has_not_run_since_its_pin_is_marked() -> None:
    """The kernel moves a sleeping thread when it wakes: its last pCPU is no violation."""
    moved = docs.thread(1000, "emulator", "4", last_cpu=7)
    lines = _lines(_of(moved, docs.thread(1001, "emulator", "4", last_cpu=4)))
    assert "*7" in _row(lines, 1000)
    assert "4" in _row(lines, 1001)
    assert "* has not run since its affinity was set" in lines
    for still in (replace(moved, last_cpu=4), replace(moved, last_cpu=-1)):
        assert not any("has not run" in line for line in _lines(_of(still)))


def test_sizes_that_the_vmm_does_not_show() -> None:
    """Only QEMU's command line has the number of vCPUs: of others it is said how many there are."""
    two = [docs.thread(1000 + n, "vcpu", "4-5", vcpu=n) for n in range(2)]
    vmm = docs.vmm(kind="firecracker", boot_vcpus=0, max_vcpus=0)
    text = " ".join(_lines(replace(_of(*two), vmm=vmm), NO_LIMIT))
    assert "vCPUs 2 now" in text
    assert "at boot" not in text
    assert "vCPUs 1 at boot, 16 at most" in " ".join(_lines(docs.database(), NO_LIMIT))


@pytest.mark.parametrize(
    ("hotplugged", "text"),
    [
        (None, "number of vCPUs at boot unknown"),
        (False, "no hotplugged vCPUs"),
        (True, "vCPUs were hotplugged"),
    ],
)
def test_whether_vcpus_were_hotplugged(hotplugged: bool | None, text: str) -> None:
    """The map does not deny what it cannot know."""
    sandbox = replace(
        docs.database(), guest=docs.links((0, "4", 0, "measured", ""), hotplugged=hotplugged)
    )
    lines = guest_map(map_document(docs.state(sandbox)), Output(NO_LIMIT))
    assert "Linux 6.12.47" in " ".join(line.plain for line in lines)
    assert text in " ".join(line.plain for line in lines)


@pytest.mark.parametrize("state", [docs.state(), docs.without_daemon(docs.state())])
def test_a_map_of_nothing_says_so(state: State) -> None:
    """Also below the line about a daemon that is away."""
    lines = guest_map(map_document(state), Output(NO_LIMIT))
    assert lines[-1].plain == "no sandboxes"


@pytest.mark.parametrize(
    ("state", "cpus", "cost"),
    [
        ("unreachable", "1", "every process may use every vCPU, and so every pCPU of the pod"),
        ("denied", "1", "expected guest CPUs: app on 1"),
        ("unreachable", None, "no container needs guest CPUs of its own"),
        ("applied", "1", None),
    ],
)
def test_a_guest_out_of_reach_says_what_that_costs(
    state: GuestState, cpus: str | None, cost: str | None
) -> None:
    """Host pins hold; whether it matters depends on containers with guest CPUs of their own."""
    sandbox = docs.drifted()
    assert sandbox.guest is not None
    containers = (docs.confined("app", cpus),)
    guest = replace(sandbox.guest, state=state, containers=containers)
    text = " ".join(" ".join(_lines(replace(sandbox, guest=guest), NO_LIMIT)).split())
    assert ("host pinning is unaffected" in text) is (cost is not None)
    assert (cost or "") in text


def test_a_process_of_many_threads_is_a_row_that_can_be_read() -> None:
    """In a pipe too, where no line is broken: what is left out is counted, or in --json."""
    document = docs.busy_cpu()
    names = [f"vcpu {n}" for n in range(64)] + ["worker"] * 200
    threads = tuple(ProcessThread(5000 + n, "x", str(n % 64), one) for n, one in enumerate(names))
    fields = {"pod": "shop/" + "p" * 40, "threads": threads, "command": "/bin/x " * 28}
    process = replace(document.processes[0], intruder=False, **fields)
    lines = [line.plain for line in who(replace(document, processes=(process,)), Output(NO_LIMIT))]
    (row,) = (line for line in lines if line.lstrip().startswith(f"{process.pid} "))
    assert len(row) <= 220
    cells = re.split(r"  +", row.strip())
    first = "vcpu 0, vcpu 1, vcpu 2, vcpu 3, vcpu 4, vcpu 5 and 59 more"
    assert cells[4:6] == ["0-63", first]
    assert cells[-1] == "/bin/x " * 8 + "/..."
