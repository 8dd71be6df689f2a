"""What irqbalance answers on its socket."""

from __future__ import annotations

import os
import socket

import pytest
from msgspec.structs import replace

from kata_pin.base.cpuset import EMPTY, CpuSet
from kata_pin.base.errors import ParseError
from kata_pin.linux.files import HOST
from kata_pin.options.quiet import kernel_work
from kata_pin.options.quiet.kernel_work import FOLDER, IrqbalanceProcesses
from kata_pin.options.quiet.services import Setup, parse_setup
from kata_pin.rights.calls import Calls


@pytest.mark.parametrize(
    ("answer", "setup"),
    [
        (b"SLEEP 10 BANNED 0000000c", Setup(10, CpuSet({2, 3}))),
        (b"SLEEP 10 BANNED 0\0", Setup(10, EMPTY)),
        (
            b"SLEEP 5 IRQ 24 LOAD 3 DIFF 0 CLASS 2 BANNED 00000001,00000000",
            Setup(5, CpuSet({32})),
        ),
    ],
)
def test_setup(answer: bytes, setup: Setup) -> None:
    """How often it acts, and the pCPUs that it keeps clear."""
    assert parse_setup(answer) == setup


@pytest.mark.parametrize("answer", [b"", b"SLEEP 10", b"SLEEP x BANNED 3", b"SLEEP 1 BANNED x"])
def test_another_answer(answer: bytes) -> None:
    """Anything else is no setup."""
    with pytest.raises(ParseError, match="irqbalance"):
        parse_setup(answer)


class _Busy(Calls):
    """An irqbalance, with the pid of this process, that has not answered yet."""

    def __init__(self) -> None:
        self.asked: list[socket.socket] = []

    def listdir(self, path: str) -> list[str]:
        assert path == FOLDER
        return [f"irqbalance{os.getpid()}.sock"]

    def ask_irqbalance(self, pid: int, banned: str | None) -> socket.socket:
        assert (pid, banned) == (os.getpid(), None)
        ours, theirs = socket.socketpair()
        self.asked.append(theirs)
        return ours


async def test_a_late_answer_finds_its_connection_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is busy for long is not ended by SIGPIPE; its answer is read the next time."""
    monkeypatch.setattr(kernel_work, "ANSWER_S", 0.05)
    calls = _Busy()
    processes = IrqbalanceProcesses(replace(HOST, calls=calls))
    assert await processes.observe() == []
    assert "does not answer" in processes.problem
    (busy,) = calls.asked
    busy.sendall(b"SLEEP 10 BANNED 0000000c")
    (seen,) = await processes.observe()
    assert (seen.value, processes.problem) == ("2-3", "")
    assert calls.asked == [busy]
    assert busy.recv(1) == b"", "it is closed once it has answered"
    busy.close()
