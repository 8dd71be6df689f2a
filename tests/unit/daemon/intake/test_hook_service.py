"""What a hook is told, and what becomes of the spool when things fail."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from kata_pin.calls import DIRECT
from kata_pin.config import Config
from kata_pin.config.paths import Paths
from kata_pin.config.tree import Mode
from kata_pin.daemon.intake.hook_service import HookService
from kata_pin.daemon.intake.records import Intake
from kata_pin.daemon.live_config import LiveConfig
from kata_pin.daemon.reconcile.counters import Counters
from kata_pin.daemon.reconcile.sandbox_cache import SandboxCache
from kata_pin.daemon.reconcile.sandboxes import Sandboxes
from kata_pin.daemon.store.containers import Registry
from kata_pin.daemon.store.pins import Pins
from kata_pin.errors import HostError, StateError
from kata_pin.model.placement import Report
from kata_pin.model.sandbox import Vmm
from kata_pin.sources.bundles import BundleReader
from kata_pin.sources.hooks import HookConnection
from kata_pin.sources.spool import Spool
from kata_pin.vmm.state_files import KataPaths
from kata_pin.wire.hook_message import HookMessage
from kata_pin.wire.oci import Phase
from tests.support import world


class Answers:
    """A hook's end of the connection: what it was told, in order."""

    def __init__(self, message: HookMessage) -> None:
        self.message = message
        self.gone = asyncio.Event()
        self.said: list[str] = []

    async def recorded(self) -> None:
        self.said.append("recorded")

    async def pinned(self) -> None:
        self.said.append("pinned")

    async def unpinned(self, reason: str) -> None:
        self.said.append(f"unpinned {reason}")

    async def refused(self, reason: str) -> None:
        self.said.append(f"refused {reason}")


class Marked:
    """Sandboxes whose passes end as the test says."""

    def __init__(self) -> None:
        self.marks: list[str] = []
        self.report: Report | None = None
        self.kept: SandboxCache | None = SandboxCache()
        self.live = LiveConfig(Config())

    def mark(self, sandbox_id: str, _reason: str) -> int:
        self.marks.append(sandbox_id)
        return 1

    async def settled(self, _sandbox_id: str, _ticket: int) -> Report | None:
        return self.report

    def enter(self, _sandbox_id: str) -> SimpleNamespace:
        return SimpleNamespace(cache=self.kept)

    def cache(self, _sandbox_id: str) -> SandboxCache | None:
        return self.kept


@pytest.fixture
def marked() -> Marked:
    return Marked()


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    one = Registry(str(tmp_path / "registry.db"), boot_id="b")
    yield one
    one.close()


@pytest.fixture
def hook_service(tmp_path: Path, registry: Registry, marked: Marked) -> HookService:
    bundle = tmp_path / "bundles" / "c1"
    bundle.mkdir(parents=True)
    (bundle / "config.json").write_text("{}")
    spool = Spool(str(tmp_path / "spool"))
    spool.prepare()
    intake = Intake(registry, BundleReader([str(tmp_path / "bundles")]))
    return HookService(
        marked.live,
        Pins(registry),
        intake,
        cast("Sandboxes", marked),
        spool,
        Counters(),
        _find_vmm,
        DIRECT,
    )


async def _find_vmm(_: str) -> Vmm | None:
    return world.sandbox().vmm


def _message(tmp_path: Path, phase: Phase, stamp: int = 5) -> HookMessage:
    bundle = str(tmp_path / "bundles" / "c1")
    state = {"ociVersion": "", "id": "c1", "status": "", "pid": 1, "bundle": bundle}
    return HookMessage(phase, stamp, 6, json.dumps(state).encode())


async def _told(hook_service: HookService, message: HookMessage) -> list[str]:
    answers = Answers(message)
    await hook_service.hook(cast("HookConnection", answers))
    return answers.said


def _settled(marked: Marked) -> None:
    sandbox, threads = world.sandbox(), world.vcpus(0)
    from kata_pin.policy.placement.place import place

    marked.report = Report("c1", tuple(threads), place(sandbox, threads, world.node()))
    assert marked.kept is not None
    marked.kept.vmm = sandbox.vmm


