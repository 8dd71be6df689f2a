"""The agent's metrics: busy times by rank."""

from __future__ import annotations

import pytest

from kata_pin.base.errors import ParseError
from kata_pin.peers.agent.messages import MAX_METRICS, RankTime, parse_cpu_times

ITEMS = [
    "user",
    "nice",
    "system",
    "idle",
    "iowait",
    "irq",
    "softirq",
    "steal",
    "guest",
    "guest_nice",
]


def _text(*ranks: dict[str, str]) -> str:
    """Metrics as the agent's encoder writes them: sorted, with heads, other families around."""
    lines = ["# HELP kata_guest_cpu_time Guest CPU statistics.", "# TYPE kata_guest_cpu_time gauge"]
    for rank, values in enumerate(ranks):
        lines += [
            f'kata_guest_cpu_time{{cpu="{rank}",item="{item}"}} {values.get(item, "0")}'
            for item in sorted(ITEMS)
        ]
    lines += ['kata_guest_cpu_time{cpu="total",item="user"} 5', 'kata_guest_load{item="load1"} 0.5']
    return "\n".join(lines) + "\n"


def test_times() -> None:
    """Busy is user, nice, system and interrupts; what guests of the guest took is in user."""
    first = {"user": "10", "nice": "1", "system": "2", "irq": "3", "softirq": "4", "guest": "9"}
    second = {"idle": "100", "iowait": "5", "steal": "7", "user": "1.5e+03"}
    assert parse_cpu_times(_text(first, second)) == (
        RankTime(0, 20.0, 0.0, 0.0),
        RankTime(1, 1500.0, 105.0, 7.0),
    )
    assert parse_cpu_times(_text(second))[0].total_ms == 1612.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        'kata_guest_cpu_time{cpu="1",item="user"} 1\n',
        'kata_guest_cpu_time{cpu="0",item="idle"} 1\n',
        'kata_guest_cpu_time{cpu="0",item="user"} -1\n',
        'kata_guest_cpu_time{cpu="0",item="user"} nan\n',
        'kata_guest_cpu_time{cpu="0",item="user"} 1e999\n',
        'kata_guest_cpu_time{cpu="0",item="user"} 1.2.3\n',
        'xkata_guest_cpu_time{cpu="0",item="user"} 1\n',
        'kata_guest_cpu_time{cpu="\u0660",item="user"} 1\n',
        'kata_guest_cpu_time{cpu="0",item="user"} 1\n' * 140_000,
        " " * (MAX_METRICS + 1),
    ],
)
def test_what_tells_no_times(text: str) -> None:
    """No CPUs, ranks with gaps, numbers that are none, too much of it."""
    with pytest.raises(ParseError):
        parse_cpu_times(text)
