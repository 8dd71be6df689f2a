"""What Kata keeps is taken in; what of it cannot be read is said, once."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from kata_pin.daemon.intake.kata_state import Adoption
from kata_pin.daemon.store.containers import Registry
from kata_pin.host.process import ProcessIndex
from kata_pin.host.root import HostRoot
from kata_pin.model.thread import ProcessKey
from kata_pin.vmm.find import VmmFinder
from kata_pin.vmm.state_files import MAX_PERSIST, KataPaths, state_problem

CONTAINER = {"ID": "s1", "Annotations": {}, "Resources": {"cpu": {"cpus": "3"}}}
WHOLE = json.dumps({"SandboxContainer": "s1", "Config": {"ContainerConfigs": [CONTAINER]}})
LONG_AGO = 1_000_000_000
VMM = ProcessKey(1, 1)


class Place:
    """A sandbox's folder of Kata's, and what adopts from it."""

    def __init__(self, root: Path, registry: Registry) -> None:
        self.kata = KataPaths(str(root / "vc"), str(root / "kata"))
        self.file = root / "vc/sbs/s1/persist.json"
        self.file.parent.mkdir(parents=True)
        self.adoption = Adoption(
            HostRoot(),
            registry,
            self.kata,
            cast("VmmFinder", SimpleNamespace(sandboxes=lambda running: running)),
            cast("ProcessIndex", SimpleNamespace(refresh=lambda: None)),
        )

    def write(self, text: str, changed: int = LONG_AGO) -> None:
        """Write persist.json as it was left at `changed`, seconds of the epoch."""
        self.file.write_text(text)
        os.utime(self.file, (changed, changed))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    registry = Registry(str(tmp_path / "registry.db"), boot_id="b")
    yield Place(tmp_path, registry)
    registry.close()


def test_a_state_that_cannot_be_read_is_said_once(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that has settled and is no state is warned of, and again only when it changed."""
    place.write(WHOLE[:-4])
    for _ in range(3):
        assert place.adoption.all({"s1": VMM}) == {"s1": 0}
        assert place.adoption.one("s1") == 0
    (said,) = caplog.messages
    assert said.startswith("sandbox s1: Kata's state cannot be read: persist.json: not JSON")
    place.write("[]", LONG_AGO + 1)
    place.adoption.all({"s1": VMM})
    place.adoption.all({"s1": VMM})
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    place.write(WHOLE, LONG_AGO + 2)
    assert place.adoption.all({"s1": VMM}) == {"s1": 1}
    assert len(caplog.records) == 2


def test_a_state_that_is_being_written_is_not_said(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Kata writes in place: half a file of just now, or none, is nothing to warn of."""
    place.file.write_text(WHOLE[:-4])
    assert place.adoption.all({"s1": VMM}) == {"s1": 0}
    place.file.unlink()
    assert place.adoption.all({"s1": VMM, "s2": VMM}) == {"s1": 0, "s2": 0}
    assert caplog.messages == []


def test_what_is_wrong_with_a_state(place: Place) -> None:
    """The problem says what is wrong, of either runtime's file; nothing where all is well."""
    root = HostRoot()
    assert state_problem(root, place.kata, "s1") == ""
    place.write(WHOLE)
    assert state_problem(root, place.kata, "s1") == ""
    place.write("x" * (MAX_PERSIST + 1))
    assert "larger than" in state_problem(root, place.kata, "s1")
    place.file.unlink()
    rs_state = Path(place.kata.kata) / "s1/state.json"
    rs_state.parent.mkdir(parents=True)
    rs_state.write_text("{")
    assert state_problem(root, place.kata, "s1").startswith("state.json: not JSON")
    assert state_problem(root, place.kata, "../s1") == ""
