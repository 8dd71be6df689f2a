"""A container that ends while its guest is asked about it."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.values import Proof
from kata_pin.guest.cpus import Sent
from kata_pin.guest.keeper import Keeper
from kata_pin.guest.probe import GuestProbe


async def test_it_stays_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass without it came while the guest was asked: the answer is nobody's."""
    nothing = cast("Any", None)
    sent: Mapping[str, CpuSet] = {"own": CpuSet([1]), "log": CpuSet([0])}
    book = cast("Any", SimpleNamespace(sent=lambda _: sent))
    agents = cast("Any", SimpleNamespace(root=nothing, settings=nothing))
    keeper = Keeper("p1", agents, book)

    async def proof(*_: object) -> tuple[Proof, str]:
        keeper._sent.pop("log", None)
        return Proof.FITS, ""

    monkeypatch.setattr(GuestProbe, "proof", proof)
    monkeypatch.setattr(keeper, "_plan", SimpleNamespace())
    await keeper._verify(nothing)
    assert keeper._sent == {"own": Sent(CpuSet([1]), Proof.FITS)}
