"""A runtime that floods the daemon with events takes no other pod's hooks their budget."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kata_pin.peers import ttrpc
from kata_pin.peers.nri import messages as nri
from kata_pin.peers.nri.messages import EventKind
from kata_pin.peers.ttrpc import TtrpcRequest
from tests.support.daemon import Node, private_node
from tests.support.hooks import HookRun, budgets_beside
from tests.support.nriruntime import Runtime, container, pb, pod

pytestmark = [pytest.mark.qemu, pytest.mark.root]

HOOKS = 20
PER_SECOND = 10_000
"""More than the daemon can take: where that is unbounded, half of the hooks are late."""

BATCH = 100
CALM = 8
WINDOWS = 4


@pytest.fixture
def node() -> Iterator[Node]:
    with private_node() as one:
        one.configure(nri={"enabled": "yes", "socket": str(one.root / "nri.sock")})
        yield one


def _frames(node: Node) -> list[bytes]:
    """Return the events of a Kata pod, as bytes for the daemon."""
    sandbox, found = pod(node.id_of("flood")), []
    for number in range(50):
        started = container(f"c{number}", sandbox.id, cpus=str(number % 2))
        payload = pb.EventRequest(pod=sandbox, container=started).SerializeToString()
        request = TtrpcRequest(nri.PLUGIN_SERVICE, EventKind.POST_START_CONTAINER.method, payload)
        frame = ttrpc.encode_request(1001 + 2 * number, request)
        found.append(ttrpc.MUX_HEADER.pack(ttrpc.PLUGIN, len(frame)) + frame)
    return found


def _flood(end: socket.socket, frames: list[bytes], sent: list[int], over: threading.Event) -> None:
    """Send the events at their rate, as far as the daemon takes them, and read its answers.

    The last one is sent as a whole. `sent` gets how many the daemon took.
    """
    end.setblocking(False)
    began, due, left, every = time.monotonic(), 0, b"", itertools.cycle(frames)
    while not over.is_set() or left:
        if not left and due < (time.monotonic() - began) * PER_SECOND:
            left = b"".join(itertools.islice(every, BATCH))
            due += BATCH
        readable, writable, _ = select.select([end], [end] if left else [], [], 0.01)
        if writable:
            left = left[end.send(left) :]
        with contextlib.suppress(BlockingIOError):  # the runtime's own reader was faster
            if readable:
                end.recv(1 << 16)
    sent[0] = due


@pytest.mark.alone
async def test_a_flood_of_events(node: Node) -> None:
    """Every hook of another pod is recorded within its budget.

    What a busy machine loses is tried again: without a bound for the runtime's events the daemon
    loses half of the hooks each time (tests/unit/peers/nri/test_nri_share.py counts the events).
    """
    async with Runtime(node.root / "nri.sock") as runtime:
        await asyncio.to_thread(node.start)
        peer = await runtime.plugin()
        await peer.ready()
        frames = _frames(node)
        with (
            node.pod("flood") as flooded,
            socket.socket(fileno=os.dup(peer.writer.get_extra_info("socket").fileno())) as end,
        ):
            await asyncio.to_thread(flooded.announce)
            late: list[str] = []
            for window in range(WINDOWS):
                late = await asyncio.to_thread(_under_flood, node, end, frames, window)
                if not late:
                    break
            assert late == []


def _hook(node: Node, name: str, *budgets: str) -> HookRun:
    """Run a hook of another pod."""
    node.bundle(name, {"annotations": {"io.kubernetes.cri.sandbox-id": node.id_of("other")}})
    return node.hook("poststart", name, 1, *budgets)


def _under_flood(node: Node, end: socket.socket, frames: list[bytes], window: int) -> list[str]:
    """Return what hooks complained of during one flood."""
    budgets = budgets_beside([_hook(node, f"calm{window}-{number}") for number in range(CALM)])
    sent, pings, late, over = [0], list[float](), list[str](), threading.Event()
    thread = threading.Thread(target=_flood, args=(end, frames, sent, over))
    thread.start()
    try:
        for number in range(HOOKS):
            run = _hook(node, f"h{window}-{number}", *budgets)
            late += [run.stderr] if run.stderr else []
            began = time.monotonic()
            node.ask("ping")
            pings.append(time.monotonic() - began)
    finally:
        over.set()
        thread.join()
    print(f"{sent} events, {HOOKS} hooks, {len(late)} late, slowest ping {max(pings):.3f} s")
    return late
