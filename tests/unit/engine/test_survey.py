"""What a pass asked for in vain, and who read it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kata_pin.base.sandbox import Process, ProcessKey
from kata_pin.engine.observe import Survey

ONE = Process(ProcessKey(7, 1), 1, "virtiofsd", 0)


class Facts:
    """Processes that a pass wants; `readable` ones can be read, `known` ones were."""

    def __init__(self, *, readable: bool, known: bool) -> None:
        self._readable = readable
        self._known = known
        self.wanted = [ONE]

    def take_wanted(self) -> list[Process]:
        wanted, self.wanted = self.wanted, []
        return wanted

    async def read(self, processes: list[Process]) -> int:
        """Read what is not known; return how many were asked."""
        if self._known or not processes:
            return 0
        self._known = self._readable
        return 1

    def knows(self, process: Process) -> bool:
        assert process is ONE
        return self._known


@pytest.mark.parametrize(
    ("readable", "known", "more"),
    [
        pytest.param(True, False, True, id="read now"),
        pytest.param(False, True, True, id="another reader was faster"),
        pytest.param(False, False, False, id="it hangs"),
    ],
)
async def test_another_pass_finds_what_was_read(readable: bool, known: bool, more: bool) -> None:
    """Whoever read it; of what hangs nothing more would be found, and of nothing either."""
    index = SimpleNamespace(changes=0)
    index.note_change = lambda: setattr(index, "changes", index.changes + 1)
    facts = Facts(readable=readable, known=known)
    survey = Survey(cast("Any", index), cast("Any", None), cast("Any", facts))
    assert [await survey.read_wanted() for _ in range(2)] == [more, False]
    assert index.changes == more
