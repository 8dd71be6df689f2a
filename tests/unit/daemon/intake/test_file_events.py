"""What becomes of changes that events tell of."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kata_pin.daemon.intake import file_events as following
from kata_pin.daemon.intake.file_events import CLAIMS, CPUSET, KATA, KUBELET, NODE, FileEvents
from kata_pin.daemon.intake.kata_state import Adoption
from kata_pin.daemon.reconcile.node import NodeWatch
from kata_pin.daemon.reconcile.sandboxes import Sandboxes
from kata_pin.daemon.reconcile.supervisor import _WAITS_S, PassResult, Verdict
from kata_pin.daemon.reconcile.survey import Survey
from kata_pin.daemon.store.containers import Registry
from kata_pin.errors import HostError, StateError
from kata_pin.model.node import KubeletState
from kata_pin.model.sandbox import Container
from kata_pin.sources.state_watch import Changes, StateWatch
from tests.support.vmmhost import NoSurvey, no_survey
from tests.support.world import cpus, node, sandbox

EVERYTHING = Changes(everything=True)


class World:
    """Stands for everything around FileEvents: the parts, the sandboxes and the watch."""

    def __init__(self) -> None:
        self.marks: list[tuple[str, str]] = []
        self.read: list[str] = []
        self.known = {"p1": "uid-1", "p2": "uid-2"}
        self.unknown: set[str] = set()
        self.claims_changed = False
        self.kubelet: KubeletState | None = None
        self.node_changes: list[bool | Exception] = []
        self.told: asyncio.Queue[Changes] = asyncio.Queue()
        self.following = FileEvents(
            cast("NodeWatch", self),
            cast("Registry", self),
            cast("Adoption", self),
            cast("Sandboxes", self),
            cast("StateWatch", self),
            no_survey(),
        )

    # ---- the parts -----------------------------------------------------------------------

    def changed(self) -> bool:
        outcome = self.node_changes.pop(0) if self.node_changes else False
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def read_claims(self) -> bool:
        return self.claims_changed

    def current(self) -> Any:
        return node()

    def running(self, _known: object) -> set[str]:
        return {*self.known, *self.unknown}

    def all(self, _known: object) -> dict[str, int]:
        return dict.fromkeys(self.running(None), 0)

    def one(self, sandbox_id: str) -> int:
        self.read.append(sandbox_id)
        return 0

    def containers(self, sandbox_id: str) -> tuple[Container, ...]:
        return (Container("c", sandbox_id, pod_uid=self.known[sandbox_id]),)

    # ---- the sandboxes -------------------------------------------------------------------

    @property
    def vmms(self) -> dict[str, None]:
        return dict.fromkeys(self.known)

    @property
    def ids(self) -> list[str]:
        return sorted(self.known)

    def cache(self, sandbox_id: str) -> object | None:
        return self if sandbox_id in self.known else None

    def mark(self, sandbox_id: str, reason: str, *, event: bool = True) -> None:
        self.marks.append((sandbox_id, reason))

    def mark_all(self, reason: str) -> None:
        self.marks += [(one, reason) for one in self.ids]

    # ---- the watch -----------------------------------------------------------------------

    async def changes(self) -> AsyncIterator[Changes]:
        while True:
            yield await self.told.get()

    async def tell(self, *changes: Changes) -> None:
        """Let these be acted on."""
        for one in changes:
            self.told.put_nowait(one)
        task = asyncio.create_task(self.following.follow())
        async with asyncio.timeout(5):
            while not self.told.empty():
                await asyncio.sleep(0)
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def world() -> World:
    return World()


def marks(reason: str, *sandbox_ids: str) -> list[tuple[str, str]]:
    return [(one, reason) for one in sandbox_ids]


async def test_a_written_state_is_read_and_a_pass_asked_for(world: World) -> None:
    """That sandbox's and no other's, although nothing in it was new."""
    await world.tell(Changes(sandboxes={"p1"}))
    assert (world.read, world.marks) == (["p1"], marks(KATA, "p1"))


async def test_a_new_sandbox_needs_a_vmm(world: World) -> None:
    """A folder with any name asks for nothing; one with a VMM behind it is taken in."""
    await world.tell(Changes(sandboxes={"none"}))
    assert (world.read, world.marks) == ([], [])
    world.unknown = {"p9"}
    await world.tell(Changes(sandboxes={"p9"}))
    assert (world.read, world.marks) == (["p9"], marks(KATA, "p9"))


async def test_who_writes_too_often_is_read_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and once more when the time has come, however many writes there were."""
    monkeypatch.setattr(following, "SPACING_S", 0.1)  # fifty events take 20 ms on a busy machine
    await world.tell(*(Changes(sandboxes={"p1"}) for _ in range(50)))
    assert world.read == ["p1"]
    async with asyncio.timeout(5):
        while len(world.read) < 2:
            await asyncio.sleep(0.001)
    await asyncio.sleep(following.SPACING_S * 2)
    assert world.read == ["p1", "p1"]


