"""The self-test answers on this kernel and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kata_pin.linux.affinity import PREFIX, Sticking, pins_stick
from kata_pin.linux.cgroups import CpusetReader
from kata_pin.linux.files import HOST, HostRoot, cgroup_mounts
from tests.support.specimen import cpuset_cgroup, two_cpus
from tests.support.waiting import wait_for

REPOSITORY = Path(__file__).parents[2]


def leftovers() -> list[str]:
    points = [mount.point for mount in cgroup_mounts(HOST)]
    return [name for point in points for name in os.listdir(point) if name.startswith(PREFIX)]


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.mark.root
def test_answers_and_cleans_up() -> None:
    """Where a cgroup with a cpuset can be made, the answer is stick or lost, never unknown."""
    two_cpus()
    with cpuset_cgroup("0"):
        pass  # skips where none can be made
    before = children()
    answer = pins_stick(HOST)
    assert answer.answer in {Sticking.STICK, Sticking.LOST}, answer.reason
    assert "cpuset" in answer.reason
    assert leftovers() == []
    assert children() == before


@pytest.mark.root
def test_no_other_affinity_changes() -> None:
    """Our own affinity and cpuset are the same afterwards."""
    before = (os.sched_getaffinity(0), CpusetReader(HOST).of(os.getpid(), os.getpid()))
    pins_stick(HOST)
    assert (os.sched_getaffinity(0), CpusetReader(HOST).of(os.getpid(), os.getpid())) == before


def test_captured_tree_is_unknown(tmp_path: Path) -> None:
    """A captured tree has no kernel to ask."""
    answer = pins_stick(HostRoot(str(tmp_path)))
    assert answer.answer is Sticking.UNKNOWN
    assert answer.reason == "not the running system"


@pytest.mark.root
@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        pytest.param("mount -o remount,bind,ro {point}", "Read-only file system", id="read-only"),
        pytest.param("umount -l {point}", "no cgroups are mounted", id="no cgroups"),
    ],
)
def test_unknown_says_why(prepare: str, reason: str) -> None:
    """Under ProtectControlGroups=yes, or without cgroups, the answer is unknown and says why."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare")
    with cpuset_cgroup("0"):
        pass
    steps = [prepare.format(point=mount.point) for mount in cgroup_mounts(HOST)]
    script = "\n".join([*steps, f'exec {sys.executable} -c "$PROGRAM"'])
    program = (
        "from kata_pin.linux.affinity import pins_stick; from kata_pin.linux.files import HOST; "
        "answer = pins_stick(HOST); print(answer.answer, answer.reason)"
    )
    answer = subprocess.run(
        ["unshare", "-m", "--propagation", "private", "sh", "-ec", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=REPOSITORY,
        env=os.environ | {"PROGRAM": program},
    )
    assert answer.stdout.startswith("unknown ")
    assert reason in answer.stdout
    assert leftovers() == []


@pytest.mark.root
def test_killed_halfway() -> None:
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
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=REPOSITORY
    )
    assert answer.returncode == -signal.SIGKILL
    pid = int(answer.stdout)
    wait_for(lambda: not os.path.exists(f"/proc/{pid}"), "its process to end")
    assert len(leftovers()) == 1
    pins_stick(HOST)
    assert leftovers() == []