async def test_pinned_is_only_said_of_pins(
    hook_service: HookService, registry: Registry, marked: Marked, tmp_path: Path
) -> None:
    """Each reason why pins do not stand is told; `pinned` where they do, or none are wanted."""
    stamp = 0

    async def told() -> str:
        nonlocal stamp
        stamp += 1
        said = await _told(hook_service, _message(tmp_path, Phase.CREATE_RUNTIME, stamp))
        assert said[0] == "recorded"
        return said[1]

    assert await told() == "unpinned the pass over the sandbox failed"
    marked.report = Report("c1")
    assert await told() == "unpinned no VMM"
    _settled(marked)
    assert await told() == "pinned"
    marked.live.replace(Config(mode=Mode.OBSERVE))
    assert await told() == "unpinned the daemon only observes"
    Pins(registry).set_released(["c1"], released=True)
    assert await told() == "unpinned the operator released the sandbox"
    marked.kept = None  # dropped: there is no VMM behind it
    assert await told() == "pinned"


async def test_the_deadline_counts_while_qemu_is_left(
    hook_service: HookService,
    marked: Marked,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A session that ends slowly after its hook has gone keeps nobody beyond the deadline."""
    annotations = {"io.kubernetes.cri.container-type": "sandbox"}
    config = tmp_path / "bundles" / "c1" / "config.json"
    config.write_text(json.dumps({"annotations": annotations}))
    answers = Answers(_message(tmp_path, Phase.CREATE_RUNTIME))
    vc = tmp_path / "vc"
    marked.live.replace(Config(paths=Paths(vc=str(vc))))
    socket = Path(KataPaths(vc=str(vc)).main_qmp("c1"))
    socket.parent.mkdir(parents=True)
    socket.touch()

    async def slow(*_: object, **__: object) -> None:
        answers.gone.set()
        try:
            await asyncio.sleep(10)
        finally:
            await asyncio.sleep(0.1)

    async def never(_sandbox_id: str, _ticket: int) -> None:
        await asyncio.sleep(10)

    monkeypatch.setattr("kata_pin.daemon.intake.qmp.query", slow)
    monkeypatch.setattr(marked, "settled", never)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(hook_service.hook(cast("HookConnection", answers)), 0.02)
    assert marked.marks == []


async def test_phases_that_do_not_wait_are_only_recorded(
    hook_service: HookService, marked: Marked, tmp_path: Path
) -> None:
    """poststart and poststop get one answer, and mark their sandbox."""
    assert await _told(hook_service, _message(tmp_path, Phase.POSTSTART)) == ["recorded"]
    assert await _told(hook_service, _message(tmp_path, Phase.POSTSTOP, 6)) == ["recorded"]
    assert marked.marks == ["c1", "c1"]


async def test_hopeless_and_unwritable_differ(
    hook_service: HookService, registry: Registry, marked: Marked, tmp_path: Path
) -> None:
    """A hopeless message is refused; without a registry nothing is said, so the hook spools."""
    (said,) = await _told(hook_service, HookMessage(Phase.CREATE_RUNTIME, 5, 6, b"{"))
    assert said.startswith("refused ")
    registry.close()
    answers = Answers(_message(tmp_path, Phase.CREATE_RUNTIME))
    with pytest.raises(StateError):
        await hook_service.hook(cast("HookConnection", answers))
    assert answers.said == []
    assert marked.marks == []


async def test_a_spool_that_cannot_be_recorded_stays(
    hook_service: HookService, registry: Registry, marked: Marked, tmp_path: Path
) -> None:
    """Neither lost nor fatal: the next look finds the message again."""
    message = _message(tmp_path, Phase.CREATE_RUNTIME)
    body = message.body
    file = tmp_path / "spool" / "5-6.msg"
    file.write_bytes(b"KP1 createRuntime 5 6 %d\n" % len(body) + body)
    registry.close()
    hook_service.take_spool()
    assert file.exists()
    assert marked.marks == []


async def test_a_spooled_message_that_cannot_be_read_now_keeps_back_no_other(
    hook_service: HookService, marked: Marked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bundle gives EIO: its message stays, the message after it is recorded."""
    for name in ("c1", "c2"):
        body = _message(tmp_path, Phase.CREATE_RUNTIME).body.replace(b"c1", name.encode())
        stamp = 5 if name == "c1" else 6
        file = tmp_path / "spool" / f"{stamp}-6.msg"
        file.write_bytes(b"KP1 createRuntime %d 6 %d\n" % (stamp, len(body)) + body)
        (tmp_path / "bundles" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "bundles" / name / "config.json").write_text("{}")

    def read(reader: BundleReader, bundle: str) -> bytes:
        if bundle.endswith("c1"):
            raise HostError("read", bundle, errno.EIO)
        return b"{}"

    monkeypatch.setattr(BundleReader, "read_config", read)
    hook_service.take_spool()
    assert [path.name for path in (tmp_path / "spool").glob("*.msg")] == ["5-6.msg"]
    assert marked.marks == ["c2"]
