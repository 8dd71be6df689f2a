"""Moving pages of a VMM to another NUMA node, one window of its address space after another.

move_pages(2) may wait long: for locks of the process, and for work of the kernel on every CPU
(mm/migrate.c, lru_cache_disable). So a child of the broker makes the call, which the daemon has
killed after a deadline (children.py). Whatever the daemon asks, the process must be one that may
be touched, the node one that exists and that its cpuset allows, and the window bounded.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from errno import EACCES, EBUSY, EFAULT, ENODEV, ENOENT, ENOMEM, ENOSYS, ESRCH, ESTALE
from typing import Final, NamedTuple

from kata_pin.rights.broker.libc import libc
from kata_pin.rights.broker.living import STAT_BYTES
from kata_pin.rights.broker.policy import field
from kata_pin.rights.broker.protocol import mask_of, numbers_in
from kata_pin.rights.broker.threads import stat_fields

MAX_PAGES: Final = 65_536
"""Most pages of one window: 256 MiB of small pages, whose call takes about 0.1 s."""

MAX_NODES: Final = 1024  # MAX_NUMNODES of the kernel (CONFIG_NODES_SHIFT is at most 10)

_HEAD: Final = struct.Struct("=IQQQIIHB")
"""Process, start time, address, size of a page, pages, most to move, node, whether shared."""

_SMALLEST: Final = 4096
_LARGEST: Final = 1 << 34  # 16 GiB, arm64
_END: Final = 1 << 56  # five-level page tables of x86; no user address is beyond
_HUGE: Final = 1 << 21
"""What a transparent huge page is aligned to; with other sizes it only takes more calls."""

_MOVE: Final = 1 << 1  # MPOL_MF_MOVE (linux/mempolicy.h)
_MOVE_ALL: Final = 1 << 2  # MPOL_MF_MOVE_ALL
_UNKNOWN: Final = -(1 << 20)  # no errno: the kernel did not come to this page
_OF_A_PAGE: Final = frozenset({ENOENT, EFAULT, ENOMEM, EBUSY})
"""Errors of a call that end it in the midst: some pages may have been moved."""

_CALLS: Final = {"x86_64": 279, "aarch64": 239, "riscv64": 239, "ppc64le": 301, "s390x": 310}
"""The number of the call by machine."""

Call = Callable[[int, Sequence[int], int | None, int], list[int]]
"""move_pages(2): process, addresses, node (None: only ask), flags; returns the statuses.

