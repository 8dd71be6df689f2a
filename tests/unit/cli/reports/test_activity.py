"""Run delay, preemptions and migrations of real threads in `show SANDBOX`."""

from __future__ import annotations

from pathlib import Path

from tests.support.played_threads import played
from tests.unit.cli import documents as docs
from tests.unit.conftest import Commands


def test_figures_of_living_threads(commands: Commands) -> None:
    """As the kernel has them; a thread that is gone has none."""
    with played("sleeps", "sleeps") as process:
        unread = {"run_delay_s": None, "preemptions": None, "migrations": None}
        ended = docs.thread(
            process.tids[1], "emulator", "0", tgid=process.pid, starttime=1, **unread
        )
        living = process.thread(0, "vcpu", vcpu=0)
        commands.state = docs.state(docs.sandbox("shop/web", "0", living, ended))
        path = Path(f"/proc/{process.pid}/task/{process.tids[0]}/schedstat")
        before = int(path.read_text().split()[1])
        (found,) = commands.json("show", "shop/web")["sandboxes"]
        after = int(path.read_text().split()[1])
    shown, gone = found["threads"]
    assert round(before / 1e9, 3) <= shown["run_delay_s"] <= round(after / 1e9, 3)
    assert shown["preemptions"] is not None
    assert shown["migrations"] is not None
    assert {name: gone[name] for name in unread} == unread


def test_nothing_is_0_where_nothing_can_be_read(commands: Commands, tmp_path: Path) -> None:
    """A node whose /proc shows no such files."""
    unread = {"run_delay_s": None, "preemptions": None, "migrations": None}
    commands.state = docs.state(
        docs.sandbox("shop/web", "0", docs.thread(7, "vcpu", "0", **unread))
    )
    commands.host = tmp_path / "nothing"
    (found,) = commands.json("show", "shop/web")["sandboxes"]
    (shown,) = found["threads"]
    assert {name: shown[name] for name in unread} == unread
