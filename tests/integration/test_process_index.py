"""The table of processes against the real /proc."""

from __future__ import annotations

import os
import subprocess
import sys

from kata_pin.linux.files import HOST
from kata_pin.linux.process import ProcessIndex
from tests.support.specimen import specimen
from tests.support.waiting import wait_for

_PARENT = """
import subprocess, sys
child = subprocess.Popen(["/bin/cat"], stdin=sys.stdin)
print(child.pid, flush=True)
child.wait()
"""


def test_follows_births_and_exits() -> None:
    """A process is in the table after the refresh that follows its birth, and out after its end."""
    index = ProcessIndex(HOST)
    index.refresh()
    with specimen() as ours:
        assert index.get(ours.pid) is None
        index.refresh()
        found = index.get(ours.pid)
        assert found is not None
        assert found.ppid == os.getpid()
        pid = ours.pid
    index.refresh()
    assert index.get(pid) is None


def test_incremental_equals_full() -> None:
    """After births and exits an old table, refreshed, equals a new one."""
    old = ProcessIndex(HOST)
    old.refresh()
    with specimen(), specimen() as ended:
        old.refresh()
        ended.child.kill()
        ended.child.wait()

        def equal() -> bool:
            new = ProcessIndex(HOST)
            new.refresh()
            old.refresh()
            ours = {p.pid for p in new.all() if p.ppid == os.getpid()}
            return ours == {p.pid for p in old.all() if p.ppid == os.getpid()} and len(ours) > 0

        wait_for(equal, "both tables to agree")


def test_orphan_gets_its_new_parent() -> None:
    """A child whose parent was killed is found under the parent that it has now."""
    parent = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        orphan = int(parent.stdout.readline())
        index = ProcessIndex(HOST)
        index.refresh()
        assert [p.pid for p in index.children(parent.pid)] == [orphan]
        parent.kill()
        parent.wait()
        index.refresh()
        found = index.get(orphan)
        assert found is not None
        assert found.ppid != parent.pid
        parent.stdin.close()
        wait_for(lambda: not os.path.exists(f"/proc/{orphan}"), "the orphan to end")


def test_sees_an_exec() -> None:
    """A process read between its fork and its exec has its new name after the next refresh."""
    read, write = os.pipe()
    child = subprocess.Popen(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            "import os; os.read(0, 1); os.execv('/bin/cat', ['cat'])",
        ],
        stdin=read,
    )
    try:
        index = ProcessIndex(HOST)
        index.refresh()
        os.write(write, b"x")

        def name() -> str:
            index.refresh()
            found = index.get(child.pid)
            return found.comm if found else ""

        wait_for(lambda: name() == "cat", "the name after exec", timeout_s=0.9)
    finally:
        os.close(write)
        os.close(read)
        child.wait()
