"""`prove` on a terminal, where more ran than anybody reads."""

from __future__ import annotations

from msgspec.structs import replace

from kata_pin.cli.render.layout import Output
from kata_pin.cli.render.prove import SHOWN, prove
from tests.unit.cli.proved import proved


def test_of_many_tasks_the_worst_are_listed_and_each_remedy_once() -> None:
    """Forty programs without a unit: some rows, a count of the rest, one text, a few commands."""
    found = proved()
    pcpu = found.pcpus[0]
    tasks = tuple(
        replace(pcpu.tasks[0], comm=f"tool-{n}", pid=n, remedy="restrict it", command=f"act {n}")
        for n in range(100, 140)
    )
    shown = replace(found, pcpus=(replace(pcpu, tasks=tasks, tasks_left_out=0),))
    lines = [line.plain for line in prove(shown, Output(200))]
    text = "\n".join(lines)
    assert "28 more tasks with less time; --json lists them" in lines
    assert text.count("restrict it") == 1
    assert [line.strip() for line in lines if "act 1" in line] == [
        f"act {n}" for n in range(100, 100 + SHOWN)
    ]


def test_threads_of_one_process_are_one_row() -> None:
    """A compiler with three threads is one program to an operator; the document has them all."""
    found = proved()
    pcpu = found.pcpus[0]
    tasks = tuple(
        replace(
            pcpu.tasks[0], comm=f"worker-{tid}", tid=tid, pid=900, slices=2, total_ms=ran,
            longest_ms=ran, command="act 900",
        )
        for tid, ran in ((901, 1.0), (900, 0.5), (902, 4.0))
    )  # fmt: skip
    shown = replace(found, pcpus=(replace(pcpu, tasks=tasks, tasks_left_out=0),))
    lines = [" ".join(line.plain.split()) for line in prove(shown, Output(200))]
    (row,) = [line for line in lines if "worker" in line and ":" not in line]
    assert row == "user task worker-902 900 3 cron.service 6 5.500 ms 4.000 ms"
    assert [line for line in lines if line.startswith("act")] == ["act 900"]
