"""What Kata keeps is taken in; what of it cannot be read is said, once."""

from __future__ import annotations

import json
import logging
import os
import resource
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from kata_pin.daemon.intake.kata_state import Adoption
from kata_pin.daemon.store.containers import Registry
from kata_pin.errors import HostError, StateError
from kata_pin.host.process import ProcessIndex
from kata_pin.host.root import HostRoot
from kata_pin.model.sandbox import Container, ContainerKind, ContainerState
from kata_pin.model.thread import ProcessKey
from kata_pin.vmm.find import VmmFinder
from kata_pin.vmm.state_files import MAX_PERSIST, KataPaths, state_problem, virtiofsd_pid

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


POD = {
    "io.katacontainers.pkg.oci.container_type": "pod_container",
    "io.kubernetes.cri.container-type": "container",
    "io.kubernetes.cri.sandbox-id": "s1",
}
APP = {"ID": "c1", "Annotations": POD, "Resources": {"cpu": {"cpus": "2"}}}


def state(*containers: object, sandbox: str = "s1") -> str:
    return json.dumps({"SandboxContainer": sandbox, "Config": {"ContainerConfigs": containers}})


def counting(place: Place) -> list[str]:
    found = place.adoption._registry.containers("s1")
    return sorted(one.id for one in found if one.state.counts)


@pytest.mark.root
def test_a_state_that_a_full_disk_kept_out_is_adopted_later(place: Place, tmp_path: Path) -> None:
    """A registry on a full file system: nothing is recorded, all of it once there is room."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    subprocess.run(mount, check=True)
    try:
        registry = Registry(str(disk / "registry.db"), boot_id="b")
        place.adoption._registry = registry
        place.write(state(CONTAINER, APP))
        with (disk / "fill").open("wb", buffering=0) as fill, suppress(OSError):
            while fill.write(bytes(4096)):
                pass
        with pytest.raises(StateError, match="full"):
            place.adoption.all({"s1": VMM})
        assert counting(place) == []
        (disk / "fill").unlink()
        assert place.adoption.all({"s1": VMM}) == {"s1": 2}
        assert counting(place) == ["c1", "s1"]
        assert place.adoption.all({"s1": VMM}) == {"s1": 0}
        registry.close()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(
    "text",
    ["{}", state(), state(APP), state(CONTAINER, sandbox=""), state(CONTAINER, sandbox="s2")],
)
def test_a_state_that_is_not_whole_deletes_nothing(place: Place, text: str) -> None:
    """Neither one without the sandbox's id, nor one of another, nor one without its container."""
    place.write(state(CONTAINER, APP))
    place.adoption.all({"s1": VMM})
    place.write(text, LONG_AGO + 1)
    place.adoption.all({"s1": VMM})
    assert counting(place) == ["c1", "s1"]


def test_a_later_state_undoes_the_deletion_that_an_earlier_one_meant(place: Place) -> None:
    """A container that Kata lists again counts again, unless a hook reported its end."""
    place.write(state(CONTAINER, APP))
    place.adoption.all({"s1": VMM})
    place.write(state(CONTAINER), LONG_AGO + 1)
    place.adoption.all({"s1": VMM})
    assert counting(place) == ["s1"]
    place.write(state(CONTAINER, APP), LONG_AGO + 2)
    assert place.adoption.all({"s1": VMM}) == {"s1": 1}
    assert counting(place) == ["c1", "s1"]
    registry = place.adoption._registry
    known = registry.container("c1")
    assert known is not None
    assert str(known.cpus) == "2"
    ended = replace(known, state=ContainerState.DELETED, source="hook:poststop")
    registry.record(ended, stamp_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME))
    place.write(state(CONTAINER, APP), LONG_AGO + 3)
    place.adoption.all({"s1": VMM})
    assert counting(place) == ["s1"]


def test_a_record_whose_config_was_never_read_is_corrected(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Kata's state says which sandbox it is in; a record that was read is not moved."""
    registry = place.adoption._registry
    guess = Container("c1", "c1", ContainerKind.CONTAINER, pid_hint=7)
    place.write(state(CONTAINER, APP))
    registry.record(guess, stamp_ns=1, unread=False)
    place.adoption.one("s1")
    assert counting(place) == ["s1"]
    assert "belongs to another" in caplog.text
    registry.record(guess, stamp_ns=2, unread=True)
    assert place.adoption.one("s1") == 1
    assert counting(place) == ["c1", "s1"]
    assert registry.containers("c1") == ()
    assert not registry.is_unread("c1")


def test_a_state_that_cannot_be_read_now_is_read_again(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Out of descriptors nothing is concluded; the next look finds it, and virtiofsd's pid."""
    place.write(
        state(CONTAINER, APP).replace("{", '{"HypervisorState": {"VirtiofsDaemonPid": 9}, ', 1)
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        assert place.adoption.all({"s1": VMM}) == {"s1": 0}
        with pytest.raises(HostError, match="Too many open files"):
            virtiofsd_pid(HostRoot(), place.kata, "s1")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "cannot be read now" in caplog.text
    assert place.adoption.all({"s1": VMM}) == {"s1": 2}
    assert virtiofsd_pid(HostRoot(), place.kata, "s1") == 9
