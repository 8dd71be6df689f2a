"""A process whose threads play those of a VMM: they sleep, compute, or wake up 50 times a second.

A test of measuring needs real threads of another process, and no VMM.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kata_pin.base.documents.state import Thread
from kata_pin.base.threads import ThreadKey
from kata_pin.linux.files import HOST
from kata_pin.linux.tasks import starttime
from tests.unit.cli import documents as docs

_PROGRAM = """
import os, sys, threading, time
threading.stack_size(65536)
nice, *threads = sys.argv[1:]
os.nice(int(nice))
said = threading.Semaphore(0)
tids = {}

def play(number, does, cpus):
    tids[number] = threading.get_native_id()
    if cpus:
        os.sched_setaffinity(0, map(int, cpus.split(",")))
    said.release()
    while does == "spins":
        pass
    while does == "wakes":
        time.sleep(0.02)
    threading.Event().wait()

for number, one in enumerate(threads):
    does, _, cpus = one.partition("@")
    threading.Thread(target=play, args=(number, does, cpus), daemon=True).start()
    said.acquire()
print(*(tids[n] for n in range(len(threads))), flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Played:
    """The process and its threads in the order in which they were asked for."""

    pid: int
    tids: Sequence[int]

    def key(self, number: int) -> ThreadKey:
        """Return the identity of a thread."""
        tid = self.tids[number]
        return ThreadKey(self.pid, tid, starttime(HOST, self.pid, tid))

    def thread(self, number: int, role: str, **fields: object) -> Thread:
        """Return a thread as a state document has it, with its real affinity."""
        key = self.key(number)
        cpus = ",".join(map(str, sorted(os.sched_getaffinity(key.tid))))
        facts = {"tgid": key.tgid, "starttime": key.starttime, **fields}
        return docs.thread(key.tid, role, cpus, **facts)


@contextmanager
def played(*threads: str, nice: int = 0) -> Iterator[Played]:
    """Start a process with threads such as `sleeps`, `wakes` or `spins@0,1`; end it in the end."""
    command = [sys.executable, "-c", _PROGRAM, str(nice), *threads]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            tids = [int(word) for word in process.stdout.readline().split()]
            assert len(tids) == len(threads), "it started no threads"
            yield Played(process.pid, tids)
        finally:
            process.kill()
