"""A message becomes a record once, and never an older one than is known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kata_pin.daemon.intake.records import Intake
from kata_pin.daemon.store.containers import Registry
from kata_pin.errors import ParseError, StateError
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.sandbox import Container
from kata_pin.sources.bundles import BundleReader
from kata_pin.wire.hook_message import HookMessage
from kata_pin.wire.oci import Phase

POD = {"io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.sandbox-id": "pod"}


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    one = Registry(str(tmp_path / "registry.db"), boot_id="b")
    yield one
    one.close()


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
    taken = intake.take(create, spooled=False)
    assert isinstance(taken, Container)
    assert (taken.sandbox_id, taken.cpus) == ("pod", CpuSet.parse("2-3"))
    again = intake.take(create, spooled=True)
    assert again == "a newer message is recorded"
    assert registry.sandboxes() == ["pod"]


def test_an_older_message_changes_nothing(
    intake: Intake, registry: Registry, tmp_path: Path
) -> None:
    """A create that arrives after its poststop does not make the container count again."""
    bundle(tmp_path, "c1")
    intake.take(message(tmp_path, Phase.CREATE_RUNTIME, "c1", 10), spooled=False)
    intake.take(message(tmp_path, Phase.POSTSTOP, "c1", 30, id="pod"), spooled=False)
    late = intake.take(message(tmp_path, Phase.POSTSTART, "c1", 20, id="pod"), spooled=True)
    assert isinstance(late, str)
    known = registry.container("c1")
    assert known is not None
    assert not known.state.counts


def test_a_poststop_without_bundle_finds_its_container(
    intake: Intake, registry: Registry, tmp_path: Path
) -> None:
    """After the bundle went, sandbox, kind and resources stay what was recorded."""
    bundle(tmp_path, "c1")
    intake.take(message(tmp_path, Phase.CREATE_RUNTIME, "c1", 10), spooled=False)
    (tmp_path / "bundles" / "c1" / "config.json").unlink()
    taken = intake.take(message(tmp_path, Phase.POSTSTOP, "c1", 20, id="pod"), spooled=False)
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
    taken = intake.take(message(tmp_path, phase, "c1", 10, id="pod"), spooled=spooled)
    assert taken == reason
    assert registry.sandboxes() == []


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"id":"c1"}', b'{"id":"c1","bundle":"/a/../x y"}', b"\xff" * 100]
)
def test_hopeless_messages_are_refused(intake: Intake, registry: Registry, body: bytes) -> None:
    """What can never be taken raises ParseError, so that the hook does not spool it."""
    with pytest.raises(ParseError):
        intake.take(HookMessage(Phase.CREATE_RUNTIME, 10, 7, body), spooled=False)
    assert registry.sandboxes() == []


def test_a_registry_that_cannot_be_written_says_so(intake: Intake, tmp_path: Path) -> None:
    """The caller gets StateError, not SQLite's, and acknowledges nothing."""
    bundle(tmp_path, "c1")
    intake._registry.close()
    with pytest.raises(StateError, match=r"registry\.db"):
        intake.take(message(tmp_path, Phase.CREATE_RUNTIME, "c1", 10), spooled=False)
