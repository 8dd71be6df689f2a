"""Children of the broker know the jails that were verified before they began, and no others."""

from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest

from kata_pin.rights import client
from kata_pin.rights.broker.pages import PagesMoved, PageWindow
from kata_pin.rights.broker.protocol import NUMBER, Answer, Settings, answer_of, serve
from kata_pin.rights.broker.rows import NUMBERS, Value
from kata_pin.rights.broker.threads import ThreadCall
from kata_pin.rights.calls import Calls
from kata_pin.rights.client import BrokerCalls

WINDOW = PageWindow(7, 1, 0, 4096, 1, 1, frozenset({0}), 0, shared=False)
MOVED = PagesMoved(1, 1)


class Doubled(BrokerCalls):
    """Calls whose broker verifies each jail that is not `refused`; its children are threads."""

    def __init__(self) -> None:
        ours, self._theirs = socket.socketpair()
        super().__init__(ours, Settings(vc="/vc", kata="/kata"))
        self.refused: set[str] = set()
        self.begun: list[threading.Thread] = []
        self.killed = 0
        self.meanwhile = ""
        """A jail that is verified while a child answers."""

    def close(self) -> None:
        """End the children too."""
        super().close()
        self._theirs.close()
        assert self.running == 0

    @property
    def running(self) -> int:
        """How many children go on after a moment, in which others end."""
        for one in self.begun:
            one.join(0.2)
        return sum(one.is_alive() for one in self.begun)

    def _exchange(
        self, name: str, values: Mapping[str, Value], descriptors: Sequence[int]
    ) -> tuple[bytes, list[int]]:
        self.killed += name == "end-child"
        if name == "verify-jail":
            base = ("/vc", "/kata")[int(values["base"])]
            if f"{base}/{values['program']!s}/{values['sandbox']!s}/root" in self.refused:
                raise FileNotFoundError
        if name != "child":
            return b"", []
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.begun.append(threading.Thread(target=self._serve, args=(theirs,)))
        self.begun[-1].start()
        return NUMBER.pack(os.getpid()), [ours.detach()]

    def _serve(self, channel: socket.socket) -> None:
        with channel:
            serve(channel, self._answer)

    def _answer(self, row: int, data: bytes, descriptors: Sequence[int]) -> Answer:
        if self.meanwhile:
            jail, self.meanwhile = self.meanwhile, ""
            self.verify_jail(8, jail)
        if row == NUMBERS["slow-file"]:
            return Answer(b"text")
        return answer_of(MOVED if row == NUMBERS["move-pages"] else [["text"]])

    async def use_all(self) -> int:
        """Use a reader, also for system calls, and a mover; return how many began for that."""
        before = len(self.begun)
        assert self.system_calls("/proc/7", [7]) == [ThreadCall("text")]
        assert await self.read_slow([(7, "maps", 9)], 5) == {(7, "maps"): b"text"}
        assert await self.move_pages(WINDOW, 5) == MOVED
        return len(self.begun) - before


@pytest.fixture
def calls() -> Iterator[Doubled]:
    """A broker's, that is closed in the end."""
    made = Doubled()
    yield made
    made.close()


async def test_a_jail_that_is_verified_later(calls: Doubled) -> None:
    """Children that do not know it end, and others begin; those that do go on."""
    assert await calls.use_all() == 2
    assert await calls.use_all() == 0
    calls.verify_jail(7, "/vc/firecracker/one/root")
    assert calls.running == 0
    assert await calls.use_all() == 2
    calls.verify_jail(7, "/vc/firecracker/one/root")
    assert await calls.use_all() == 0
    calls.verify_jail(7, "/vc/firecracker/two/root")
    assert await calls.use_all() == 2


async def test_other_places_of_a_jail_are_tried_first(calls: Doubled) -> None:
    """The broker forgets a jail then, but not the children; one that begins then has to end."""
    calls.refused = {"/vc/firecracker/one/root"}
    for begun in (2, 0, 0):
        with pytest.raises(FileNotFoundError):
            calls.verify_jail(7, "/vc/firecracker/one/root")
        calls.verify_jail(7, "/kata/firecracker/one/root")
        assert await calls.use_all() == begun
    calls.verify_jail(7, "/kata/firecracker/two/root")
    with pytest.raises(FileNotFoundError):
        calls.verify_jail(7, "/vc/firecracker/one/root")
    assert await calls.use_all() == 2
    calls.verify_jail(7, "/kata/firecracker/two/root")
    assert await calls.use_all() == 2


async def test_a_jail_that_is_verified_while_a_child_answers(calls: Doubled) -> None:
    """It is not used again after that."""
    calls.meanwhile = "/vc/firecracker/one/root"
    await calls.read_slow([(7, "maps", 9)], 5)
    assert (calls.killed, calls.running) == (1, 0)
    calls.meanwhile = "/vc/firecracker/two/root"
    await calls.move_pages(WINDOW, 5)
    assert (calls.killed, calls.running) == (2, 0)


async def test_as_many_jails_as_the_broker_remembers(
    calls: Doubled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It forgets the first; its children that began before know that one as well."""
    monkeypatch.setattr(client, "MAX_JAILS", 2)
    for pid in (7, 8, 9):
        calls.verify_jail(pid, f"/vc/firecracker/{pid}/root")
    assert await calls.use_all() == 2
    calls.verify_jail(9, "/vc/firecracker/9/root")
    assert await calls.use_all() == 0
    calls.verify_jail(7, "/vc/firecracker/7/root")
    assert await calls.use_all() == 2


@contextmanager
def no_room() -> Iterator[None]:
    """Leave this process no room for a descriptor; poll(2) takes no more than the limit either."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize(
    "call",
    [
        lambda calls: calls.switches(0),
        lambda calls: calls.system_calls("/proc/7", [7]),
        lambda calls: calls.executables([7]),
    ],
    ids=["handed", "child", "content"],
)
def test_without_room_for_a_descriptor_a_call_fails(call: Callable[[BrokerCalls], object]) -> None:
    """The kernel drops it; the answer is not taken for an empty one, and the broker goes on."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    calls = BrokerCalls(ours, Settings(vc="/vc", kata="/kata"))
    handed = socket.socket()
    answer = Answer(b"[  ]", (handed.detach(),))
    broker = threading.Thread(target=serve, args=(theirs, lambda *_: answer))
    broker.start()
    try:
        with no_room(), pytest.raises(OSError, match="Too many open files"):
            call(calls)
        assert not calls.ended.is_set()
    finally:
        calls.close()
        broker.join()
        theirs.close()


def test_every_call_that_needs_rights_is_made_by_the_broker() -> None:
    """One that is not would be made without rights, and be refused on a node only."""
    made_here = {name for name in vars(Calls) if name[0] != "_"} - vars(BrokerCalls).keys()
    assert made_here == {"set_affinity"}  # of one thread: set_affinities uses it
