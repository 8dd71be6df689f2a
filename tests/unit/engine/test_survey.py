"""What a pass asked for in vain, and who read it; and what another runtime's container costs."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kata_pin.base.sandbox import Process, ProcessKey
from kata_pin.engine.observe import Survey
from kata_pin.linux.files import HOST
from kata_pin.linux.process import ProcessIndex, read_process
from kata_pin.vmm.find import VmmFinder
from tests.support.vmmhost import facts

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


async def test_of_a_container_without_a_vm_only_its_process_is_read() -> None:
    """The hook waits, and listing a full node's processes takes longer than all the rest."""
    index, asked = ProcessIndex(HOST), []

    async def read(processes: list[Process]) -> None:
        asked.extend(processes)

    survey = Survey(index, VmmFinder(facts(HOST, index)), cast("Any", SimpleNamespace(read=read)))
    assert not await survey.claims_to_be("pod", {os.getpid(): 1, 2**22 + 1: 1})
    assert asked == [read_process(HOST, os.getpid())]
    assert index.all() == []
