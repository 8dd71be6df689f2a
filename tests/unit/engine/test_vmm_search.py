"""When the VMM that is known is looked for again, and with which hints."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest
from msgspec.structs import replace

from kata_pin.base.sandbox import Container, Vmm
from kata_pin.engine.observe import VmmSearch
from kata_pin.linux.files import HOST
from kata_pin.linux.process import ProcessIndex, read_process
from kata_pin.records.containers import Registry
from kata_pin.records.pins import AcceptedVmms
from kata_pin.vmm.claims import Strength
from kata_pin.vmm.find import VmmFinder
from tests.support import world
from tests.support.vmmhost import no_survey


class Finder:
    """Finds this process, confirmed by a hook; keeps the hints that it was asked with."""

    def __init__(self) -> None:
        self.asked: list[dict[int, int]] = []
        process = read_process(HOST, os.getpid())
        vmm = world.sandbox().vmm
        assert vmm is not None
        self.vmm = replace(vmm, process=process.key, parent=process.ppid, strength=Strength.HOOK)
        self.kata: bool | None = False
        self.named = False
        self.confirms = True

    def is_kata(self, _pid: int) -> bool | None:
        return self.kata

    def is_named(self, _sandbox_id: str) -> bool:
        return self.named

    def confirm(self, _sandbox_id: str, _hints: Mapping[int, int]) -> Vmm | None:
        return self.vmm if self.confirms else None

    def find(self, _sandbox_id: str, hints: Mapping[int, int]) -> Vmm:
        self.asked.append(dict(hints))
        return self.vmm


@pytest.fixture
def finder() -> Finder:
    return Finder()


@pytest.fixture
def search(tmp_path: Path, finder: Finder) -> Iterator[VmmSearch]:
    index = ProcessIndex(HOST)
    index.refresh()
    with closing(Registry(str(tmp_path / "registry.db"), boot_id="b")) as registry:
        found = cast("VmmFinder", finder)
        yield VmmSearch(HOST, index, found, AcceptedVmms(registry), no_survey())


def hinted(at_ns: int) -> Container:
    return replace(world.shared("c1", "1"), pid_hint=os.getpid(), recorded_ns=at_ns)


@pytest.mark.parametrize("confirms", [True, False])
def test_a_hook_that_names_the_vmm_confirms_it_by_more(
    search: VmmSearch, finder: Finder, *, confirms: bool
) -> None:
    """Found by its cgroup alone, it would lose its place to whoever a hook names later.

    Only where it cannot be confirmed itself are all who claim the sandbox looked at.
    """
    finder.confirms = confirms
    weak = replace(finder.vmm, strength=Strength.CGROUP)
    now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    assert search.find("pod", [world.shared("c1", "1")], weak) == (weak, "")
    assert finder.asked == [], "nothing new is known of it"
    assert search.find("pod", [hinted(now_ns)], weak) == (finder.vmm, "")
    accepted = search.vmms.of("pod")
    assert accepted is not None
    assert accepted.strength == Strength.HOOK
    assert search.find("pod", [hinted(now_ns)], finder.vmm) == (finder.vmm, "")
    assert len(finder.asked) == (0 if confirms else 1)


def test_a_hint_has_the_time_of_the_first_message(search: VmmSearch, finder: Finder) -> None:
    """The pid was the VMM's then: a later message does not speak for a later process."""
    search.find("pod", [hinted(9), hinted(5), hinted(7)], None)
    assert finder.asked == [{os.getpid(): 5}]


async def test_another_runtimes_container(search: VmmSearch, finder: Finder) -> None:
    """The process that its hook named says so; no VMM is searched, and its end ends that."""
    await search.prepare("pod", [hinted(5)], None)
    assert search.find("pod", [hinted(5)], None) == (None, "its containers run without a VM")
    assert finder.asked == []
    search.forget("pod")
    assert not search.is_without("pod")


@pytest.mark.parametrize("sign", ["Kata's", "ended", "named", "accepted", "no hook"])
async def test_a_sandbox_that_may_have_a_vmm(search: VmmSearch, finder: Finder, sign: str) -> None:
    """Then it is searched, whatever the hook's process is."""
    finder.kata = {"Kata's": True, "ended": None}.get(sign, False)
    finder.named = sign == "named"
    if sign == "accepted":
        search.vmms.keep("pod", finder.vmm)
    containers = [world.shared("c1", "1") if sign == "no hook" else hinted(5)]
    await search.prepare("pod", containers, None)
    assert search.find("pod", containers, None) == (finder.vmm, "")
