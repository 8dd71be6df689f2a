"""Running the real hook program, and a small daemon to answer it.

`run_hook` starts the program as a runtime does; `HookDaemon` is the real HookServer in a thread,
answering as its `answer` function says. Nothing here replaces code under test.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import kata_pin.hook
from kata_pin.records.hooks import HookConnection, HookMessage, HookServer, decode
from tests.support.waiting import SCALE

__all__ = ["HookConnection", "HookMessage", "HookServer", "encode"]  # for tests without internals

HOOK = Path(kata_pin.hook.__file__)
INTERPRETER = "/usr/bin/python3"  # the one of the shebang
COMMAND = (INTERPRETER, "-IS", str(HOOK))
STATE = b'{"ociVersion":"","id":"c1","status":"","pid":1,"bundle":"/run/b"}'

PATIENT = tuple(f"--{budget}-ms={5000 * SCALE:.0f}" for budget in ("record", "pin"))
"""Budgets for tests in which the daemon answers, on a machine that others load too."""

SHIPPED_MS: Final = {"record": 250, "pin": 200}

Answer = Callable[[HookConnection], Awaitable[None]]


@dataclass(frozen=True)
class HookRun:
    """How one call of the hook ended, and how long it took."""

    status: int
    stdout: str
    stderr: str
    seconds: float


def encode(message: HookMessage) -> bytes:
    """Return the bytes of a request as the hook sends them, also those of its spool file."""
    head = f"KP1 {message.phase.value} {message.stamp_ns} {message.pid} {len(message.body)}\n"
    return head.encode("ascii") + message.body


def budgets_beside(calm: Sequence[HookRun]) -> tuple[str, ...]:
    """Return the shipped budgets; on a busy machine three times what hooks took without an attack.

    Raises AssertionError if these themselves were not answered.
    """
    assert [run.stderr for run in calm if run.stderr] == []
    slowest_ms = 3000 * max(run.seconds for run in calm)
    return tuple(f"--{name}-ms={max(ms, slowest_ms):.0f}" for name, ms in SHIPPED_MS.items())


def run_hook(runtime_dir: Path, *arguments: str, state: bytes = STATE) -> HookRun:
    """Run the hook with an empty environment and `state` on stdin.

    It is patient unless `arguments` have budgets of their own: the last ones count.
    """
    start = time.monotonic()
    done = subprocess.run(
        [*COMMAND, *PATIENT, *arguments, f"--runtime-dir={runtime_dir}"],
        input=state,
        capture_output=True,
        env={},
        timeout=20 * SCALE,
        check=False,
    )
    seconds = time.monotonic() - start
    return HookRun(done.returncode, done.stdout.decode(), done.stderr.decode(), seconds)


@contextmanager
def runtime_directory() -> Iterator[Path]:
    """Make a runtime directory with a spool; its path is short, as socket paths must be."""
    path = Path(tempfile.mkdtemp(prefix="kp-"))
    (path / "spool").mkdir(mode=0o700)
    try:
        yield path
    finally:
        shutil.rmtree(path)


def spooled(runtime_dir: Path) -> list[Path]:
    """Return the spool's files, hidden and unfinished ones too."""
    return sorted((runtime_dir / "spool").iterdir())


def spooled_messages(runtime_dir: Path) -> list[HookMessage]:
    """Return the messages in the spool; each file must have the name of its message."""
    files = spooled(runtime_dir)
    messages = [decode(file.read_bytes()) for file in files]
    assert [file.name for file in files] == [message.spool_name for message in messages]
    return messages


async def answer_at_once(connection: HookConnection) -> None:
    """Answer as a daemon does that has nothing else to do."""
    await connection.recorded()
    await connection.pinned()


async def gone_within(connection: HookConnection, seconds: float) -> bool:
    """Wait until the hook has disconnected; return whether it did."""
    try:
        async with asyncio.timeout(seconds):
            return await connection.gone.wait()
    except TimeoutError:
        return False


@asynccontextmanager
async def serving(
    path: str,
    handler: Answer = answer_at_once,
    *,
    connections: int = 8,
    request_s: float = 0.2,
    handler_s: float = 5.0,
) -> AsyncIterator[HookServer]:
    """Serve the hook socket in this event loop."""
    server = HookServer(
        path, handler, connections=connections, request_s=request_s, handler_s=handler_s
    )
    server.bind()
    task = asyncio.create_task(server.serve())
    try:
        yield server
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        server.close()  # a task that is cancelled before its first turn closes nothing


class HookDaemon:
    """A HookServer in a thread of its own, as a context manager; `messages` is what it received."""

    def __init__(self, runtime_dir: Path, answer: Answer = answer_at_once) -> None:
        self.messages: list[HookMessage] = []
        self._failures: list[Exception] = []
        self._path = str(runtime_dir / "hook.sock")
        self._answer = answer
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(5), "the test daemon did not start"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(5)
        assert not self._thread.is_alive(), "the test daemon did not stop"
        for failure in self._failures:
            raise failure

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        server = HookServer(self._path, self._take)
        server.bind()
        self._ready.set()
        serving = asyncio.create_task(server.serve())
        await self._stop.wait()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    async def _take(self, connection: HookConnection) -> None:
        self.messages.append(connection.message)
        try:
            await self._answer(connection)
        except Exception as error:
            self._failures.append(error)  # a failed assertion in `answer` fails the test
            raise
