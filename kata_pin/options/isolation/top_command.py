"""`kata-pin top`, and the terminal that it draws on."""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Sequence
from contextlib import closing
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Self

import click
from msgspec.structs import replace

from kata_pin.cli.options import FiniteNumber, complete_sandbox, global_options, in_namespace
from kata_pin.cli.render import screen
from kata_pin.cli.session import Session

if TYPE_CHECKING:
    from kata_pin.base.documents.state import State
    from kata_pin.cli.render.layout import Text
    from kata_pin.options.isolation.top import Meter


INTERVAL_S: Final = 2.0

FIRST_S: Final = 0.5
"""Length of the first sample on a terminal, so that it does not stay empty for long."""

SPARE: Final = 128
"""Descriptors that are not for files of threads."""


@click.command()
@click.argument("sandbox", required=False, shell_complete=complete_sandbox)
@in_namespace
@click.option(
    "--interval",
    metavar="SECONDS",
    type=FiniteNumber(0.5, 3600),
    default=INTERVAL_S,
    help=f"Seconds between two samples.  [default: {INTERVAL_S:g}]",
)
@click.option("--once", is_flag=True, help="Print one sample and exit, as without a terminal.")
@click.option("--threads", is_flag=True, help="Show overhead threads one by one.")
@global_options
@click.pass_obj
def top(
    session: Session,
    *,
    sandbox: str | None,
    namespace: str | None,
    interval: float,
    once: bool,
    threads: bool,
) -> None:
    """Show live what sandboxes and their exclusive pCPUs do.

    Per vCPU: CPU time, time that it had to wait for a pCPU (steal, for its guest), preemptions and
    migrations. Per exclusive pCPU: its owner's and foreign use, and interrupts. Nothing is changed.
    With --json one document per line and sample until Ctrl-C. h shows the keys.
    """
    from kata_pin.linux.files import HOST
    from kata_pin.options.isolation.rates import Sampler
    from kata_pin.options.isolation.top import Meter

    chosen = session.connect().chosen(sandbox, namespace)

    def ask() -> State:
        state = session.connect().state(chosen)
        if namespace is None:
            return state
        from kata_pin.cli.reports.words import within

        return replace(state, sandboxes=tuple(within(state.sandboxes, namespace)))

    with closing(Meter(ask, Sampler(HOST, _room()), threads=threads)) as meter:
        terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if session.json or once or not terminal:
            _print(session, meter, interval, once=once or not session.json)
        else:
            _interact(meter, interval)


