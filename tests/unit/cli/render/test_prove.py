"""`prove` on a terminal, where more ran than anybody reads."""

from __future__ import annotations

from dataclasses import replace

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
