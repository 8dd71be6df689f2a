"""Every rendering that has a golden file: a name, and how its lines are made at a width."""

from collections.abc import Callable
from dataclasses import replace

from rich.text import Text

from kata_pin.cli.commands.inspect import map_document
from kata_pin.cli.render import alloc, cpus, pools, reports, show
from kata_pin.cli.render import map as render_map
from kata_pin.cli.render.layout import Output
from kata_pin.cli.reports import findings
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.reports.pools import AllocExplainDocument, PushFailure
from kata_pin.model.reports.state import State
from tests.unit.cli import documents as docs
from tests.unit.cli.compared import DECIDED, SUPPOSED
from tests.unit.cli.supposed import FULL, POOLED, SERVED

WIDTHS = (60, 80, 120, 200)

Render = Callable[[Output], list[Text]]


def _single(document: State, number: int = 0) -> Render:
    one = replace(document, sandboxes=document.sandboxes[number : number + 1])
    return lambda output: show.single(one, output)


SEVERAL = docs.state(docs.database(), docs.drifted(), docs.lost(), isolated="12-15", present="0-17")
DOWN = docs.without_daemon(docs.state(mode="observe", thread_events=False, kubelet=None, cpus=2))
CHECKED = findings.check(
    docs.state(
        docs.database(),
        docs.drifted(),
        docs.lost(),
        docs.sandbox("other/late", "5-6", state="conflict", exclusive="5"),
    ),
    [(docs.busy_cpu().processes[0], CpuSet.parse("4-5,12-15"))],
    intruders_fail=False,
)

STUCK = docs.push(
    "nri",
    problem="/var/run/nri/nri.sock: not connected",
    failures=[
        PushFailure(docs.grant("shop/web", "app").id, "task \x1b[31mdoes not exist"),
        PushFailure("ef" * 32, "no answer of the runtime within 5 s"),
    ],
)
ALLOCATION = docs.allotted().allocation
GRANTS = ALLOCATION.grants if ALLOCATION else ()

CASES: dict[str, Render] = {
    "show": lambda output: show.overview(SEVERAL, output),
    "show-nothing": lambda output: show.overview(DOWN, output),
    "show-unicode": lambda output: show.overview(docs.foreign(), output),
    "show-hostile": lambda output: show.overview(docs.hostile(), output),
    "show-256": lambda output: show.overview(docs.large(), output),
    "sandbox": _single(SEVERAL),
    "sandbox-network": _single(docs.networked()),
    "sandbox-network-unknown": _single(
        docs.networked(problem="cannot list descriptors of process 4100: Permission denied")
    ),
    "sandbox-drift": _single(SEVERAL, 1),
    "sandbox-no-vmm": _single(SEVERAL, 2),
    "sandbox-hostile": _single(docs.hostile()),
    "cpus": lambda output: cpus.cpus(SEVERAL, output),
    "cpus-256": lambda output: cpus.cpus(docs.large(), output),
    "map": lambda output: render_map.guest_map(map_document(SEVERAL), output),
    "map-hostile": lambda output: render_map.guest_map(map_document(docs.hostile()), output),
    "map-nothing": lambda output: render_map.guest_map(map_document(DOWN), output),
    "what-if": lambda output: alloc.what_if(SERVED, output),
    "what-if-shared": lambda output: alloc.what_if(POOLED, output),
    "what-if-full": lambda output: alloc.what_if(FULL, output),
    "alloc-compare": lambda output: alloc.compare(DECIDED, output),
    "alloc-compare-supposed": lambda output: alloc.compare(SUPPOSED, output),
    "pools": lambda output: pools.pools(docs.allotted(), output),
    "pools-aside": lambda output: pools.pools(
        docs.allotted(suspended="the kubelet's CPU manager policy is static"), output
    ),
    "pools-no-nri": lambda output: pools.pools(
        docs.allotted(guarantee="sandboxes only", push=None, grants=[], refused=[], notes=[]),
        output,
    ),
    "pools-pushed": lambda output: pools.pools(docs.allotted(push=STUCK), output),
    "pools-none": lambda output: pools.pools(docs.state(), output),
    "alloc-explain": lambda output: pools.explain(AllocExplainDocument(grant=GRANTS[1]), output),
    "alloc-explain-pending": lambda output: pools.explain(
        AllocExplainDocument(grant=GRANTS[3]), output
    ),
    "who": lambda output: reports.who(docs.busy_cpu(), output),
    "check": lambda output: reports.check(CHECKED, output),
    "doctor": lambda output: reports.doctor(docs.examined(), output),
    "pin": lambda output: reports.applied(docs.done(), output),
    "history": lambda output: reports.history(docs.changed(), output),
    "explain": lambda output: reports.explain(docs.explained(), output),
}


def golden(name: str) -> str:
    """Return one case at every width, then at 80 without Unicode."""
    outputs = [*(Output(width) for width in WIDTHS), Output(80, unicode=False)]
    parts = []
    for output in outputs:
        parts.append(f"=== {output.width} columns{'' if output.unicode else ', ASCII signs'} ===")
        parts += [line.plain for line in CASES[name](output)]
    return "\n".join(parts) + "\n"
