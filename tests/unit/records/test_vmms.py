"""The VMM that was accepted last, over restarts and ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from kata_pin.base.sandbox import ProcessKey, Vmm
from kata_pin.records import pins
from kata_pin.records.containers import Registry
from kata_pin.records.pins import AcceptedVmms
from kata_pin.vmm.claims import Accepted, Strength

KEY = ProcessKey(10, 20)


def _vmm(strength: Strength, key: ProcessKey = KEY) -> Vmm:
    return Vmm("qemu", key, 1, "/usr/bin/qemu", "test", strength=strength)


def test_the_strongest_evidence_of_one_process_is_kept(tmp_path: Path) -> None:
    """An orphan had a shim once: what replaces it needs as much. Another process starts anew."""
    path = str(tmp_path / "registry.db")
    db = Registry(path, boot_id="b")
    known = AcceptedVmms(db)
    assert known.of("p1") is None
    known.keep("p1", _vmm(Strength.SHIM))
    known.keep("p1", _vmm(Strength.CGROUP))
    db.close()
    db = Registry(path, boot_id="b")
    known = AcceptedVmms(db)
    assert known.of("p1") == Accepted(KEY, Strength.SHIM)
    other = replace(_vmm(Strength.FILE), process=ProcessKey(11, 30))
    known.keep("p1", other)
    assert known.of("p1") == Accepted(other.process, Strength.FILE)
    db.close()


def test_an_ended_sandbox_leaves_its_pid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name may come again with other evidence, its pid may not; the newest are remembered."""
    monkeypatch.setattr(pins, "KEPT", 40)
    db = Registry(str(tmp_path / "registry.db"), boot_id="b")
    known = AcceptedVmms(db)
    known.keep("p1", _vmm(Strength.SHIM))
    known.ended("p1")
    assert known.of("p1") == Accepted(KEY, Strength.NONE)
    known.keep("lives", _vmm(Strength.HOOK))
    for number in range(pins.KEPT + 8):
        known.keep(f"s{number}", _vmm(Strength.HOOK, ProcessKey(number + 100, 1)))
        known.ended(f"s{number}")
    assert known.of("p1") is None
    assert known.of("lives") is not None
    assert known.of(f"s{pins.KEPT}") is not None
    db.close()
