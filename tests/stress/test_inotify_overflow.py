"""More events of files than the kernel keeps: whoever watches looks at everything again."""

from __future__ import annotations

from pathlib import Path

from tests.support.spooled import leave, message, pending, watching
from tests.support.watched import World, descriptors, kernel_watches

LIMIT = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())


async def test_an_overflow_is_everything_and_nothing_leaks(tmp_path: Path) -> None:
    """More events than the kernel keeps: everything is to be looked at, and watching goes on."""
    world = World(tmp_path)
    world.make()
    path = world.sandbox("p1")
    other = path.with_name("other")
    async with world.watching():
        before = descriptors(), kernel_watches(), world.watch.watched
        for _ in range(LIMIT // 4 + 10):  # four events each, and no two in a row are equal
            path.rename(other)
            other.rename(path)
        assert world.watch.overruns == 0
        while not (await world.told()).everything:
            pass
        assert world.watch.overruns == 1
        assert (descriptors(), kernel_watches(), world.watch.watched) == before
        world.sandbox("p1", '{"more": 1}')
        assert (await world.told()).sandboxes == {"p1"}


async def test_a_watched_spool_survives_an_overflow(tmp_path: Path) -> None:
    """After more events than the kernel keeps, looking at the folder finds all messages."""
    async with watching(tmp_path) as news:
        flapping = leave(tmp_path, message(1))
        other = flapping.with_suffix(".tmp")
        for _ in range(LIMIT + 10):
            flapping.rename(other)
            other.rename(flapping)
        leave(tmp_path, message(2))
        heard = 0
        while pending(tmp_path) != [message(1), message(2)]:
            await anext(news)
            heard += 1
        for _ in range(LIMIT):  # the overflow itself is an event too, and ends nothing
            await anext(news)
