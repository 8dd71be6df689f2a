"""The self-test of `doctor` answers on this kernel and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kata_pin.linux.affinity import PREFIX
from tests.support.commandline import run
from tests.support.daemon import PROGRAM
from tests.support.specimen import cpuset_cgroup, two_cpus
from tests.support.waiting import wait_for

REPOSITORY = Path(__file__).parents[2]
UNKNOWN = "unknown whether they survive cpuset changes: "


class SelfTest:
    """Runs `doctor` without a daemon."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.config = folder / "config.yaml"
        self.config.write_text(f"version: 1\nruntime_dir: {folder}\n")
        self._capsys = capsys

    @property
    def arguments(self) -> list[str]:
        return ["doctor", "--json", "--config", str(self.config)]

    def __call__(self) -> str:
        """Return what it says of affinities."""
        self._capsys.readouterr()
        run(self.arguments)
        return said(self._capsys.readouterr().out)


def said(document: str) -> str:
    rows: list[dict[str, Any]] = json.loads(document)["rows"]
    (row,) = (one for one in rows if one["check"] == "affinities")
    return str(row["text"])


@pytest.fixture
def selftest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> SelfTest:
    return SelfTest(tmp_path, capsys)


def points() -> list[str]:
    """Return where cgroups are mounted that can have cpusets."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return [
        at
        for _, at, kind, options, *_ in mounts
        if kind == "cgroup2" or (kind == "cgroup" and "cpuset" in options.split(","))
    ]


def leftovers(maker: int) -> list[str]:
    """Return the cgroups of a process: other tests run doctor at the same time."""
    prefix = f"{PREFIX}{maker}-"
    return [name for at in points() for name in os.listdir(at) if name.startswith(prefix)]


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.mark.root
def test_answers_and_cleans_up(selftest: SelfTest) -> None:
    """Where a cgroup with a cpuset can be made, the answer is stick or lost, never unknown."""
    two_cpus()
    with cpuset_cgroup("0"):
        pass  # skips where none can be made
    before = children()
    answer = selftest()
    assert answer == "survive cpuset changes" or answer.startswith("lost on cpuset changes")
    assert leftovers(os.getpid()) == []
    assert children() == before


@pytest.mark.root
def test_no_other_affinity_changes(selftest: SelfTest) -> None:
    """Our own affinity and cgroups are the same afterwards."""
    own = Path("/proc/self/cgroup")
    before = (os.sched_getaffinity(0), own.read_text())
    selftest()
    assert (os.sched_getaffinity(0), own.read_text()) == before


@pytest.mark.root
@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        pytest.param("mount -o remount,bind,ro {point}", "Read-only file system", id="read-only"),
        pytest.param("umount -l {point}", "no cgroups are mounted", id="no cgroups"),
    ],
)
def test_unknown_says_why(selftest: SelfTest, prepare: str, reason: str) -> None:
    """Under ProtectControlGroups=yes, or without cgroups, the answer is unknown and says why."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare")
    with cpuset_cgroup("0"):
        pass
    steps = [prepare.format(point=point) for point in points()]
    script = "\n".join([*steps, f'exec {PROGRAM} "$@"'])
    apart = ("unshare", "-m", "--propagation", "private", "sh", "-ec", script, "sh")
    process = subprocess.Popen(
        [*apart, *selftest.arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    out, _ = process.communicate(timeout=60)
    text = said(out)
    assert text.startswith(UNKNOWN)
    assert reason in text
    assert leftovers(process.pid) == []


@pytest.mark.root
def test_killed_halfway(selftest: SelfTest) -> None:
    """Killed in the middle, its process ends by itself and the next run removes its cgroup."""
    two_cpus()
    with cpuset_cgroup("0"):
        pass
    program = (
        "import os, signal; from kata_pin.linux.files import HOST\n"
        "from kata_pin.linux.affinity import pins_stick\n"
        "def deadly(tid, cpus):\n"
        "    print(tid, flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
        "os.sched_setaffinity = deadly\n"
        "pins_stick(HOST)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    out, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    wait_for(lambda: not os.path.exists(f"/proc/{int(out)}"), "its process to end")
    assert len(leftovers(process.pid)) == 1
    selftest()
    assert leftovers(process.pid) == []
