"""A process whose memory is locked for good, and the file system that makes it so.

    with locked_process(folder, "-name", "sandbox-p1") as process:
        ...  # whoever reads /proc/PID/cmdline waits until the block ends

The file system is a real FUSE one which never answers a read. One thread of the process reads a
page of it through /proc/self/mem, which holds the lock of the process's memory meanwhile; another
wants to map something and waits for that lock; every other reader queues behind it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.fuse import FaultyFiles
from tests.support.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]


def lock(path: str) -> None:
    """Lock this process's own memory by a page of a file, and sleep."""
    with open(path, "rb") as file, open("/proc/self/mem", "rb", buffering=0) as memory:
        page = mmap.mmap(file.fileno(), 4096, access=mmap.ACCESS_COPY)
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        threading.Thread(target=os.pread, args=(memory.fileno(), 1, address), daemon=True).start()
        wait_for(lambda: _reads(os.getpid()), "a reader")
        print("ready", flush=True)
        threading.Thread(target=mmap.mmap, args=(-1, 1 << 20), daemon=True).start()
        sys.stdin.read()


def _reads(pid: int) -> bool:
    """Whether a thread waits for the file system's answer."""
    return any(
        (task / "wchan").read_text() == "request_wait_answer"
        for task in Path(f"/proc/{pid}/task").iterdir()
    )


def _maps(pid: int) -> bool:
    """Whether a thread waits for the lock (state D)."""
    stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return any(text.rpartition(") ")[2].startswith("D") for text in stats)


@contextmanager
def locked_process(
    folder: Path, *arguments: str, executable: str = sys.executable, prefix: Sequence[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process with these arguments whose memory is locked; `folder` is for its mount.

    At the end the file system is cut off: before that neither the process nor a reader can end.
    """
    argv = [*prefix, executable, __file__, str(folder / "page"), *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHOME": sys.base_prefix}
    with FaultyFiles(folder, {"page": bytes(1 << 16)}) as files:
        files.hang.add("page")
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin, process.stdout:
            try:
                assert process.stdout.readline() == b"ready\n"
                wait_for(lambda: _maps(process.pid), "the memory to be locked")
                yield process
            finally:
                process.kill()
                files.close()
                process.wait(10)


if __name__ == "__main__":
    lock(sys.argv[1])
