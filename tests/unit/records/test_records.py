"""A message becomes a record once, and never an older one than is known."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.errors import HostError
from kata_pin.base.sandbox import Container
from kata_pin.peers.oci import Phase
from kata_pin.records.bundles import BundleReader, Intake
from kata_pin.records.containers import Registry
from kata_pin.records.hooks import HookMessage

POD = {"io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.sandbox-id": "pod"}


@pytest.fixture
def intake(registry: Registry, tmp_path: Path) -> Intake:
    (tmp_path / "bundles").mkdir()
    return Intake(registry, BundleReader([str(tmp_path / "bundles")]))


def bundle(tmp_path: Path, name: str, cpus: str = "2-3") -> None:
    folder = tmp_path / "bundles" / name
    folder.mkdir(exist_ok=True)
    linux = {"resources": {"cpu": {"cpus": cpus}}, "cgroupsPath": f"/kubepods/{name}"}
    (folder / "config.json").write_text(json.dumps({"annotations": POD, "linux": linux}))


def message(
    tmp_path: Path, phase: Phase, name: str, stamp: int, *, pid: int = 7, **state: Any
) -> HookMessage:
    path = str(tmp_path / "bundles" / name)
    body = {"ociVersion": "", "id": name, "status": "", "pid": pid, "bundle": path, **state}
    return HookMessage(phase, stamp, pid, json.dumps(body).encode())


def test_the_same_message_counts_once(intake: Intake, registry: Registry, tmp_path: Path) -> None:
    """Acknowledged late and spooled as well, it is one record, and the second time it is said."""
    bundle(tmp_path, "c1")
    create = message(tmp_path, Phase.CREATE_RUNTIME, "c1", 10)
    taken = intake.record(create, spooled=False)
    assert isinstance(taken, Container)
    assert (taken.sandbox_id, taken.cpus) == ("pod", CpuSet.parse("2-3"))
    again = intake.record(create, spooled=True)
    assert again == "a newer message is recorded"
    assert registry.sandboxes() == ["pod"]


def test_a_poststop_without_bundle_finds_its_container(
    intake: Intake, registry: Registry, tmp_path: Path
) -> None:
    """After the bundle went, sandbox, kind and resources stay what was recorded."""
    bundle(tmp_path, "c1")
    intake.record(message(tmp_path, Phase.CREATE_RUNTIME, "c1", 10), spooled=False)
    (tmp_path / "bundles" / "c1" / "config.json").unlink()
    taken = intake.record(message(tmp_path, Phase.POSTSTOP, "c1", 20, id="pod"), spooled=False)
    assert isinstance(taken, Container)
    known = registry.container("c1")
    assert known is not None
    assert (known.sandbox_id, str(known.cpus), known.state.counts) == ("pod", "2-3", False)


@pytest.mark.parametrize(
    ("phase", "spooled", "reason"),
    [
        (Phase.POSTSTOP, False, "the container is unknown and has ended"),
        (Phase.POSTSTOP, True, "the container is unknown and has ended"),
        (Phase.CREATE_RUNTIME, True, "its bundle is gone"),
    ],
)
def test_what_is_over_leaves_no_record(
    intake: Intake,
    registry: Registry,
    tmp_path: Path,
    *,
    phase: Phase,
    spooled: bool,
    reason: str,
) -> None:
    """Messages about containers that are gone and were never known are dropped, with the reason."""
    taken = intake.record(message(tmp_path, phase, "c1", 10, id="pod"), spooled=spooled)
    assert taken == reason
    assert registry.sandboxes() == []


@pytest.mark.parametrize("name", ["EMFILE", "ENFILE", "ENOMEM", "EIO", "EINTR", "EAGAIN"])
@pytest.mark.parametrize("call", ["open", "read"])
def test_every_passing_error_leaves_the_message_to_the_spool(
    intake: Intake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, call: str
) -> None:
    """Whether the file cannot be opened or cannot be read."""
    bundle(tmp_path, "c1")
    start = message(tmp_path, Phase.POSTSTART, "c1", 10, id="pod")
    number = getattr(errno, name)

    def fail(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(f"kata_pin.linux.owned_files.os.{call}", fail)
    with pytest.raises(HostError):
        intake.record(start, spooled=False)
    assert intake._registry.sandboxes() == []


def test_a_guessed_sandbox_is_marked_until_a_config_is_read(
    intake: Intake, registry: Registry, tmp_path: Path
) -> None:
    """A record made without config.json says so, also after a restart; a later hook corrects it."""
    intake.record(message(tmp_path, Phase.CREATE_RUNTIME, "c1", 10), spooled=False)
    assert registry.sandboxes() == ["c1"]
    assert registry.is_unread("c1")
    again = Registry(str(tmp_path / "registry.db"), boot_id="b")
    assert again.is_unread("c1")
    again.close()
    bundle(tmp_path, "c1")
    intake.record(message(tmp_path, Phase.POSTSTART, "c1", 20, id="pod"), spooled=False)
    assert (registry.sandboxes(), registry.is_unread("c1")) == (["pod"], False)
    registry.forget("pod")
    assert registry.rows("SELECT * FROM unread") == []
