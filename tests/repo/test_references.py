"""Every reference to a document resolves: decisions, ADRs, headings, files, links."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

DECISION = re.compile(r"(?<![\w./-])D([0-9]{1,2})\b(?!-)")
ADR = re.compile(r"\bADR ([0-9]+)\b")
HEADING = re.compile(r"([\w./-]+\.md)`?\)?, \"([^\"]+)\"")
FILE = re.compile(r"(?<![\w/.-])((?:docs|hooks)/(?!\S+\.new\b)[\w./-]*\w)")
MODULE = re.compile(r"(?<![\w./<-])((?:\w+/)*\w+\.py)\b")
TEST = re.compile(r"`(?:tests/\w+/)?(test_\w+)(?:\.py)?`")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
UNKNOWN = re.compile(
    r"\b(?:DESIGN|STYLE)(?! D[0-9])(?:\.md)? [0-9]|\bSTYLE:"
    r"|\bfacts/|\bfacts of (?:both|the agent)|[a-z]\.md [0-9]"
)
"""Sections of papers that are not in this repository."""

PLACES = tuple(
    ROOT / name
    for name in (
        "",
        "kata_pin",
        "kata_pin/cli",
        "kata_pin/options",
        "tests/unit",
        "tests/unit/options",
    )
)
"""What a module's path may be relative to, beside the document's own folder."""


def _texts() -> list[Path]:
    """Return the searched files: code, scripts and documents; no data, and not this one."""
    found = [ROOT / "pyproject.toml", *ROOT.glob("*.md"), *(ROOT / ".ci").glob("*")]
    found += (ROOT / "scripts").iterdir()
    for folder in ("kata_pin", "tests", "docs", "hooks"):
        for suffix in ("py", "md", "conf", "service"):
            found += (ROOT / folder).rglob(f"*.{suffix}")
    return sorted(
        path
        for path in found
        if path.is_file()
        and path != Path(__file__)
        and "_pb2" not in path.name
        and "__pycache__" not in path.parts
        and not path.is_relative_to(ROOT / "tests/data")
    )


@cache
def _names() -> set[str]:
    """Return the file names of all modules, and of programs of others that documents name."""
    found = [*(ROOT / "kata_pin").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    return {path.name for path in [*found, *(ROOT / "scripts").glob("*.py")]}


@cache
def headings(path: Path) -> dict[str, str]:
    """Return the headings of a Markdown file by their anchor, as GitHub makes it."""
    found: dict[str, str] = {}
    fenced = False
    for line in path.read_text().splitlines():
        if line.startswith("```"):
            fenced = not fenced
        match = re.match(r"#{1,6} (.+)", line)
        if match is None or fenced:
            continue
        text = match[1].replace("`", "")
        anchor = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        found[anchor] = text
    return found


def _document(name: str, around: Path) -> Path | None:
    """Return the document that a text calls `name`, None if there is none."""
    for folder in (around.parent, ROOT, DOCS):
        if (folder / name).is_file():
            return folder / name
    return None


@cache
def _known_decisions() -> set[str]:
    return {text.split()[0] for text in headings(DOCS / "design.md").values()}


def _decisions(path: Path, line: str) -> Iterator[str]:
    for match in DECISION.finditer(line):
        if f"D{match[1]}" not in _known_decisions():
            yield f"no decision {match[0]} in docs/design.md"
    for match in ADR.finditer(line):
        if not list(DOCS.glob(f"adr/{int(match[1]):04}-*.md")):
            yield f"no {match[0]} in docs/adr"


def _places(path: Path, line: str) -> Iterator[str]:
    for match in HEADING.finditer(line):
        document = _document(match[1], path)
        if document is None or match[2] not in headings(document).values():
            yield f"no heading {match[2]!r} in {match[1]}"
    for match in FILE.finditer(line):
        if not list(ROOT.glob(f"{match[1]}*")):
            yield f"no file {match[1]}"
    for match in UNKNOWN.finditer(line):
        yield f"not in this repository: {match[0]!r}"


def _links(path: Path, line: str) -> Iterator[str]:
    for match in LINK.finditer(line):
        target, _, anchor = match[1].partition("#")
        if "://" in target:
            continue
        file = path.parent / target if target else path
        if not file.exists():
            yield f"link to {match[1]}: no such file"
        elif anchor and anchor not in headings(file):
            yield f"link to {match[1]}: no such heading"
    for match in TEST.finditer(line):
        if f"{match[1]}.py" not in _names():
            yield f"no test module {match[1]}"


def _modules(path: Path, line: str) -> Iterator[str]:
    for match in MODULE.finditer(line):
        folder, _, name = match[1].rpartition("/")
        near = any((place / match[1]).is_file() for place in (*PLACES, path.parent))
        if not (near if folder else name in _names()):
            yield f"no file {match[1]}"


def _checks(path: Path) -> Iterator[Callable[[Path, str], Iterator[str]]]:
    """Yield the checks of one file; modules are not checked in tests, which make up some."""
    yield from (_decisions, _places)
    if path.suffix == ".md":
        yield _links
    if path.suffix == ".md" or path.is_relative_to(ROOT / "kata_pin"):
        yield _modules


def test_references_resolve() -> None:
    """Decisions, ADRs, documents, headings and modules that a text names exist."""
    problems = []
    for path in _texts():
        checks = tuple(_checks(path))
        problems += [
            f"{path.relative_to(ROOT)}:{number}: {problem}"
            for number, line in enumerate(path.read_text().splitlines(), 1)
            for check in checks
            for problem in check(path, line)
        ]
    assert not problems, "\n" + "\n".join(problems)


def test_decisions_are_numbered_in_order() -> None:
    """docs/design.md has D1, D2, ... once each, in this order."""
    names = [text.split()[0] for text in headings(DOCS / "design.md").values()]
    numbers = [int(name[1:]) for name in names if re.fullmatch(r"D[0-9]+", name)]
    assert numbers == list(range(1, len(numbers) + 1))


def test_adrs_are_numbered_in_order() -> None:
    """docs/adr has one page per number, and each page's title begins with it."""
    pages = sorted((DOCS / "adr").glob("*.md"))
    assert [int(page.name[:4]) for page in pages] == list(range(1, len(pages) + 1))
    for page in pages:
        assert page.read_text().startswith(f"# {int(page.name[:4])}. "), page.name


@pytest.mark.parametrize(
    "line",
    [
        "as D99 says",
        "see ADR 99",
        'as in docs/nri.md, "No such heading"',
        "docs/none.md has it",
        "[x](none.md)",
        "[x](design.md#none)",
        "`daemon/none.py`",
        "see none.py",
        "`test_none`",
        "STYLE 3.3",
        "facts of both runtimes",
        "Facts: lab.md 1.6",
    ],
)
def test_broken_references_are_found(line: str) -> None:
    """The checks themselves find what is wrong."""
    page = DOCS / "design.md"
    assert [problem for check in _checks(page) for problem in check(page, line)]
