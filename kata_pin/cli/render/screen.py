"""The output: what it can show, and writing lines or JSON to it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from kata_pin.base.errors import KataPinError
    from kata_pin.cli.render.layout import Output, Text


def output() -> Output:
    """Return what stdout can show: a terminal's width, or no limit for a pipe or a file."""
    from kata_pin.cli.render.layout import NO_LIMIT, Output

    width = _width() if sys.stdout.isatty() else NO_LIMIT
    return Output(width, unicode=_encodes(sys.stdout, "→×·─╳"))  # noqa: RUF001 - what we print


def _width() -> int:
    """Return the terminal's width; COLUMNS overrides it, as shells have it."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except OSError:
        return 80


def report(found: object, *, json: bool, by: str, **given: str | bool) -> None:
    """Print a document as JSON, or as the lines of the function `by` below cli.render.

    The function is given the document, the output and `given`. Its module is imported only when it
    is needed: rich takes longer than a JSON document.
    """
    if json:
        document(found)
        return
    module, _, name = by.partition(":")
    render = getattr(import_module(f"kata_pin.{module}"), name)
    show(render(found, output(), **given))


def show(lines: Iterable[Text]) -> None:
    """Print lines that fit already; colours only on a terminal that wants them (no-color.org)."""
    if not colours():
        for line in lines:
            sys.stdout.write(f"{line.plain}\n")
        return
    from rich.console import Console

    console = Console(
        file=sys.stdout,
        width=1_000_000,
        markup=False,
        highlight=False,
        emoji=False,
        soft_wrap=True,
        force_terminal=True,
    )
    for line in lines:
        console.print(line.for_rich())


def colours() -> bool:
    """Whether stdout gets colours and bold letters."""
    wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
    return sys.stdout.isatty() and wanted


def document(report: object) -> None:
    """Print a document as JSON, indented on a terminal, on one line elsewhere; ASCII throughout."""
    import json

    from kata_pin.service.protocol import as_data

    text = json.dumps(as_data(report), indent=2 if sys.stdout.isatty() else None, ensure_ascii=True)
    sys.stdout.write(text.replace("\x7f", "\\u007f") + "\n")


@contextmanager
def progress(title: str, total: float | None = None) -> Iterator[Callable[[float, str], None]]:
    """Show on a terminal that long work goes on, until it ends; nothing in a pipe.

    The function that it gives takes how much of `total` is done, and the title from now on. Without
    a total only the time is shown. stderr is used alone: what the command prints stays as it is.
    """
    if not sys.stderr.isatty():
        yield lambda _done, _title: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn() if total else TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=Console(stderr=True), transient=True,
        redirect_stdout=False, redirect_stderr=False,
    ) as bar:  # fmt: skip
        task = bar.add_task(title, total=total)
        yield lambda done, title: bar.update(task, completed=done, description=title)


def write(file: str, text: str) -> None:
    """Write a text to a file, or to stdout for `-`; raises KataPinError."""
    from kata_pin.base.errors import KataPinError, reason_of

    if file == "-":
        sys.stdout.write(text)
        return
    try:
        with open(file, "w", encoding="utf-8") as target:
            target.write(text)
    except OSError as error:
        where = "" if error.filename else f"{file}: "
        raise KataPinError(f"cannot write {where}{reason_of(error)}") from error


def expect_writable(file: str) -> None:
    """Raise KataPinError unless a text can be written to a file; what it contains stays."""
    from kata_pin.base.errors import KataPinError, reason_of

    try:
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
    except OSError as error:
        raise KataPinError(f"cannot write {reason_of(error)}") from error


def failure(error: KataPinError) -> None:
    """Print an error on stderr: one line, and a hint."""
    from kata_pin.cli.reports.words import safe

    sys.stderr.write(f"kata-pin: {safe(error.message)}\n")
    if error.hint:
        sys.stderr.write(f"  hint: {safe(error.hint)}\n")


def tolerate_any_text() -> None:
    """Make stdout and stderr show what they cannot encode as escapes instead of failing.

    A stream that was closed before we started becomes one that goes nowhere.
    """
    sys.stdout = sys.stdout or _nowhere()
    sys.stderr = sys.stderr or _nowhere()
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")


def _encodes(stream: TextIO, text: str) -> bool:
    try:
        text.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
