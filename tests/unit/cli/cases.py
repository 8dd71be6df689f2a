"""Every rendering that has a golden file: a name, and how its lines are made at a width."""

from collections.abc import Callable

from rich.text import Text

from kata_pin.cli.commands.map import map_document
from kata_pin.cli.render import compare, cpus, history, pools, reports, show, whatif
from kata_pin.cli.render import map as render_map
from kata_pin.cli.render.layout import Look
from kata_pin.cli.reports import findings
from kata_pin.cli.reports.who import Intruder
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.reports.pools import PushFailure
from kata_pin.model.reports.state import State
from tests.unit.cli import documents as docs
from tests.unit.cli.compared import DECIDED, SUPPOSED
from tests.unit.cli.supposed import FULL, POOLED, SERVED

WIDTHS = (60, 80, 120, 200)

Render = Callable[[Look], list[Text]]


def _single(document: State, number: int = 0) -> Render:
    return lambda look: show.single(document, document.sandboxes[number], look)


SEVERAL = docs.state(docs.database(), docs.drifted(), docs.lost(), isolated="12-15", present="0-17")
DOWN = docs.without_daemon(docs.state(mode="observe", thread_events=False, kubelet=None, cpus=2))
CHECKED = findings.check(
    docs.state(
        docs.database(),
        docs.drifted(),
        docs.lost(),
        docs.sandbox("other/late", "5-6", state="conflict", exclusive="5"),
    ),
    [Intruder(990, "node-exporter", [990, 991], CpuSet.parse("4-5,12-15"))],
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
    "show": lambda look: show.overview(SEVERAL, look),
    "show-nothing": lambda look: show.overview(DOWN, look),
    "show-unicode": lambda look: show.overview(docs.foreign(), look),
    "show-hostile": lambda look: show.overview(docs.hostile(), look),
    "show-256": lambda look: show.overview(docs.large(), look),
    "sandbox": _single(SEVERAL),
    "sandbox-drift": _single(SEVERAL, 1),
    "sandbox-no-vmm": _single(SEVERAL, 2),
    "sandbox-hostile": _single(docs.hostile()),
    "cpus": lambda look: cpus.cpus(SEVERAL, look),
    "cpus-256": lambda look: cpus.cpus(docs.large(), look),
    "map": lambda look: render_map.guest_map(map_document(SEVERAL), look),
    "map-hostile": lambda look: render_map.guest_map(map_document(docs.hostile()), look),
    "map-nothing": lambda look: render_map.guest_map(map_document(DOWN), look),
    "what-if": lambda look: whatif.what_if(SERVED, look),
    "what-if-shared": lambda look: whatif.what_if(POOLED, look),
    "what-if-full": lambda look: whatif.what_if(FULL, look),
    "alloc-compare": lambda look: compare.compare(DECIDED, look),
    "alloc-compare-supposed": lambda look: compare.compare(SUPPOSED, look),
    "pools": lambda look: pools.pools(docs.allotted(), look),
    "pools-aside": lambda look: pools.pools(
        docs.allotted(suspended="the kubelet's CPU manager policy is static"), look
    ),
    "pools-no-nri": lambda look: pools.pools(
        docs.allotted(guarantee="sandboxes only", push=None, grants=[], refused=[], notes=[]), look
    ),
    "pools-pushed": lambda look: pools.pools(docs.allotted(push=STUCK), look),
    "pools-none": lambda look: pools.pools(docs.state(), look),
    "alloc-explain": lambda look: pools.explain(GRANTS[1], look),
    "alloc-explain-pending": lambda look: pools.explain(GRANTS[3], look),
    "who": lambda look: reports.who(docs.busy_cpu(), look),
    "check": lambda look: reports.check(CHECKED, look),
    "doctor": lambda look: reports.doctor(docs.examined(), look),
    "pin": lambda look: reports.applied(docs.done(), look),
    "history": lambda look: history.history(docs.changed(), look),
    "explain": lambda look: reports.explain(docs.explained(), look),
}


def golden(name: str) -> str:
    """Return one case at every width, then at 80 without Unicode."""
    looks = [*(Look(width) for width in WIDTHS), Look(80, unicode=False)]
    parts = []
    for look in looks:
        parts.append(f"=== {look.width} columns{'' if look.unicode else ', ASCII signs'} ===")
        parts += [line.plain for line in CASES[name](look)]
    return "\n".join(parts) + "\n"
