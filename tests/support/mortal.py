"""A daemon that is started in milliseconds and dies when told: for killing it many times.

The same code as `kata-pin run`, forked from a process that has imported it already. `die_at` ends
it with SIGKILL, from within, just before its n-th step: a step is a wait of the event loop, a
statement of SQLite, a setting of an affinity, an answer, a removal or renaming of a file. The steps
are counted by sys.setprofile in that process; the code under test knows nothing of it.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Final

STEPS: Final = frozenset(
    {"poll", "execute", "executemany", "sched_setaffinity", "send", "unlink", "rename"}
)
PRELOADED: Final = ("kata_pin.cli.commands.daemon", "kata_pin.cli.main", "kata_pin.service.app")

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__, *PRELOADED])


def prepare() -> None:
    """Start the process that daemons are forked from; it lives as long as the test run."""
    multiprocessing.forkserver.ensure_running()


class Mortal:
    """One life of a daemon; `log` takes what it says."""

    def __init__(self, config: Path, log: Path, *, die_at: int = 0) -> None:
        self._process = _context.Process(target=_live, args=(str(config), str(log), die_at))
        self._process.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None, "started"
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.is_alive()

    def kill(self) -> None:
        """End it with SIGKILL, if it has not died yet; it must not have ended otherwise."""
        self._process.kill()
        self._process.join(10)
        status = self._process.exitcode
        self._process.close()
        assert status == -signal.SIGKILL, f"the daemon ended with {status}"

    def died(self, within_s: float) -> bool:
        """Wait for it to die of itself."""
        self._process.join(within_s)
        return not self._process.is_alive()


def _live(config: str, log: str, die_at: int) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    from kata_pin.cli.main import run

    if die_at:
        sys.setprofile(_Countdown(die_at))
    sys.exit(run(["--config", config, "run"]))


class _Countdown:
    """Counts steps as sys.setprofile tells them, and kills at the end."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def __call__(self, _frame: FrameType, event: str, called: object) -> None:
        if event == "c_call" and getattr(called, "__name__", "") in STEPS:
            self._left -= 1
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)
