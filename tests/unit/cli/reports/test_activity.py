"""Run delay, preemptions and migrations of real threads in `show SANDBOX`."""

from __future__ import annotations

from pathlib import Path

from kata_pin.cli.reports.activity import with_activity
from kata_pin.linux.files import HostRoot
from tests.support.played_threads import played
from tests.unit.cli import documents as docs


def test_figures_of_living_threads() -> None:
    """As the kernel has them; a thread that is gone has none."""
    with played("sleeps", "sleeps") as process:
        unread = {"run_delay_s": None, "preemptions": None, "migrations": None}
        ended = docs.thread(
            process.tids[1], "emulator", "0", tgid=process.pid, starttime=1, **unread
        )
        known = docs.state(docs.sandbox("shop/web", "0", process.thread(0, "vcpu", vcpu=0), ended))
        path = Path(f"/proc/{process.pid}/task/{process.tids[0]}/schedstat")
        before = int(path.read_text().split()[1])
        (found,) = with_activity(known).sandboxes
        after = int(path.read_text().split()[1])
    living, gone = found.threads
    assert living.run_delay_s is not None
    assert round(before / 1e9, 3) <= living.run_delay_s <= round(after / 1e9, 3)
    assert living.preemptions is not None
    assert living.migrations is not None
    assert (gone.run_delay_s, gone.preemptions, gone.migrations) == (None, None, None)


def test_nothing_is_0_where_nothing_can_be_read(tmp_path: Path) -> None:
    """A node whose /proc shows no such files."""
    unread = docs.thread(7, "vcpu", "0", run_delay_s=None, preemptions=None, migrations=None)
    state = docs.state(docs.sandbox("shop/web", "0", unread))
    (found,) = with_activity(state, HostRoot(str(tmp_path))).sandboxes
    assert found.threads == (unread,)
