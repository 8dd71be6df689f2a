"""When a young thread is worth another look, and which files of Kata's are read again."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from kata_pin.base.cpuset import EMPTY
from kata_pin.base.sandbox import Role, Task
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import RoleSource, ThreadRole
from kata_pin.linux.files import HOST
from kata_pin.vmm.role_cache import RoleCache
from kata_pin.vmm.state_files import KataPaths, digest, state_stamp

TICKS = os.sysconf("SC_CLK_TCK")
REST = Role(ThreadRole.EMULATOR, RoleSource.REST)
MAIN, IO, VCPU, LATE = (100, 30.0), (101, 30.0), (102, 30.0), (103, 0.0)


def _key(thread: tuple[int, float]) -> ThreadKey:
    """Return the key of a thread of process 100 with this tid and age in seconds."""
    tid, age_s = thread
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    return ThreadKey(100, tid, int((now_s - age_s) * TICKS))


def _vcpu(index: int, source: RoleSource = RoleSource.DEBUGFS) -> Role:
    return Role(ThreadRole.VCPU, source, vcpu=index)


@pytest.mark.parametrize(
    ("roles", "boot", "maximum", "unsure"),
    [
        pytest.param({MAIN: REST, VCPU: _vcpu(0)}, 1, 4, False, id="nobody is young"),
        pytest.param(
            {MAIN: REST, VCPU: _vcpu(0), LATE: REST}, 1, 4, True, id="may be a hotplugged vCPU"
        ),
        pytest.param(
            {MAIN: REST, VCPU: _vcpu(0), LATE: REST}, 1, 1, False, id="no vCPU can be added"
        ),
        pytest.param(
            {MAIN: REST, VCPU: _vcpu(0), LATE: REST}, 1, 0, True, id="any number may be added"
        ),
        pytest.param(
            {(100, 0.5): REST, (101, 0.4): REST, (102, 0.3): _vcpu(0)}, 1, 4, False,
            id="just booted, but older than its vCPU",
        ),
        pytest.param(
            {(100, 0.5): REST, (102, 0.3): _vcpu(0)}, 2, 4, True, id="a boot vCPU is missing"
        ),
        pytest.param(
            {(100, 0.5): REST, (102, 0.3): _vcpu(0, RoleSource.ORDER)}, 1, 1, True,
            id="a boot vCPU is only guessed",
        ),
    ],
)  # fmt: skip
def test_unsure(
    roles: dict[tuple[int, float], Role], boot: int, maximum: int, unsure: bool
) -> None:
    """A sandbox is looked at again exactly while a thread may turn out to be a vCPU."""
    cache = RoleCache()
    found = {_key(thread): role for thread, role in roles.items()}
    tasks = [Task(key, "x", 0, EMPTY, EMPTY, "/") for key in found]
    cache.learn(found, tasks, boot)
    assert cache.unsure(boot, maximum) is unsure


def test_virtiofsd_pid_follows_the_file(tmp_path: Path) -> None:
    """The pid is that of the file as it is now: absent, written, rewritten, gone."""
    paths = KataPaths(vc=str(tmp_path / "vc"), kata=str(tmp_path / "kata"))
    file = tmp_path / "vc/sbs/pod1/persist.json"
    file.parent.mkdir(parents=True)
    seen = [digest(HOST, paths, "pod1").virtiofsd_pid]
    for pid in (4242, 123456):
        file.write_text(json.dumps({"HypervisorState": {"VirtiofsDaemonPid": pid}}))
        seen += [
            digest(HOST, paths, "pod1").virtiofsd_pid,
            digest(HOST, paths, "pod1").virtiofsd_pid,
        ]
    file.unlink()
    seen.append(digest(HOST, paths, "pod1").virtiofsd_pid)
    assert seen == [0, 4242, 4242, 123456, 123456, 0]


def test_stamp_follows_the_file_of_runtime_rs(tmp_path: Path) -> None:
    """state.json rewritten in place has another stamp, though its folder has not."""
    paths = KataPaths(vc=str(tmp_path / "vc"), kata=str(tmp_path / "kata"))
    file = tmp_path / "kata/pod1/state.json"
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    before = state_stamp(HOST, paths, "pod1")
    file.write_text('{"longer": true}')
    assert before != (0, 0)
    assert state_stamp(HOST, paths, "pod1") != before