async def test_a_cpuset_of_a_sandbox_that_is_over(world: World) -> None:
    """An event that was on its way does not bring it back."""
    await world.tell(Changes(cpusets={"p1", "gone"}))
    assert world.marks == marks(CPUSET, "p1")


async def test_the_pods_of_a_checkpoint_come_first(world: World) -> None:
    """Then, as the default set is another, everybody; the same again asks for nothing."""
    world.kubelet = KubeletState("static", cpus("0-1"), entries={"uid-2": {"c": cpus("2")}})
    await world.tell(Changes(kubelet=True), Changes(kubelet=True))
    assert world.marks == marks(KUBELET, "p2", "p1", "p2")


async def test_changed_claims_move_everybody(world: World) -> None:
    """A spec that says the same as before asks for nothing."""
    await world.tell(Changes(claims=True))
    assert world.marks == []
    world.claims_changed = True
    await world.tell(Changes(claims=True))
    assert world.marks == marks(CLAIMS, "p1", "p2")


async def test_lost_events_ask_for_everything_but_not_at_the_start(world: World) -> None:
    """The beginning is told as a loss is: passes are due then anyway."""
    await world.tell(EVERYTHING)
    assert world.marks == []
    world.unknown = {"p9"}
    await world.tell(EVERYTHING)
    assert world.marks == [*marks(KATA, "p9"), *marks(following.LOST, "p1", "p2")]


@pytest.mark.parametrize("changed", [True, False])
async def test_cpus_that_went_are_looked_at_again_when_cpusets_have_followed(
    world: World, monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    """A pass at once, two later, also if the CPUs are back already; an error ends nothing."""
    monkeypatch.setattr(following, "CPUSETS_FOLLOW_S", (0.001, 0.002))
    gone = HostError("read", "online", errno.EIO)
    world.node_changes = [gone, changed]

    async def events() -> AsyncIterator[None]:
        for _ in range(2):
            yield None

    monkeypatch.setattr(following, "cpu_changes", events)
    await world.following.follow_cpus()
    async with asyncio.timeout(5):
        while len(world.marks) < 6:
            await asyncio.sleep(0.001)
    assert world.marks == marks(NODE, "p1", "p2") * 3


async def test_a_kernel_that_does_not_tell_of_cpus(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once, and audits find them."""

    class Refused:
        def __aiter__(self) -> Refused:
            return self

        async def __anext__(self) -> None:
            raise HostError("hear", "the kernel's uevents", errno.EPERM)

    monkeypatch.setattr(following, "cpu_changes", Refused)
    await world.following.follow_cpus()
    assert "noticed only by audits" in caplog.text


async def test_an_error_ends_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A registry that cannot be written now is tried again by the audit; the next event counts."""

    def broken(_sandbox_id: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(world, "one", broken)
        await world.tell(Changes(sandboxes={"p1"}))
    assert "cannot handle a change" in caplog.text
    await world.tell(Changes(sandboxes={"p2"}))
    assert world.read == ["p2"]


async def test_a_vmm_that_did_not_answer_is_asked_again(world: World) -> None:
    """A process started that cannot be read now: once it can, its sandbox is taken in."""
    survey = NoSurvey()
    survey.retry_s = 0.01
    world.following._survey = cast("Survey", survey)
    world.following.vmm_started()
    assert world.marks == []
    world.unknown, survey.retry_s = {"p9"}, None
    async with asyncio.timeout(5):
        while not world.marks:
            await asyncio.sleep(0.001)
    assert world.marks == marks(KATA, "p9")
    assert world.following._retry is None


async def test_a_deep_audit_repeats_a_pass_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after the retries of half a minute: a full disk may last longer."""
    monkeypatch.setitem(_WAITS_S, Verdict.RETRY, ())
    sandboxes = Sandboxes()
    entry = sandboxes.enter("pod")
    entry.cache.vmm = sandbox().vmm
    runs = 0

    async def fail(_: str) -> PassResult:
        nonlocal runs
        runs += 1
        raise StateError("no space left")

    unchanged = cast("NodeWatch", SimpleNamespace(kubelet=None, changed=lambda: False))
    nothing = cast("Any", None)
    events = FileEvents(unchanged, nothing, nothing, sandboxes, nothing, no_survey())
    task = asyncio.create_task(entry.supervisor.run(fail))
    await sandboxes.settled("pod", sandboxes.mark("pod", "hook:poststart"))
    events.look_at_node()
    await asyncio.sleep(0.01)
    task.cancel()
    assert runs == 2
