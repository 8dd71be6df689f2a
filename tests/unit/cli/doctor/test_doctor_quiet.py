"""`doctor` on what the daemon may not write, and on writes that failed."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from kata_pin.base.config.tree import Config
from kata_pin.base.documents.state import KeptQuiet, Row, State
from kata_pin.base.values import QuietLevel
from kata_pin.cli.doctor.isolation import DROP_INS, rows
from kata_pin.linux.files import HostRoot
from tests.support.hosttree import grow
from tests.unit.cli import documents as docs

PID = 4242
EVERYTHING = 0x1FF_FFFF_FFFF
IRQ = replace(Config(), quiet=QuietLevel.IRQ)
FULL = replace(Config(), quiet=QuietLevel.FULL)


def _root(folder: Path, *, closed: str = "", bounds: int = EVERYTHING) -> HostRoot:
    """Return a node with a daemon that sees these trees read-only."""
    mounts = ["1 0 8:1 / / rw - ext4 /dev/vda1 rw"]
    mounts += [f"2 1 0:5 / {path} ro - proc proc rw" for path in closed.split()]
    return grow(
        folder,
        {
            f"proc/{PID}/mountinfo": "\n".join(mounts),
            f"proc/{PID}/status": f"Name:\tkata-pin\nCapBnd:\t{bounds:016x}",
            "proc/irq/default_smp_affinity": "f",
            "proc/sys/kernel/watchdog_cpumask": "0-3",
            "sys/devices/virtual/workqueue/cpumask": "f",
        },
    )


def _state(kept: KeptQuiet | None = None) -> State:
    state = docs.state()
    return replace(state, daemon=replace(state.daemon, pid=PID), kept_quiet=kept)


def _found(config: Config, root: HostRoot, kept: KeptQuiet | None = None) -> list[Row]:
    return [*rows(_state(kept), config, root)]


def test_all_is_well(tmp_path: Path) -> None:
    """One row; none at all where nothing is to be written. A tree that is missing is no finding."""
    root = _root(tmp_path)
    assert not _found(Config(), root)
    (row,) = _found(replace(FULL, resctrl=replace(FULL.resctrl, enabled=True)), root)
    assert row.status == "ok"
    assert "/sys/devices" in row.text
    assert "resctrl" not in row.text


@pytest.mark.parametrize(
    ("config", "path", "drop_in"),
    [
        (IRQ, "/proc/irq", "quiet.conf"),
        (FULL, "/sys", "quiet-full.conf"),
        (FULL, "/proc/sys", "quiet-full.conf"),
        (replace(IRQ, resctrl=replace(IRQ.resctrl, enabled=True)), "/sys/fs", "resctrl.conf"),
    ],
)
def test_a_read_only_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Config, path: str, drop_in: str
) -> None:
    """Named with the drop-in that helps, without any write; in a pod a drop-in does not help."""
    root = _root(tmp_path, closed=path)
    (tmp_path / "sys/fs/resctrl").mkdir(parents=True)
    (row,) = _found(config, root)
    assert (row.status, path in row.text) == ("warn", True)
    assert f"pid {PID}" in row.text
    assert "kata-pin install again" in row.remedy
    assert drop_in in row.remedy
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    (row,) = _found(config, root)
    assert "chart's value config" in row.remedy
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    installed = tmp_path / DROP_INS.lstrip("/") / drop_in
    installed.parent.mkdir(parents=True)
    installed.touch()
    (row,) = _found(config, root)
    assert "not in force" in row.remedy


@pytest.mark.parametrize(("config", "bit", "name"), [(IRQ, 7, "SETUID"), (FULL, 12, "NET_ADMIN")])
def test_a_missing_capability(tmp_path: Path, config: Config, bit: int, name: str) -> None:
    """A service without the drop-in cannot have it."""
    (row,) = _found(config, _root(tmp_path, bounds=EVERYTHING & ~(1 << bit)))
    assert f"may not have CAP_{name}" in row.text


def test_what_cannot_be_known(tmp_path: Path) -> None:
    """Without a daemon, or for others than root, nothing is claimed."""
    down = replace(_state(), daemon=replace(_state().daemon, running=False))
    assert [one.status for one in rows(down, IRQ, _root(tmp_path))] == ["info"]
    (tmp_path / f"proc/{PID}/mountinfo").unlink()
    assert [one.status for one in _found(IRQ, HostRoot(str(tmp_path)))] == ["info", "ok"][:1]


def test_writes_that_failed(tmp_path: Path) -> None:
    """What and why, how many by kind since the start; and what is left to others."""
    kept = KeptQuiet(
        level=QuietLevel.IRQ, cpus="4", full="", crio="", spared=(), changed={}, managed=0,
        failed_writes={"interrupt": 12, "default-mask": 1}, movable_fired=0, managed_fired=0,
        irqbalance=(), left=("interrupt 24 (eth0)", "interrupt 25 (sda)"),
        problems=("interrupt 24: No space left on device", "interrupt 25: Device or resource busy"),
    )  # fmt: skip
    _, writes, writers = _found(IRQ, _root(tmp_path), kept)
    assert writes.text == (
        "cannot set interrupt 24: No space left on device and 1 more; failed writes since the "
        "daemon's start: interrupt 12, default-mask 1"
    )
    assert "interrupt 24 (eth0) and 1 more" in writers.text
    _, writes, *_ = _found(IRQ, _root(tmp_path / "b"), replace(kept, problems=()))
    assert (writes.status, "13 writes failed" in writes.text) == ("info", True)
