"""tests/support/leaks.py: each kind of leak fails its test, and a clean test passes."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

LEAKING = '''
import asyncio, os, subprocess, sys, time
import asyncinotify
import pytest
from tests.support import leaks

KEPT = []
leaks.SETTLE_S = 0.2

@pytest.fixture(scope="module")
def wide():
    with open("/dev/null") as file:
        yield file

@pytest.fixture
def narrow():
    with open("/dev/null") as file:
        yield file

@pytest.fixture(scope="module")
def inotify():
    with asyncinotify.Inotify() as one:
        yield one

async def test_clean(wide, narrow):
    task = asyncio.create_task(asyncio.sleep(0))
    await task
    subprocess.run(["true"], check=True)

def test_descriptor():
    os.open("/dev/null", os.O_RDONLY)

def test_watch(inotify, tmp_path):
    inotify.add_watch(tmp_path, asyncinotify.Mask.CREATE)

def test_child():
    KEPT.append(subprocess.Popen(["sleep", "20"]))

async def test_task():
    KEPT.append(asyncio.create_task(asyncio.sleep(20)))
    await asyncio.sleep(0)

async def test_slow():
    until = time.thread_time() + 0.3
    while time.thread_time() < until:
        pass

def test_mount(tmp_path):
    subprocess.run(["mount", "-t", "tmpfs", "none", tmp_path], check=True)

def test_end():
    """Not a test: what was started ends."""
    KEPT[0].kill()
    KEPT[0].wait()
'''

FOUND = {
    "descriptor": r"descriptor \d+ -> /dev/null",
    "watch": r"inotify watch \d+ ",
    "child": r"child process \d+ sleep",
    "task": r"task <Task pending .*sleep",
    "slow": r"callback that took 0\.\d+ s of CPU time: .*test_slow",
    "mount": r"mount /.*test_mount",
}


def test_each_kind_of_leak_fails_its_test(tmp_path: Path) -> None:
    """One run of pytest over tests that leak; mounts need root and a namespace of their own."""
    root = os.geteuid() == 0 and shutil.which("unshare") is not None
    kinds = set(FOUND) if root else set(FOUND) - {"mount"}
    file = tmp_path / "test_leaking.py"
    file.write_text(LEAKING)
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.leaks", "-p", "no:randomly"]
    command += ["-o", "asyncio_mode=auto", f"--rootdir={tmp_path}", "-q", "--tb=short"]
    command += [f"--basetemp={tmp_path / 'base'}", "-p", "no:cacheprovider", str(file)]
    command += [] if root else ["--deselect", "test_leaking.py::test_mount"]
    prefix = ["unshare", "-m", "--propagation", "private"] if root else []
    done = subprocess.run(
        [*prefix, *command],
        capture_output=True, text=True, timeout=50, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    blamed = set(re.findall(r"^ERROR test_leaking.py::test_(\w+)", done.stdout, re.MULTILINE))
    assert blamed == kinds, done.stdout + done.stderr
    for kind in kinds:
        assert re.search(FOUND[kind], done.stdout), (kind, done.stdout)
