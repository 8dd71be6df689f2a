"""A folder that is followed for ever."""

from __future__ import annotations

import logging
from contextlib import aclosing
from pathlib import Path

import pytest
from asyncinotify import Mask

from kata_pin.linux.inotify import folder_events


async def test_each_loss_of_a_folder_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once until it can be watched again, and then anew."""
    folder, tries = tmp_path / "spool", [0]

    def prepare() -> None:
        tries[0] += 1
        if tries[0] % 4 == 0:
            folder.mkdir()

    events = folder_events(
        str(folder), Mask.MOVED_TO, retry_s=0.01, level=logging.WARNING, prepare=prepare
    )
    async with aclosing(events):
        for number in (1, 2):
            assert await anext(events) == ""
            assert caplog.text.count("cannot watch") == number
            folder.rmdir()
