"""The runner of passes: what an observer's failure does to others."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from kata_pin.base.config.tree import Config, LiveConfig
from kata_pin.base.placement import PassOutcome, Report
from kata_pin.base.sandbox import Container
from kata_pin.base.steps import Steps
from kata_pin.base.values import ContainerState
from kata_pin.engine import runner
from kata_pin.engine.counters import Observer
from kata_pin.engine.passes import Engine
from kata_pin.engine.runner import PassRunner
from kata_pin.engine.sandboxes import PassVerdict, Sandboxes
from kata_pin.linux.files import HOST
from kata_pin.linux.process import read_process
from kata_pin.records.containers import Registry
from kata_pin.records.pins import Pins
from tests.support import world
from tests.support.vmmhost import no_survey


class Broken:
    """An observer whose file is full."""

    def passed(self, outcome: PassOutcome) -> None:
        """Fail."""
        raise OSError("no space left")

    ended = passed

    def failed(self, operation: str, error: Exception) -> None:
        """Fail too."""
        raise OSError("no space left")


class Listening:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def passed(self, outcome: PassOutcome) -> None:
        """Keep it."""
        self.told.append(outcome.sandbox_id)

    ended = passed

    def failed(self, operation: str, error: Exception) -> None:
        """Not used here."""


def _passes(registry: Registry, *observers: Observer) -> tuple[Sandboxes, PassRunner]:
    """Return a runner whose engine does nothing, and its table."""

    def never(work: Coroutine[object, object, None]) -> None:
        work.close()

    def steps(sandbox_id: str, *_: object, **__: object) -> Steps[Report]:
        yield
        return Report(sandbox_id=sandbox_id)

    sandboxes = Sandboxes()

    async def prepare(*_: object) -> None:
        return

    search = SimpleNamespace(
        prepare=prepare, survey=no_survey(), is_without=lambda _sandbox_id: False
    )
    engine = SimpleNamespace(steps=steps, search=search, forget=lambda _sandbox_id: None)
    passes = PassRunner(
        HOST,
        sandboxes,
        cast("Engine", engine),
        registry,
        Pins(registry),
        LiveConfig(Config()),
        never,
        cast("Any", None),
        cast("Any", None),
        observers,
    )
    return sandboxes, passes


async def test_an_observer_that_fails_keeps_nothing_from_the_others(registry: Registry) -> None:
    """The others are told all the same."""
    listening = Listening()
    sandboxes, passes = _passes(registry, Broken(), listening)
    sandboxes.enter("s")
    await passes.release("s", remember=False)
    assert listening.told == ["s"]


async def test_releasing_all_yields_between_sandboxes(registry: Registry) -> None:
    """Between any two sandboxes the event loop serves others; one that ended is left out."""
    listening = Listening()
    sandboxes, passes = _passes(registry, listening)
    for one in ("a", "b"):
        sandboxes.enter(one)
    served: list[int] = []

    async def serve() -> None:
        while True:
            served.append(len(listening.told))
            await asyncio.sleep(0)

    serving = asyncio.create_task(serve())
    for one in ("a", "gone", "b"):
        await passes.release(one, remember=False)
    serving.cancel()
    assert listening.told == ["a", "b"]
    assert 1 in served


@pytest.mark.parametrize("saw_all", [True, False])
async def test_who_was_not_followed_is_looked_at_once_more(
    registry: Registry, *, saw_all: bool
) -> None:
    """What its processes did before is in no event, unless nothing new is there once each is."""
    sandboxes, passes = _passes(registry, Listening())

    def is_all(sandbox_id: str, _: object) -> bool:
        assert sandboxes.tracked == {one.key.tgid for one in world.vcpus(0, 1)}, "too early"
        return saw_all

    cast("Any", passes._engine).saw_all = is_all
    entry = sandboxes.enter("s")
    entry.cache.vmm = world.sandbox().vmm
    entry.cache.report = Report(sandbox_id="s", threads=tuple(world.vcpus(0, 1)))
    passes._exits.watch = lambda *_: None  # type: ignore[method-assign]
    wanted = []
    for _ in range(2):
        await passes._in_turn("s")
        wanted.append(entry.supervisor._wanted)
    assert wanted == ([0, 0] if saw_all else [1, 1])


async def test_whoever_may_have_asked_gets_a_pass_when_processes_were_read(
    registry: Registry,
) -> None:
    """Also a pass that pauses while another one's questions are answered: its own are with them.

    The pass itself does not wait for that, because a hook may wait for it.
    """
    sandboxes, passes = _passes(registry, Listening())
    for one in ("a", "b", "c"):
        sandboxes.enter(one).cache.vmm = world.sandbox().vmm

    async def read_wanted() -> bool:
        return True

    survey, started = cast("Any", passes._engine.search.survey), list[Coroutine[Any, Any, None]]()
    survey.has_wanted, survey.read_wanted = True, read_wanted
    passes._start = started.append
    passes._scheduler.begun.add("b")
    await passes._in_turn("a")
    assert not sandboxes.entry("a").supervisor._wanted
    await started[0]
    reasons = [sandboxes.entry(one).supervisor._reasons for one in ("a", "b", "c")]
    assert ["processes were read" in one for one in reasons] == [True, True, False]


async def test_processes_that_cannot_be_read_end_nothing(
    registry: Registry, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon would end with the task that reads them; another pass asks for them again."""
    monkeypatch.setattr(runner, "AGAIN_S", 0)
    sandboxes, passes = _passes(registry, Listening())
    sandboxes.enter("a")

    async def read_wanted() -> bool:
        raise ValueError("no sense")

    cast("Any", passes._engine.search.survey).read_wanted = read_wanted
    await passes._read_wanted({"a"})
    assert sandboxes.entry("a").supervisor._wanted == 1
    assert "cannot read processes now: no sense" in caplog.text


