"""What documents say of sandboxes between passes: kept where nothing changed, fresh where asked."""

from __future__ import annotations

import asyncio
import os
import threading
import time

import msgspec
import pytest
from msgspec.structs import replace

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.documents.document import Daemon
from kata_pin.base.documents.state import State
from kata_pin.base.errors import RemoteProtocolError
from kata_pin.base.placement import Report
from kata_pin.base.sandbox import Thread
from kata_pin.base.steps import STEP, finish
from kata_pin.base.threads import ThreadKey
from kata_pin.base.values import Mode
from kata_pin.engine.counters import SLICE_S
from kata_pin.linux.files import HOST
from kata_pin.linux.tasks import moved_since, starttime, with_usage
from kata_pin.service.documents import (
    ROWS,
    Memo,
    _elsewhere,
    _parts,
    conflict_notes,
    in_slices,
    state_report,
)
from kata_pin.service.protocol import decode, encode, encode_items, with_items
from kata_pin.service.sandbox_document import thread_reports
from tests.support import world
from tests.support.at_once import place
from tests.unit.cli import documents as docs


def _this_thread() -> Thread:
    pid, tid = os.getpid(), threading.get_native_id()
    (thread,) = world.vcpus(0)
    key = ThreadKey(pid, tid, starttime(HOST, pid, tid))
    return thread._replace(task=replace(thread.task, key=key, last_cpu=-1, cpu_ticks=0))


def test_cpu_time_and_last_cpu_are_read_when_one_sandbox_is_asked_for() -> None:
    """A report of an earlier pass gets both as of now; a reused tid keeps those of the report."""
    thread = _this_thread()
    deadline = time.process_time() + 0.03
    while time.process_time() < deadline:
        pass
    (now,) = with_usage(HOST, Report("s", (thread,))).threads
    assert now.task.cpu_ticks > 0
    assert now.task.last_cpu in os.sched_getaffinity(0)
    key = thread.key._replace(starttime=1)
    reused = thread._replace(task=replace(thread.task, key=key))
    assert with_usage(HOST, Report("s", (reused,))).threads == (reused,)


def test_a_thread_that_was_moved_is_seen_where_it_is() -> None:
    """Between passes affinities are asked for again; a reused tid, or one gone, tells nothing."""
    thread = _this_thread()
    here = CpuSet(os.sched_getaffinity(0))
    task = thread.task
    moved = thread._replace(task=task.moved(CpuSet([8191]), task.cpuset, task.cgroup))
    same = thread._replace(task=task.moved(here, task.cpuset, task.cgroup))
    reused = moved._replace(task=replace(moved.task, key=moved.key._replace(starttime=1)))
    gone = moved._replace(task=replace(moved.task, key=moved.key._replace(tid=4_194_305)))
    assert finish(moved_since(HOST, [moved, same, reused, gone])) == {thread.key: here}
    assert finish(moved_since(HOST, [same])) == {}
    (shown,) = _elsewhere(Report("s", (moved,)), {thread.key: here}).threads
    assert shown.task.affinity == here


def test_others_run_while_affinities_are_read() -> None:
    """A VMM with thousands of threads is read in steps."""
    steps = moved_since(HOST, [_this_thread()] * (3 * STEP))
    assert sum(1 for _ in steps) == 3


def test_a_value_is_made_again_only_when_its_origin_changed() -> None:
    """An equal origin keeps the value; what has ended is dropped."""
    memo = Memo[object]()
    first = memo.keep("s", ((1, 2), "a"), object())
    assert memo.made("s", ((1, 2), "a")) is first
    assert memo.made("s", ((1, 3), "a")) is None
    memo.keep("t", (), object())
    memo.keep_only(["t"])
    with pytest.raises(KeyError):
        memo.value("s")


async def test_other_tasks_run_while_a_document_is_made() -> None:
    """A document of many sandboxes gives way to the event loop again and again."""
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def slow() -> object:
        time.sleep(SLICE_S)
        return encode(docs.database())

    task = asyncio.create_task(other())
    base = state_report(node=world.node(), mode=Mode.ACT, daemon=Daemon(running=True))
    data = await in_slices(base, (encode(docs.database()) for _ in range(10) if slow()))
    task.cancel()
    assert turns >= 10
    assert len(decode(data, State).sandboxes) == 10


def test_encoded_rows_are_put_where_they_belong() -> None:
    """Texts that look like the empty list do not mislead."""
    evil = '"threads":[]'
    whole = docs.sandbox(evil, "4", docs.thread(1, "vcpu", "4", vcpu=0), handler=evil)
    empty = replace(whole, threads=())
    rows = [encode_items(whole.threads)]
    assert msgspec.json.decode(with_items(encode(empty), "threads", rows)) == msgspec.json.decode(
        encode(whole)
    )


def test_undecodable_bytes_of_a_path_are_escaped() -> None:
    """An executable's name that is not UTF-8 does not keep the document from being made."""
    state = docs.state(docs.sandbox("a/b", "4", vmm=docs.vmm(exe="/opt/\udcff")))
    (found,) = decode(encode(state), State).sandboxes
    assert found.vmm is not None
    assert found.vmm.exe == "/opt/\\udcff"


@pytest.mark.parametrize("data", [b"", b"[]", b'{"version":2}', b'{"version":2,"kind":1}', b"\xff"])
def test_what_is_no_document(data: bytes) -> None:
    """Garbage is a protocol error with advice."""
    with pytest.raises(RemoteProtocolError, match="daemon's document") as caught:
        decode(data, State)
    assert "upgrade" in caught.value.hint


def test_a_note_about_a_conflict_names_few_sandboxes() -> None:
    """Of many claimants three are named."""
    container = world.exclusive("x", "4")
    sandbox, threads = world.sandbox(container), world.vcpus(0)
    decided = place(sandbox, threads, world.node())
    notes = conflict_notes({f"s{n}": decided for n in range(9)}, lambda one: f"pod/{one}")
    (note,) = notes["s0"]
    assert note.text == "exclusive pCPU 4 is also claimed by pod/s1, pod/s2, pod/s3 and 5 more"


def test_a_sandbox_with_thousands_of_threads_is_made_in_parts() -> None:
    """Its rows are the same as at once; between parts others run."""
    threads = world.vcpus(*range(3 * ROWS + 1))
    whole = Report("s", tuple(threads), duration_ns=5)
    parts = list(_parts(whole))
    assert [len(part.threads) for part in parts] == [ROWS, ROWS, ROWS, 1]
    at_once = encode_items(thread_reports(whole, released=False))
    joined = b",".join(encode_items(thread_reports(part, released=False)) for part in parts)
    assert joined == at_once
    assert list(_parts(None)) == list(_parts(Report("s"))) == []
