"""A terminal for a program, and what a person would see on it.

Only the codes that kata-pin writes are understood; another one fails the test.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from tests.support.waiting import SCALE

_CODE = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])")


class Terminal:
    """Runs a command on a pseudo-terminal of a size; a context manager that ends it."""

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], columns: int, lines: int
    ) -> None:
        self._ours, theirs = pty.openpty()
        self.resize(columns, lines)
        self.settings = termios.tcgetattr(theirs)
        self.process = subprocess.Popen(  # setsid replaces itself: the pid is the command's
            ["setsid", "--ctty", *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, **environ},
        )
        self._theirs = theirs
        self.raw = ""
        self.alternate = False
        self.cursor = True
        self._screen: list[list[str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)

    def resize(self, columns: int, lines: int) -> None:
        """Change the size; the kernel sends SIGWINCH."""
        self.columns, self.lines = columns, lines
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._ours, text.encode())

    def signal(self, number: signal.Signals) -> None:
        """Send the program a signal."""
        self.process.send_signal(number)

    def now(self) -> termios._AttrReturn:
        """Return the terminal's settings as they are."""
        return termios.tcgetattr(self._theirs)

    def shows(self, wanted: str | Callable[[str], bool], seconds: float = 10.0) -> str:
        """Wait until the screen shows something; return the screen."""
        deadline = time.monotonic() + seconds * SCALE
        sees = wanted if callable(wanted) else (lambda screen: wanted in screen)
        while True:
            self._take(0.05)
            screen = self.screen
            if sees(screen):
                return screen
            assert time.monotonic() < deadline, (
                f"not shown: {wanted}\n{screen}\n{self.raw[-2000:]!r}"
            )

    def ends(self, seconds: float = 10.0) -> int:
        """Wait for the program's end; return its exit status, -N for a signal."""
        deadline = time.monotonic() + seconds * SCALE
        while self.process.poll() is None:
            self._take(0.05)
            assert time.monotonic() < deadline, "it does not end"
        self._take(0.05)
        return self.process.returncode

    @property
    def screen(self) -> str:
        """What is on the screen."""
        return "\n".join("".join(line).rstrip() for line in self._screen)

    def _take(self, seconds: float) -> None:
        while select.select([self._ours], [], [], seconds)[0]:
            try:
                data = os.read(self._ours, 65536)
            except OSError:  # nobody has it open any more
                return
            self.raw += data.decode("utf-8", "replace")
            seconds = 0
        self._replay()

    def _replay(self) -> None:
        """Play everything that was written onto an empty screen."""
        screen = [[" "] * self.columns for _ in range(self.lines)]
        row = column = at = 0
        text = self.raw
        start = text.rfind("\x1b[?1049h")
        while at < len(text):
            code = _CODE.match(text, at)
            if code:
                at = code.end()
                if at > start >= 0 or start < 0:
                    row, column = self._obey(code[1], code[2], screen, row, column)
                continue
            letter, at = text[at], at + 1
            if letter == "\r":
                column = 0
            elif letter == "\n":
                row = min(row + 1, self.lines - 1)
            elif row < self.lines and column < self.columns:
                screen[row][column] = letter
                column += 1
        self._screen = screen

    def _obey(
        self, given: str, letter: str, screen: list[list[str]], row: int, column: int
    ) -> tuple[int, int]:
        if letter == "H":
            return 0, 0
        if letter == "K":
            screen[row][column:] = [" "] * (self.columns - column)
        elif letter == "J":
            screen[row][column:] = [" "] * (self.columns - column)
            for line in range(row + (given != "2"), self.lines):
                screen[line] = [" "] * self.columns
            if given == "2":
                screen[:] = [[" "] * self.columns for _ in range(self.lines)]
        elif given == "?1049":
            self.alternate = letter == "h"
        elif given == "?25":
            self.cursor = letter == "h"
        else:
            assert letter == "m", f"unknown code {given}{letter}"
        return row, column
