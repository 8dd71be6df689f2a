"""Windows of pages: what is refused, what moves, and what each errno of the kernel comes to."""

from __future__ import annotations

import os
from errno import EACCES, ENOMEM, ESTALE

import pytest

from kata_pin.linux.files import HOST
from kata_pin.linux.tasks import starttime
from kata_pin.rights.broker import pages
from kata_pin.rights.broker.pages import PagesMoved, PageWindow, move_window
from tests.support.numa_vmm import BASE, HUGE, NumaVmm

PER_HUGE = HUGE // 4096


def window(vmm: NumaVmm, **changes: object) -> PageWindow:
    """Return the window of all pages, to node 0."""
    whole = PageWindow(7, 1, BASE, vmm.size, vmm.pages, vmm.pages, frozenset({0}), 0, vmm.shared)
    return whole._replace(**changes)  # type: ignore[arg-type]


def test_a_request_is_what_was_asked_for() -> None:
    """Bytes and back, with nodes beyond 64."""
    whole = PageWindow(7, 9, BASE, 4096, 20, 10, frozenset({0, 3, 1000}), 1000, True)
    assert pages.parse_window(pages.render_window(whole)) == whole


def own_window(**changes: object) -> PageWindow:
    """Return a window of this process, of an address that it does not have."""
    pid = os.getpid()
    whole = PageWindow(pid, starttime(HOST, pid, pid), 4096, 4096, 4, 4, frozenset({0}), 0, False)
    return whole._replace(**changes)  # type: ignore[arg-type]


def test_a_cpuset_that_forbids_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked at before any page is."""
    monkeypatch.setattr(pages, "field", lambda *_: [b"1-3"])  # this machine has one node
    with pytest.raises(OSError, match=rf"\[Errno {EACCES}\]"):
        pages.move_checked(own_window())


def test_far_pages_move_and_near_ones_stay() -> None:
    """Absent pages are passed over, the window's limit is kept, and it says how far it came."""
    vmm = NumaVmm(20, 1)
    del vmm.nodes[vmm.address(3)]
    vmm.nodes[vmm.address(4)] = 0
    done = move_window(window(vmm, most=5), vmm.call)
    assert done == PagesMoved(examined=7, moved=5)
    assert vmm.on(0) == 6
    rest = window(vmm, address=vmm.address(7), pages=13, most=13)
    assert move_window(rest, vmm.call) == PagesMoved(examined=13, moved=13)
    assert vmm.on(1) == 0
    calls = vmm.moves
    assert move_window(window(vmm), vmm.call) == PagesMoved(20)
    assert vmm.moves == calls, "nothing is called for nothing"


def test_a_node_without_memory() -> None:
    """What fitted has moved; ENOMEM is the reason for the rest."""
    vmm = NumaVmm(10, 1)
    vmm.room = {0: 4}
    assert move_window(window(vmm), vmm.call) == PagesMoved(10, 4, 6, ENOMEM)


def test_transparent_huge_pages_take_two_calls() -> None:
    """All of three huge pages move by their first small pages, none is taken for refused."""
    vmm = NumaVmm(3 * PER_HUGE, 1)
    vmm.transparent = True
    assert move_window(window(vmm), vmm.call) == PagesMoved(3 * PER_HUGE, 3 * PER_HUGE)
    assert vmm.moves == 1


@pytest.mark.parametrize("starts", [(6,), (5, 6)], ids=["before", "while they moved"])
def test_a_process_whose_number_changes_hands(
    monkeypatch: pytest.MonkeyPatch, starts: tuple[int, ...]
) -> None:
    """Pages of another process are not moved, and none that were count as the first one's."""
    each, moved = iter(starts), list[PageWindow]()

    def stat(*_: object) -> bytes:
        return f"7 (qemu) S {'0 ' * 18}{next(each)} 0".encode()

    def move(window: PageWindow) -> PagesMoved:
        moved.append(window)
        return PagesMoved(1, 1)

    monkeypatch.setattr(os, "pread", stat)
    monkeypatch.setattr(pages, "move_window", move)
    asked = PageWindow(os.getpid(), 5, BASE, 4096, 1, 1, frozenset({0}), 0, shared=False)
    with pytest.raises(OSError, match=r".") as refused:
        pages.move_checked(asked)
    assert (refused.value.errno, len(moved)) == (ESTALE, len(starts) - 1)
