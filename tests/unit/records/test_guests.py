"""What guests were told, kept over a restart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kata_pin.base.errors import StateError
from kata_pin.base.sandbox import Container
from kata_pin.records.containers import Registry
from kata_pin.records.pins import GuestCpusets
from tests.support.world import cpus


@contextmanager
def opened(path: Path) -> Iterator[Registry]:
    """Open the registry of a folder, with a container of sandbox `pod`."""
    with closing(Registry(str(path / "registry.db"), boot_id="boot")) as registry:
        registry.adopt(Container("own", "pod"))
        yield registry


def test_it_outlives_the_daemon(tmp_path: Path) -> None:
    """What was noted is there after the next start; the last word counts."""
    with opened(tmp_path) as registry:
        book = GuestCpusets(registry)
        book.send("pod", "own", cpus("1"))
        book.send("pod", "own", cpus("2-3"))
        book.send("pod", "log", cpus("0"))
    with opened(tmp_path) as registry:
        again = GuestCpusets(registry)
        assert again.sent("pod") == {"own": cpus("2-3"), "log": cpus("0")}
        again.forget("pod", ["log", "never"])
        assert again.sent("pod") == {"own": cpus("2-3")}
        again.forget_all("pod")
        assert again.sent("pod") == {}


def test_sandboxes_that_are_gone_are_forgotten_at_the_start(tmp_path: Path) -> None:
    """A daemon that was killed while a sandbox ended leaves nothing behind."""
    with opened(tmp_path) as registry:
        book = GuestCpusets(registry)
        book.send("gone", "x", cpus("1"))
        book.send("pod", "own", cpus("1"))
        GuestCpusets(registry)
        assert book.sent("gone") == {}
        assert book.sent("pod") == {"own": cpus("1")}


def test_damage_is_said(tmp_path: Path) -> None:
    """A row that makes no sense, and a file that is closed, are StateErrors that name the file."""
    with opened(tmp_path) as registry:
        book = GuestCpusets(registry)
        registry.run("INSERT INTO guest_cpusets VALUES ('pod', 'own', 'x')")
        with pytest.raises(StateError, match=r"registry\.db"):
            book.sent("pod")
    with pytest.raises(StateError, match=r"registry\.db"):
        book.send("pod", "own", cpus("1"))
