"""The registry keeps what a restart needs, and nothing that is older than what it knows."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import StateError
from kata_pin.base.sandbox import Container, ReportedCpuset
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import ContainerKind, ContainerState, CpusetSource, ThreadRole
from kata_pin.records import containers
from kata_pin.records.containers import DELETED_KEPT, Registry
from kata_pin.records.pins import Pins

APP = Container(
    id="app",
    sandbox_id="pod",
    cpus=CpuSet.parse("2-3"),
    mems="0",
    quota_us=200_000,
    period_us=100_000,
    shares=2048,
    cgroups_path="/kubepods/pod1/app",
    name="app",
    pod_name="web",
    pod_namespace="shop",
    pod_uid="1-2",
    handler="kata",
    bundle="/run/b/app",
    source="hook:createRuntime",
    recorded_ns=10,
    pid_hint=77,
)
RECORDED = replace(APP, reported=(ReportedCpuset(CpusetSource.BUNDLE, APP.cpus, 10),))


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Return a place for a registry."""
    return str(tmp_path / "registry.db")


@pytest.fixture
def registry(path: str) -> Iterator[Registry]:
    """Yield an empty registry."""
    one = Registry(path, boot_id="boot-1")
    yield one
    one.close()


def test_a_record_survives_a_restart_whole(registry: Registry, path: str) -> None:
    """Every field comes back after the file was closed and opened."""
    assert registry.record(APP, stamp_ns=10, pid=1)
    registry.close()
    again = Registry(path, boot_id="boot-1")
    assert again.containers("pod") == (RECORDED,)
    assert again.sandboxes() == ["pod"]
    again.close()


@pytest.mark.parametrize(
    ("stamp", "pid", "taken"),
    [
        pytest.param(20, 5, False, id="the same message again"),
        pytest.param(19, 9, False, id="an older message"),
        pytest.param(21, 1, True, id="a newer message"),
        pytest.param(20, 6, True, id="another hook in the same nanosecond"),
    ],
)
def test_only_newer_messages_count(registry: Registry, stamp: int, pid: int, taken: bool) -> None:
    """A message acknowledged late and spooled counts once; an old one never wins."""
    registry.record(APP, stamp_ns=20, pid=5)
    assert registry.record(replace(APP, cpus=CpuSet([9])), stamp_ns=stamp, pid=pid) is taken
    wanted = CpuSet([9]) if taken else APP.cpus
    assert registry.containers("pod")[0].cpus == wanted


def test_a_late_message_about_a_forgotten_container_is_still_old(registry: Registry) -> None:
    """Forgetting a sandbox keeps the stamps, so a spooled create cannot bring it back."""
    registry.record(APP, stamp_ns=20, pid=5)
    registry.forget("pod")
    assert registry.containers("pod") == ()
    assert not registry.record(APP, stamp_ns=19, pid=4)


def test_what_kata_keeps_counts_whatever_messages_said(registry: Registry) -> None:
    """Kata's state can be older than a message and still be the live truth; stamps stay."""
    registry.record(APP, stamp_ns=20, pid=5)
    registry.forget("pod")
    registry.adopt(replace(APP, cpus=CpuSet([9]), recorded_ns=3))
    assert registry.containers("pod")[0].cpus == CpuSet([9])
    assert not registry.record(APP, stamp_ns=19, pid=4)


def test_deleted_containers_are_bounded(registry: Registry) -> None:
    """A container that fails and is made anew for weeks leaves its last records and no others."""
    registry.record(APP, stamp_ns=1, pid=1)
    for n in range(2, 40):
        over = replace(APP, id=f"c{n}", state=ContainerState.DELETED, recorded_ns=n)
        registry.record(over, stamp_ns=n, pid=1)
    kept = [one.id for one in registry.containers("pod")]
    assert kept == ["app", *(f"c{n}" for n in range(40 - DELETED_KEPT, 40))]
    assert not registry.record(replace(APP, id="c2"), stamp_ns=2, pid=1)


