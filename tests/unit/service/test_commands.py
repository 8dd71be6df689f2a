"""What commands make of their arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec.structs import fields

from kata_pin.service.commands import Commands
from kata_pin.service.request import Request


@pytest.mark.parametrize("ids", [[], ["s1", "s2"]])
async def test_an_empty_name_means_all_sandboxes(ids: list[str]) -> None:
    """As for every other command: not the first one, and no error where there is none."""
    asked = []

    async def state(sandbox_id: str) -> bytes:
        asked.append(sandbox_id)
        return b"{}"

    parts: dict[str, Any] = {one.name: Mock() for one in fields(Commands)}
    parts |= {"sandboxes": SimpleNamespace(ids=ids), "state": state}
    assert await Commands(**parts).reading["state"](Request("state", {"sandbox": ""})) == b"{}"
    assert asked == [""]
