"""The daemon as `kata-pin run` starts it, that also writes its number of tasks when it is asked.

    python -m tests.chaos.counted FILE --config CONFIG run

SIGUSR2 asks. Nothing of the code under test knows of it.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from pathlib import Path

from kata_pin.cli.main import run


def main(file: str, *arguments: str) -> int:
    """Run the command line; return its exit status."""

    def count(_signal: int, _frame: object) -> None:
        tasks = [one for one in gc.get_objects() if isinstance(one, asyncio.Task)]
        new = Path(f"{file}.new")
        new.write_text(str(sum(not task.done() for task in tasks)))
        new.rename(file)

    signal.signal(signal.SIGUSR2, count)
    return run(list(arguments))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
