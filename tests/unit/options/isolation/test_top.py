"""The first lines of `top`: what to look at first, and how sure that is."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kata_pin.cli.render.layout import Output
from kata_pin.options.isolation.top_render import once
from tests.unit.cli.documents import top


@pytest.mark.parametrize(
    ("switches", "line"),
    [
        (0.0, "no other tasks seen on exclusive pCPUs"),
        (
            5.0,
            "others come to exclusive pCPUs, up to 5 times per second; kata-pin prove names them",
        ),
        (None, "no long use of exclusive pCPUs by others seen; kata-pin prove sees all"),
    ],
)
def test_nobody_is_only_said_where_switches_are_counted(switches: float | None, line: str) -> None:
    """Ticks and waits alone do not show a short use, so they do not exclude it."""
    found = top()
    quiet = tuple(
        replace(one, foreign_percent=0.0, foreign_switches=switches) for one in found.pcpus
    )
    assert line in [one.plain for one in once(replace(found, pcpus=quiet), Output(120))]
