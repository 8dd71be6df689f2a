"""What a process in a cgroup namespace of its own knows of cgroups, by this kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kata_pin.linux.cgroups import CpusetReader, why_not_roots
from kata_pin.linux.files import HOST
from kata_pin.linux.process import cgroups
from tests.support.specimen import cpuset_cgroup

REPOSITORY = Path(__file__).parents[2]


def seen(pid: int) -> list[object]:
    """Return what this process sees of a process's cpuset cgroup."""
    reader = CpusetReader(HOST)
    path, cpus = reader.of(pid, pid)
    entry = cgroups(HOST, pid).cpuset
    assert entry is not None
    owner = why_not_roots(HOST, entry)
    return [path, str(cpus), [str(one) for one in reader.configured(pid, pid)], owner]


SEEN = "import json,sys; from tests.contract.test_cgroup_namespace import seen; "
REPORT = SEEN + "print(json.dumps([seen(int(pid)) for pid in sys.argv[1:]]))"
RAW = "print(open('/proc/1/cgroup').read(), open('/proc/self/mountinfo').read())"


def in_namespace(folder: str, code: str, *pids: int) -> str:
    """Run Python in the cgroup, whose namespace is its own; it begins with its own pid."""
    script = f'echo $$ > {folder}/cgroup.procs; exec unshare -C "$@"'
    command = [sys.executable, "-c", code, *map(str, pids)]
    done = subprocess.run(
        ["sh", "-c", script, "sh", *command],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=60,
        check=True,
    )
    return done.stdout


@pytest.mark.root
def test_sees_what_the_host_sees() -> None:
    """Inside, every process's cgroup has the name and the cpuset that it has outside."""
    with cpuset_cgroup("0") as cgroup:
        outer = cgroup.folder
        inner = f"{outer}/pod/container"
        os.makedirs(inner)
        try:
            for folder in (f"{outer}/pod", inner):
                for name in ("cpuset.cpus", "cpuset.mems"):
                    value = Path(outer, name).read_text()
                    if os.path.exists(f"{folder}/{name}"):
                        Path(folder, name).write_text(value)
            raw = in_namespace(inner, RAW)
            assert ":/.." in raw
            assert " /../../.." in raw  # else this kernel would show names, and nothing is tested
            pids = (1, os.getpid(), os.getppid())
            assert json.loads(in_namespace(inner, REPORT, *pids)) == [seen(pid) for pid in pids]
        finally:
            os.rmdir(inner)
            os.rmdir(f"{outer}/pod")


@pytest.mark.root
def test_sees_its_own_cgroup() -> None:
    """Its own path is the host's too, not the `/` that the kernel shows it."""
    code = SEEN + "import os; print(json.dumps(seen(os.getpid())))"
    with cpuset_cgroup("0") as cgroup:
        path, cpus, _, _ = json.loads(in_namespace(cgroup.folder, code))
        assert (path, cpus) == (cgroup.path, "0")