def test_tombstones_are_bounded(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the newest stamps of finished containers are kept."""
    monkeypatch.setattr(containers, "TOMBSTONES", 40)
    for n in range(90):
        registry.record(replace(APP, id=f"c{n}"), stamp_ns=n, pid=1)
    registry.forget("pod")
    with contextlib.closing(sqlite3.connect(registry.path)) as db:
        assert db.execute("SELECT count(*) FROM seen").fetchone() == (40,)


def test_a_message_without_facts_keeps_the_earlier_ones(registry: Registry) -> None:
    """A poststop whose bundle is gone changes the state, not the cpuset."""
    registry.record(APP, stamp_ns=10, pid=1)
    bare = Container(
        id="app", sandbox_id="pod", state=ContainerState.STOPPED, source="x", recorded_ns=11
    )
    registry.record(bare, stamp_ns=11, pid=1)
    (now,) = registry.containers("pod")
    assert now == replace(APP, state=ContainerState.STOPPED, source="x", recorded_ns=11)


def test_containers_come_in_the_order_of_their_first_record(registry: Registry) -> None:
    """Record order breaks ties in placement, so an update must not reorder."""
    pause = Container(
        id="pod", sandbox_id="pod", kind=ContainerKind.SANDBOX, recorded_ns=5, source="s"
    )
    registry.record(pause, stamp_ns=5, pid=1)
    registry.record(APP, stamp_ns=10, pid=1)
    registry.record(replace(pause, recorded_ns=30, mems="0"), stamp_ns=30, pid=1)
    assert [c.id for c in registry.containers("pod")] == ["pod", "app"]


def test_pairs_first_masks_and_releases_are_kept_and_forgotten(registry: Registry) -> None:
    """What passes need to remember is replaced as a whole and goes with the sandbox."""
    pins = Pins(registry)
    pairs = {ThreadKey(7, 8, 9): 3}
    masks = {ThreadRole.VCPU: CpuSet.parse("0-7")}
    pins.keep("pod", pairs=pairs, first_seen=masks)
    pins.set_released(["pod"], released=True)
    assert pins.pairs("pod") == pairs
    assert pins.first_seen("pod") == masks
    assert pins.released() == {"pod"}
    pins.set_released(["pod"], released=False)
    pins.keep("pod", pairs={}, first_seen=masks)
    assert pins.pairs("pod") == {}
    assert pins.released() == frozenset()
    pins.forget("pod")
    assert pins.first_seen("pod") == {}


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda p: Path(p).write_bytes(b"not a database at all" * 40), id="garbage"),
        pytest.param(lambda p: Path(p).write_bytes(Path(p).read_bytes()[:5000]), id="truncated"),
        pytest.param(lambda p: _sql(p, "UPDATE meta SET value='99' WHERE key='version'"), id="v99"),
        pytest.param(
            lambda p: _sql(p, "UPDATE meta SET value='b0' WHERE key='boot_id'"), id="boot"
        ),
        pytest.param(lambda p: _sql(p, "DROP TABLE meta"), id="another program's"),
    ],
)
def test_an_unusable_file_is_set_aside(
    registry: Registry, path: str, damage: object, caplog: pytest.LogCaptureFixture
) -> None:
    """The daemon always starts; the old file stays for a look, its name in the log."""
    registry.record(APP, stamp_ns=1, pid=1)
    registry.close()
    assert callable(damage)
    damage(path)
    fresh = Registry(path, boot_id="boot-1")
    assert fresh.sandboxes() == []
    assert fresh.record(APP, stamp_ns=1, pid=1)
    fresh.close()
    aside = [n for n in os.listdir(Path(path).parent) if n.startswith("registry.db.")]
    assert any(name in caplog.text for name in aside)


def test_a_file_that_is_locked_is_not_set_aside(registry: Registry, path: str) -> None:
    """What keeps SQLite from a good file says nothing against the file: its records stay."""
    registry.record(APP, stamp_ns=1, pid=1)
    registry.close()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode=EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StateError, match=r"registry\.db: .*locked"):
            Registry(path, boot_id="boot-1")
    again = Registry(path, boot_id="boot-1")
    assert again.sandboxes() == ["pod"]
    again.close()


def test_a_file_that_cannot_be_written_is_not_left_open(registry: Registry, path: str) -> None:
    """Where somebody else writes it can be read and not be begun with: it is closed again."""
    registry.close()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StateError, match="locked") as raised:
            Registry(path, boot_id="boot-1")
    names = [os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
    assert not [name for name in names if name.startswith(path)]
    assert raised.tb is not None  # it holds what would be open


@pytest.mark.root
def test_a_full_file_system_loses_no_record(tmp_path: Path) -> None:
    """With /run full the daemon cannot start, and with room again everything is still there."""
    script = (
        "import os, sys; from kata_pin.records.containers import Registry;"
        "from kata_pin.base.errors import StateError; from kata_pin.base.sandbox import Container\n"
        "path = sys.argv[1]\n"
        "first = Registry(path, boot_id='b')\n"
        "first.record(Container('app', 'pod', recorded_ns=1), stamp_ns=1, pid=1); first.close()\n"
        "with open(path + '.fill', 'wb', buffering=0) as file:\n"
        "    try:\n"
        "        while True: file.write(bytes(4096))\n"
        "    except OSError: pass\n"
        "try: Registry(path, boot_id='b'); sys.exit('it opened')\n"
        "except StateError: os.unlink(path + '.fill')\n"
        "again = Registry(path, boot_id='b'); print(again.sandboxes()); again.close()\n"
    )
    mount = 'mount -t tmpfs -o size=512k none "$1" && exec "$2" -c "$3" "$1/registry.db"'
    command = ["unshare", "-m", "sh", "-c", mount, "sh", str(tmp_path), sys.executable, script]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert (run.stdout, run.returncode) == ("['pod']\n", 0), run.stderr


def _sql(path: str, statement: str) -> None:
    db = sqlite3.connect(path)
    db.execute(statement)
    db.commit()
    db.close()


def test_a_folder_that_cannot_be_written_is_named() -> None:
    """The error says which file."""
    with pytest.raises(StateError, match=r"/proc/nope/registry\.db"):
        Registry("/proc/nope/registry.db", boot_id="b")


def test_a_copy_has_everything_and_changes_nothing(registry: Registry, path: str) -> None:
    """Looking without a daemon works on a copy, also while the daemon has the file open."""
    registry.record(APP, stamp_ns=1, pid=1)
    copy = Registry.copy_of(path, boot_id="boot-1")
    assert copy.containers("pod") == (RECORDED,)
    copy.forget("pod")
    assert registry.containers("pod") == (RECORDED,)
    copy.close()


@pytest.mark.parametrize("content", [None, b"", b"garbage" * 999], ids=["absent", "empty", "bad"])
def test_a_copy_of_nothing_is_empty(tmp_path: Path, content: bytes | None) -> None:
    """Without a file, or with one that is no registry, there is nothing recorded."""
    path = tmp_path / "registry.db"
    if content is not None:
        path.write_bytes(content)
    copy = Registry.copy_of(str(path), boot_id="b")
    assert copy.sandboxes() == []
    assert copy.record(APP, stamp_ns=1, pid=1)
    copy.close()
    assert path.exists() is (content is not None)


def test_half_a_character_cannot_be_stored(tmp_path: Path) -> None:
    """A text that SQLite cannot take is an ordinary error of the registry, not a crash."""
    registry = Registry(str(tmp_path / "registry.db"), boot_id="b")
    with pytest.raises(StateError):
        registry.record(Container("c1", "s1", name="\ud800"), stamp_ns=1)
    with pytest.raises(StateError):
        registry.container("\ud800")
    assert registry.sandboxes() == []
    registry.close()
