"""An interactive command in a machine on the terminal that the lab was called from."""

from __future__ import annotations

import os
import sys
import termios
import tty

from tests.lab.channel import Channel
from tests.lab.errors import LabError


def size() -> list[int]:
    """Return rows and columns of our terminal."""
    shape = os.get_terminal_size(sys.stdin.fileno())
    return [shape.lines, shape.columns]


def interact(channel: Channel, argv: list[str]) -> int:
    """Run `argv` on our terminal until it ends; return its exit code."""
    if not sys.stdin.isatty():
        raise LabError("enter needs a terminal; use run for a script")
    ours = sys.stdin.fileno()
    before = termios.tcgetattr(ours)
    try:
        tty.setraw(ours)
        return channel.interact(argv, ours, size)
    finally:
        termios.tcsetattr(ours, termios.TCSADRAIN, before)