async def test_an_unpin_is_remembered_in_its_turn(registry: Registry) -> None:
    """A pass that runs before it is an ordinary one: its reason is not taken for the unpin's."""
    listening = Listening()
    sandboxes, passes = _passes(registry, listening)
    sandboxes.enter("s")
    async with passes._scheduler.turn("other"):
        unpin = asyncio.create_task(passes.release("s", remember=True))
        await asyncio.sleep(0)
        assert Pins(registry).released() == frozenset()
    await unpin
    assert Pins(registry).released() == {"s"}
    assert listening.told == ["s"]


async def test_a_vmm_that_was_found_outside_a_pass_is_watched(registry: Registry) -> None:
    """A release found it, or a pass that failed afterwards: its exit is still waited for, once."""
    sandboxes, passes = _passes(registry, Listening())
    watched: list[object] = []
    passes._exits.watch = lambda key, exited: watched.append(key)  # type: ignore[method-assign]
    vmm = world.sandbox().vmm
    assert vmm is not None
    sandboxes.enter("s").cache.vmm = vmm
    await passes._in_turn("s")
    await passes._in_turn("s")
    assert watched == [vmm.process]


async def test_a_vmm_that_cannot_be_verified_again_has_not_exited(registry: Registry) -> None:
    """Its shim died while no descriptor was left: the records stay until the VMM ends."""
    sandboxes, passes = _passes(registry, Listening())
    registry.record(Container("c1", "s"), stamp_ns=1)
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        try:
            vmm = world.sandbox().vmm
            assert vmm is not None
            cache = sandboxes.enter("s").cache
            cache.vmm = replace(vmm, process=read_process(HOST, process.pid).key)
            await passes._in_turn("s")
            for _ in range(2):
                cache.vmm = None
                assert (await passes._in_turn("s")).verdict is PassVerdict.RETRY
        finally:
            process.kill()
    cache.vmm = None
    registry.record(Container("c1", "s", state=ContainerState.DELETED), stamp_ns=2)
    assert (await passes._in_turn("s")).verdict is PassVerdict.GONE


async def test_a_container_that_comes_during_a_pass_keeps_its_sandbox(registry: Registry) -> None:
    """The pass saw no container; its end asks the registry again before it drops the sandbox."""
    sandboxes, passes = _passes(registry, Listening())
    sandboxes.enter("s")

    def steps(sandbox_id: str, *_: object, **__: object) -> Steps[Report]:
        registry.record(replace(world.shared("c1", "1"), sandbox_id=sandbox_id), stamp_ns=5)
        yield
        return Report(sandbox_id=sandbox_id)

    search = cast("Any", passes._engine.search)
    search.is_claimed = lambda *_: True
    cast("Any", passes._engine).steps = steps
    result = await passes._in_turn("s")
    assert result.verdict is PassVerdict.RETRY
    assert sandboxes.ids
    assert [one.id for one in registry.containers("s")] == ["c1"]