A status is the page's node or a negative errno. Raises OSError.
"""


class PageWindow(NamedTuple):
    """Pages of a process from an address on, those of them that are to be moved, and where.

    `starttime` is the process's, in clock ticks since boot. Pages on the nodes `near` stay, others
    move to `node`, at most `most` of them. `shared`: also pages that other processes map.
    """

    pid: int
    starttime: int
    address: int
    page_size: int
    pages: int
    most: int
    near: frozenset[int]
    node: int
    shared: bool


class PagesMoved(NamedTuple):
    """What became of a window.

    `examined` pages of it are done with; of those `moved` were moved and `refused` were not,
    most of them for the reason `errno`.
    """

    examined: int
    moved: int = 0
    refused: int = 0
    errno: int = 0


def render_window(window: PageWindow) -> bytes:
    """Return the request for a window."""
    near = mask_of(window.near)
    head = (window.pid, window.starttime, window.address, window.page_size, window.pages)
    return _HEAD.pack(*head, window.most, window.node, window.shared) + near


def parse_window(data: bytes) -> PageWindow:
    """Return the window of a request; raises ValueError or struct.error for none of sense."""
    pid, starttime, address, size, pages, most, node, shared = _HEAD.unpack_from(data)
    mask = data[_HEAD.size :]
    if len(mask) * 8 > MAX_NODES:
        raise ValueError("no such nodes")
    bits = int.from_bytes(mask, "little")
    near = frozenset(one for one in range(bits.bit_length()) if bits >> one & 1)
    window = PageWindow(pid, starttime, address, size, pages, most, near, node, bool(shared))
    if (
        not 0 < pid < 1 << 31
        or not 0 < most <= pages <= MAX_PAGES
        or not _SMALLEST <= size <= _LARGEST
        or size & (size - 1)
        or address % size
        or address + pages * size > _END
        or node not in near
    ):
        raise ValueError("no such window")
    return window


def move_checked(window: PageWindow) -> PagesMoved:
    """Move the pages of a window; raises OSError.

    ESRCH, ESTALE: the process has ended, or its number belongs to another. ENODEV: no such node, or
    one without memory. EACCES: the process's cpuset does not allow the node.
    """
    fd = -1
    try:
        fd = os.open(f"/proc/{window.pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        _require_start(fd, window.starttime)
        with open("/sys/devices/system/node/has_memory", encoding="ascii") as file:
            if window.node not in numbers_in(file.read(STAT_BYTES)):
                raise OSError(ENODEV, "no such node")
        (mems, *_) = field(window.pid, b"Mems_allowed_list") or [b""]
        if window.node not in numbers_in(mems.decode("ascii")):
            raise OSError(EACCES, "its cpuset does not allow the node")
        done = move_window(window)
        _require_start(fd, window.starttime)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise OSError(ESRCH, "it has ended") from error
    finally:
        if fd >= 0:
            os.close(fd)
    return done


def move_window(window: PageWindow, call: Call | None = None) -> PagesMoved:
    """Move pages of a window, and ask where they then are; raises OSError.

    A huge page moves with its first small page, so the addresses of those come first: its other
    pages are refused while it is on its way.
    """
    move = call or _move_pages
    size, pid = window.page_size, window.pid
    flags = _MOVE_ALL if window.shared else _MOVE
    addresses = [window.address + number * size for number in range(window.pages)]
    statuses = move(pid, addresses, None, 0)
    far = [at for at, status in enumerate(statuses) if status >= 0 and status not in window.near]
    chosen = far[: window.most]
    examined = chosen[-1] + 1 if len(chosen) < len(far) else window.pages
    if not chosen:
        return PagesMoved(examined)
    errnos: dict[int, int] = {}
    left = chosen
    heads = [at for at in chosen if addresses[at] % _HUGE == 0] if size < _HUGE else []
    for part in (heads, None):
        todo = left if part is None else part
        if not todo:
            continue
        failed = 0
        try:
            answers = move(pid, [addresses[at] for at in todo], window.node, flags)
            errnos |= {
                at: -one for at, one in zip(todo, answers, strict=True) if _UNKNOWN < one < 0
            }
        except OSError as error:
            if error.errno not in _OF_A_PAGE:
                raise
            failed = error.errno
        now = move(pid, [addresses[at] for at in left], None, 0)
        left = [
            at for at, one in zip(left, now, strict=True) if one >= 0 and one not in window.near
        ]
        if failed:
            errnos |= dict.fromkeys(left, failed)
            break
    reasons = Counter(errnos.get(at, EBUSY) for at in left)
    errno = max(reasons, key=lambda one: (reasons[one], one)) if reasons else 0
    return PagesMoved(examined, len(chosen) - len(left), len(left), errno)


def probe() -> None:
    """Raise OSError where this process may not move other processes' pages.

    EPERM: no CAP_SYS_NICE, or a filter of system calls. ENOSYS: a kernel that cannot move pages.
    """
    _move_pages(0, [], 0, _MOVE_ALL)


def _move_pages(pid: int, addresses: Sequence[int], node: int | None, flags: int) -> list[int]:
    """Call move_pages(2); see Call."""
    import ctypes  # noqa: PLC0415

    count = len(addresses)
    statuses = (ctypes.c_int * count)(*([_UNKNOWN] * count))
    nodes = None if node is None else (ctypes.c_int * count)(*([node] * count))
    where = (ctypes.c_void_p * count)(*addresses)
    number = _CALLS.get(os.uname().machine)
    if number is None:
        raise OSError(ENOSYS, os.strerror(ENOSYS))
    libc().call("syscall", number, pid, ctypes.c_ulong(count), where, nodes, statuses, flags)
    return list(statuses)


def _require_start(fd: int, starttime: int) -> None:
    """Raise OSError unless an open stat file is still that of the process (proc_pid_stat(5))."""
    if int(stat_fields(fd)[19]) != starttime:
        raise OSError(ESTALE, "its number belongs to another process")
