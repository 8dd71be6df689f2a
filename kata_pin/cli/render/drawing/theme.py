"""Colours of pictures and pages, light and dark: the reader's system chooses (CSS media query).

No variables of CSS: programs other than browsers that show SVG do not know them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Theme:
    """Colours as #rrggbb. Each owner has a pair: behind text, and of strips and borders."""

    page: str
    text: str
    faint: str  # text that matters less, borders of groups
    group: str  # behind a NUMA node
    plain: tuple[str, str]  # the pair of what has no owner, or several
    bad: str  # borders and text of problems
    foreign: str  # foreign tasks' time
    good: str  # a verdict that is as it should be
    owners: tuple[tuple[str, str], ...]


LIGHT: Final = Theme(
    page="#ffffff",
    text="#1b1f24",
    faint="#59636e",
    group="#f3f5f7",
    plain=("#ffffff", "#6e7781"),
    bad="#b3001b",
    foreign="#a84300",
    good="#0b6b3a",
    owners=(
        ("#d3e5f8", "#1f6fb5"),
        ("#fbe3c9", "#b45309"),
        ("#cfeedd", "#0b7a53"),
        ("#eedcf4", "#8e3fa8"),
        ("#f5eeb0", "#857400"),
        ("#fad6e2", "#b8326b"),
        ("#c9eef0", "#007680"),
        ("#eadfce", "#7a5230"),
    ),
)

DARK: Final = Theme(
    page="#0d1117",
    text="#f0f3f6",
    faint="#9da7b1",
    group="#161b22",
    plain=("#0d1117", "#8b949e"),
    bad="#ff8182",
    foreign="#ffb060",
    good="#56d38c",
    owners=(
        ("#12304c", "#6cb6ff"),
        ("#43270b", "#f0a050"),
        ("#0c3b2a", "#4fd0a0"),
        ("#38203f", "#d39be6"),
        ("#383206", "#e3d34f"),
        ("#451a2c", "#f58ab0"),
        ("#093538", "#58d3dc"),
        ("#36291b", "#cda57c"),
    ),
)

RUNS: Final = ("own", "pod", "unavoidable", "foreign")
"""Whose tasks ran, from the bottom of a timeline's bar to its top."""

FONT: Final = "ui-monospace,'DejaVu Sans Mono','Liberation Mono',Menlo,Consolas,monospace"

_FIXED: Final = f"""
text,.mono{{font-family:{FONT};font-size:13px;white-space:pre}}
text{{unicode-bidi:isolate;direction:ltr}}
.title{{font-weight:bold}}
.group,.core{{stroke-width:1}}
.core{{fill:none}}
.shared>.edge{{stroke-width:1}}
.exclusive>.edge{{stroke-width:2}}
.reserved>.edge{{stroke-width:2;stroke-dasharray:9 3}}
.housekeeping>.edge{{stroke-width:2;stroke-dasharray:2 3}}
.free>.edge,.offline>.edge{{stroke-width:1;stroke-dasharray:1 3}}
.problem>.edge{{stroke-width:4;stroke-dasharray:none}}
"""


def style() -> str:
    """Return the rules of pictures for both themes."""
    rules = [_FIXED, *_rules(LIGHT), "@media (prefers-color-scheme:dark){", *_rules(DARK), "}"]
    return "\n".join(one.strip() for one in rules)


def _rules(theme: Theme) -> Iterator[str]:
    yield f"svg.picture{{background:{theme.page}}}"
    yield f"text{{fill:{theme.text}}}"
    yield f".group{{fill:{theme.group};stroke:{theme.faint}}}"
    yield f".core{{stroke:{theme.faint}}}"
    yield f".gap{{stroke:{theme.page};fill:{theme.page}}}"
    for name, (fill, strong) in (("plain", theme.plain), *_named(theme)):
        yield f".{name}>.edge{{fill:{fill};stroke:{strong}}}"
        yield f".{name}>.strip{{fill:{strong}}}"
    yield f".problem>.edge{{stroke:{theme.bad}}}"
    yield f".bad,text.bad{{fill:{theme.bad};color:{theme.bad}}}"
    yield f".time{{fill:{theme.foreign}}}"
    for name, colour in zip(RUNS, _runs(theme), strict=True):
        yield f".run-{name}{{fill:{colour}}}"
    yield f"text.faint{{fill:{theme.faint}}}"


def _runs(theme: Theme) -> tuple[str, ...]:
    return theme.owners[0][1], theme.owners[6][1], theme.plain[1], theme.bad


def _named(theme: Theme) -> Iterator[tuple[str, tuple[str, str]]]:
    for n, pair in enumerate(theme.owners):
        yield f"owner{n}", pair


def owner_class(colour: int | None) -> str:
    """Return the class of an owner's colours; beyond the last colour they start again."""
    return "plain" if colour is None else f"owner{colour % len(LIGHT.owners)}"


def page_style() -> str:
    """Return the rules of a page around pictures."""
    light, dark = "".join(_page_rules(LIGHT)), "".join(_page_rules(DARK))
    return f"{_PAGE}{light}\n@media (prefers-color-scheme:dark){{{dark}}}"


_PAGE: Final = """
svg[width="0"]{position:absolute}
body{font-family:system-ui,sans-serif;font-size:15px;line-height:1.45;margin:1.5rem;max-width:100rem}
h1{font-size:1.4rem;overflow-wrap:anywhere}h2{font-size:1.1rem;margin-top:1.8rem}
p{margin:.3rem 0;overflow-wrap:anywhere}
.verdict{font-size:1.2rem;font-weight:bold}
.wide{overflow-x:auto;margin:1rem 0}
table{border-collapse:collapse;font-size:13px}
th,td{text-align:left;vertical-align:top;padding:.2rem .6rem;border-bottom:1px solid}
td{overflow-wrap:anywhere}.short{white-space:nowrap}
"""


def _page_rules(theme: Theme) -> Iterator[str]:
    yield f"body{{background:{theme.page};color:{theme.text}}}"
    yield f"th,td{{border-color:{theme.faint}}}thead th{{background:{theme.group}}}"
    yield f".good{{color:{theme.good}}}.odd{{color:{theme.foreign}}}"
