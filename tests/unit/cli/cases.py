"""Every rendering that has a golden file: a name, and how its lines are made at a width."""

from collections.abc import Callable

from msgspec.structs import replace

from kata_pin.base.documents.pools import AllocExplainDocument, PushFailure
from kata_pin.base.documents.state import State
from kata_pin.cli.commands.inspect import map_document
from kata_pin.cli.render import cpus, reports, show, who
from kata_pin.cli.render import findings as render_findings
from kata_pin.cli.render import prove as render_prove
from kata_pin.cli.render.layout import Output, Text
from kata_pin.cli.reports import findings, prove
from kata_pin.options.allocation import render
from kata_pin.options.isolation import top_render as render_top
from kata_pin.options.isolation.top import View
from kata_pin.options.memory import report as render_memory
from kata_pin.options.pictures import command
from tests.unit.cli import documents as docs
from tests.unit.cli.compared import DECIDED, SUPPOSED
from tests.unit.cli.proved import proved
from tests.unit.cli.supposed import FULL, POOLED, SERVED

WIDTHS = (60, 80, 120, 200)

Render = Callable[[Output], list[Text]]


def _single(document: State, number: int = 0) -> Render:
    one = replace(document, sandboxes=document.sandboxes[number : number + 1])
    return lambda output: show.single(one, output)


SEVERAL = docs.state(docs.database(), docs.drifted(), docs.lost(), isolated="12-15", present="0-17")
TWO = docs.state(
    docs.sandbox(
        "shop/web",
        "0-1",
        docs.thread(4101, "vcpu", "0", vcpu=1),
        docs.thread(4100, "emulator", "1"),
        exclusive="0",
        shared="1",
    ),
    cpus=2,
    kubelet=None,
)
DOWN = docs.without_daemon(docs.state(mode="observe", thread_events=False, kubelet=None, cpus=2))
CHECKED = findings.check(
    docs.state(
        docs.database(),
        docs.drifted(),
        docs.lost(),
        docs.sandbox("other/late", "5-6", state="conflict", exclusive="5"),
    ),
    docs.intruders(
        docs.intruder(990, "node-exporter", threads=12, last_there=2, there_s=1.5, user="nobody"),
        docs.intruder(991, "sh \x1b[31m", cgroup="/"),
    ),
    intruders_fail=False,
    looked=prove.judged(proved()),
    unknown=["the daemon is not running, state read from /proc (no daemon is listening)"],
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
    "show-problems": lambda output: show.overview(
        replace(SEVERAL, sandboxes=SEVERAL.sandboxes[1:]),
        output,
        remark="2 of 3 sandboxes in namespace trading have problems",
    ),
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
    "sandbox-quiet": _single(docs.kept()),
    "cpus": lambda output: cpus.cpus(SEVERAL, output),
    "cpus-quiet": lambda output: cpus.cpus(docs.disturbed(), output),
    "cpus-256": lambda output: cpus.cpus(docs.large(), output),
    "draw": lambda output: command.picture_lines(SEVERAL, output),
    "draw-two": lambda output: command.picture_lines(TWO, output),
    "draw-256": lambda output: command.picture_lines(docs.large(), output),
    "draw-pools": lambda output: command.picture_lines(docs.allotted(), output),
    "draw-unicode": lambda output: command.picture_lines(docs.foreign(), output),
    "draw-hostile": lambda output: command.picture_lines(docs.hostile(), output),
    "map": lambda output: who.guest_map(map_document(SEVERAL), output),
    "map-hostile": lambda output: who.guest_map(map_document(docs.hostile()), output),
    "map-nothing": lambda output: who.guest_map(map_document(DOWN), output),
    "what-if": lambda output: render.what_if(SERVED, output),
    "what-if-shared": lambda output: render.what_if(POOLED, output),
    "what-if-full": lambda output: render.what_if(FULL, output),
    "alloc-compare": lambda output: render.compare(DECIDED, output),
    "alloc-compare-supposed": lambda output: render.compare(SUPPOSED, output),
    "pools": lambda output: render.pools(docs.allotted(), output),
    "pools-aside": lambda output: render.pools(
        docs.allotted(suspended="the kubelet's CPU manager policy is static"), output
    ),
    "pools-no-nri": lambda output: render.pools(
        docs.allotted(guarantee="sandboxes only", push=None, grants=[], refused=[], notes=[]),
        output,
    ),
    "pools-pushed": lambda output: render.pools(docs.allotted(push=STUCK), output),
    "pools-none": lambda output: render.pools(docs.state(), output),
    "alloc-explain": lambda output: render.explain(AllocExplainDocument(grant=GRANTS[1]), output),
    "alloc-explain-pending": lambda output: render.explain(
        AllocExplainDocument(grant=GRANTS[3]), output
    ),
    "memory": lambda output: render_memory.memory_memory(docs.remembered(), output),
    "memory-nothing": lambda output: render_memory.memory_memory(
        docs.remembered(sandboxes=(), node_count=1), output
    ),
    "top": lambda output: render_top.once(docs.top(), output),
    "top-nothing": lambda output: render_top.once(
        docs.top(sandboxes=(), pcpus=(), missing=(), notes=(), daemon=DOWN.daemon), output
    ),
    "top-screen": lambda output: render_top.screen(
        docs.top(), View(filter="shop", paused=True), output, 24
    ),
    "top-help": lambda output: render_top.screen(docs.top(), View(help=True), output, 40),
    "who": lambda output: who.who(docs.busy_cpu(), output),
    "who-several": lambda output: who.who(docs.busy_cpus(), output),
    "bind": lambda output: reports.bind(docs.bound(), output),
    "check": lambda output: render_findings.check(CHECKED, output),
    "check-all": lambda output: render_findings.check(CHECKED, output, everything=True),
    "prove": lambda output: render_prove.prove(proved(), output),
    "prove-guest": lambda output: render_prove.prove(proved(guest=True), output),
    "prove-irq": lambda output: render_prove.prove(proved(irq=True), output),
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
