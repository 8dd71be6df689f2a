"""The terminal of a command that draws its own screen: one key at a time, and one frame at a time.

The alternate screen leaves what was on the terminal untouched. However the command ends (an error,
Ctrl-C, SIGTERM, SIGHUP) the terminal is as before; Ctrl-Z gives it back until the command goes on.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from rich.text import Text

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        console.print(line)
    return buffer.getvalue().split("\n")[:-1]