def _room() -> int:
    """Return how many descriptors may be kept open, after allowing as many as the system does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(hard, 1 << 16) if hard != resource.RLIM_INFINITY else 1 << 16
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(0, most - SPARE)


def _print(session: Session, meter: Meter, interval: float, *, once: bool) -> None:
    """Print samples, one after the other."""
    while True:
        time.sleep(interval)
        found = meter.document()
        if session.json:
            import json

            from kata_pin.service.protocol import as_data

            sys.stdout.write(json.dumps(as_data(found)).replace("\x7f", "\\u007f") + "\n")
        else:
            screen.report(found, json=False, by="options.isolation.top_render:once")
        sys.stdout.flush()
        if once:
            return


def _interact(meter: Meter, interval: float) -> None:
    """Show samples on the whole terminal until `q`."""
    from kata_pin.cli.render.layout import Output
    from kata_pin.options.isolation.top import View, keys
    from kata_pin.options.isolation.top_render import rows
    from kata_pin.options.isolation.top_render import screen as frame

    colours, unicode = screen.colours(), screen.output().unicode
    view = View(threads=meter.threads)
    time.sleep(min(interval, FIRST_S))
    document = meter.document()
    due = time.monotonic() + interval
    with Screen() as terminal:
        while not view.ended:
            width, height = terminal.size()
            output, page = Output(width, unicode=unicode), max(1, height - 8)
            view = view.bounded(rows(document, view, output), page)
            terminal.draw(frame(document, view, output, height), colours=colours)
            typed = terminal.read(due - time.monotonic())
            for key in keys(typed or ""):
                view = view.pressed(key, page)
            meter.expand(threads=view.threads)
            if time.monotonic() >= due:
                due = time.monotonic() + interval
                if not view.paused:
                    document = meter.document()


# The terminal of a command that draws its own screen: one key at a time, and one frame at a time.
#
# The alternate screen leaves what was on the terminal untouched. However the command ends (an
# error, Ctrl-C, SIGTERM, SIGHUP) the terminal is as before; Ctrl-Z gives it back until the command
# goes on.

_ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[H\x1b[2J"
_LEAVE: Final = "\x1b[?25h\x1b[?1049l"
_FATAL: Final = (signal.SIGTERM, signal.SIGHUP)


class Screen:
    """A terminal while it shows frames; a context manager."""

    def __init__(self) -> None:
        self._input = sys.stdin.fileno()
        self._output = sys.stdout.fileno()
        self._settings: list[Any] = termios.tcgetattr(self._input)
        self._handlers: dict[signal.Signals, Any] = {}
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._pending = b""

    def __enter__(self) -> Self:
        for number in (*_FATAL, signal.SIGWINCH, signal.SIGTSTP):
            self._handlers[number] = signal.getsignal(number)
        for number in _FATAL:
            signal.signal(number, _exit)
        signal.signal(signal.SIGWINCH, self._resized)
        signal.signal(signal.SIGTSTP, self._stopped)
        self._take()
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._wake)
        os.close(self._woken)

    def size(self) -> tuple[int, int]:
        """Return columns and lines."""
        found = os.get_terminal_size(self._output)
        return found.columns or 80, found.lines or 24

    def draw(self, lines: Sequence[Text], *, colours: bool) -> None:
        """Show lines that fit, in place of the frame before."""
        text = "\x1b[K\r\n".join(_ansi(lines) if colours else [line.plain for line in lines])
        self._write(f"\x1b[H{text}\x1b[K\x1b[J")

    def read(self, seconds: float) -> str | None:
        """Return what was typed within the time; nothing after a resize, None if nothing happened.

        Raises EOFError once the terminal is gone.
        """
        waiting = select.poll()
        waiting.register(self._input, select.POLLIN)
        waiting.register(self._wake, select.POLLIN)
        ready = dict(waiting.poll(max(0.0, seconds) * 1000))
        if self._wake in ready:
            os.read(self._wake, 4096)
        if self._input not in ready:
            return "" if ready else None
        data = os.read(self._input, 1024)
        if not data:
            raise EOFError("the terminal was closed")
        if data.endswith(b"\x1b"):  # the rest of a sequence may be on its way
            time.sleep(0.02)
            while select.select([self._input], [], [], 0)[0] and len(data) < 4096:
                more = os.read(self._input, 64)
                if not more:
                    break
                data += more
        return data.decode("utf-8", "replace")

    def _take(self) -> None:
        tty.setcbreak(self._input)
        self._write(_ENTER)

    def _give_back(self) -> None:
        try:
            self._write(_LEAVE)
            termios.tcsetattr(self._input, termios.TCSADRAIN, self._settings)
        except (OSError, termios.error):
            pass  # the terminal is gone, and with it what could be restored

    def _write(self, text: str) -> None:
        data = text.encode(sys.stdout.encoding or "utf-8", "backslashreplace")
        while data:
            data = data[os.write(self._output, data) :]

    def _resized(self, _number: int, _frame: FrameType | None) -> None:
        os.write(self._woken, b"w")

    def _stopped(self, _number: int, _frame: FrameType | None) -> None:
        """Give the terminal back, stop, and take it again when the shell lets us go on."""
        self._give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._take()
        self._resized(0, None)


def _exit(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _ansi(lines: Sequence[Text]) -> list[str]:
    """Return lines with the codes of their colours."""
    from io import StringIO

    from rich.console import Console

    buffer = StringIO()
    console = Console(
        file=buffer, width=1_000_000, markup=False, highlight=False, emoji=False,
        soft_wrap=True, force_terminal=True, color_system="standard",
    )  # fmt: skip
    for line in lines:
        console.print(line.for_rich())
    return buffer.getvalue().split("\n")[:-1]
