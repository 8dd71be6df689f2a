"""What guests were told, kept over a restart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kata_pin.daemon.store.database import Registry
from kata_pin.daemon.store.guests import GuestBook
from kata_pin.errors import StateError
from kata_pin.model.sandbox import Container
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
        book = GuestBook(registry)
        book.tell("pod", "own", cpus("1"))
        book.tell("pod", "own", cpus("2-3"))
        book.tell("pod", "log", cpus("0"))
    with opened(tmp_path) as registry:
        again = GuestBook(registry)
        assert again.told("pod") == {"own": cpus("2-3"), "log": cpus("0")}
        again.forget("pod", ["log", "never"])
        assert again.told("pod") == {"own": cpus("2-3")}
        again.forget_all("pod")
        assert again.told("pod") == {}


def test_sandboxes_that_are_gone_are_forgotten_at_the_start(tmp_path: Path) -> None:
    """A daemon that was killed while a sandbox ended leaves nothing behind."""
    with opened(tmp_path) as registry:
        book = GuestBook(registry)
        book.tell("gone", "x", cpus("1"))
        book.tell("pod", "own", cpus("1"))
        GuestBook(registry)
        assert book.told("gone") == {}
        assert book.told("pod") == {"own": cpus("1")}


def test_damage_is_said(tmp_path: Path) -> None:
    """A row that makes no sense, and a file that is closed, are StateErrors that name the file."""
    with opened(tmp_path) as registry:
        book = GuestBook(registry)
        registry.database.execute("INSERT INTO guest_cpusets VALUES ('pod', 'own', 'x')")
        with pytest.raises(StateError, match=r"registry\.db"):
            book.told("pod")
    with pytest.raises(StateError, match=r"registry\.db"):
        book.tell("pod", "own", cpus("1"))
