"""Who is connected to a unix socket, by the kernel's tables."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kata_pin.follow.hooks import is_held

HEAD = "Num       RefCount Protocol Flags    Type St Inode Path\n"
PATH = "/run/vc/vm/s1/qmp.sock"


def table(proc: Path, *rows: tuple[str, str], pid: int = 0) -> None:
    """Write the table of a network namespace: a state and a path per row."""
    folder = proc / str(pid) / "net" if pid else proc / "net"
    folder.mkdir(parents=True)
    lines = (f"00000000: 00000003 00000000 00000000 0001 {st} 41 {path}\n" for st, path in rows)
    (folder / "unix").write_text(HEAD + "".join(lines))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param([("01", PATH)], False, id="only the listener"),
        pytest.param([("01", PATH), ("03", PATH)], True, id="connected"),
        pytest.param([("02", PATH), ("01", PATH)], True, id="waits in the backlog"),
        pytest.param([("01", PATH), ("03", f"/elsewhere{PATH}")], False, id="a longer path"),
        pytest.param([("01", PATH), ("03", f"{PATH}.2")], False, id="a path that goes on"),
        pytest.param([], False, id="nobody"),
    ],
)
def test_a_client_holds_it(tmp_path: Path, rows: list[tuple[str, str]], *, expected: bool) -> None:
    """Each line of the path counts, also behind the listener's, and no other path's."""
    table(tmp_path, *rows)
    assert is_held(PATH, proc=str(tmp_path)) is expected


def test_both_namespaces_count(tmp_path: Path) -> None:
    """The VMM's table counts as ours does; one that is gone, or is ours, does no harm."""
    table(tmp_path, ("01", "/run/other"))
    table(tmp_path, ("03", PATH), pid=7)
    (tmp_path / "8" / "net").mkdir(parents=True)
    os.link(tmp_path / "net" / "unix", tmp_path / "8" / "net" / "unix")
    held = {pid: is_held(PATH, pid=pid, proc=str(tmp_path)) for pid in (0, 7, 8, 9)}
    assert held == {0: False, 7: True, 8: False, 9: False}
