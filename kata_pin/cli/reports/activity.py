"""What one sandbox's threads have been through (run delay, preemptions, migrations) and use.

Read by the command line where one sandbox is looked at, from files that anybody may read.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

from kata_pin.host.measure.resctrl import cache_use
from kata_pin.host.measure.tasks import TaskSampler
from kata_pin.host.root import HOST, HostRoot
from kata_pin.model.reports.sandbox import Cache, Thread
from kata_pin.model.reports.state import State
from kata_pin.model.thread import ThreadKey


def with_activity(state: State, root: HostRoot = HOST) -> State:
    """Return the state with these figures of the threads of its only sandbox."""
    (sandbox,) = state.sandboxes
    keys = {one.tid: ThreadKey(one.tgid, one.tid, one.starttime) for one in sandbox.threads}
    with closing(TaskSampler(root, room=0)) as sampler:
        found = sampler.sample(keys.values(), set(keys.values()))

    def filled(thread: Thread) -> Thread:
        sample = found.get(keys[thread.tid])
        if sample is None:
            return thread
        moves = sample.moves
        return replace(
            thread,
            run_delay_s=round(sample.run.waited_ns / 1e9, 3),
            preemptions=moves.preemptions if moves else None,
            migrations=moves.migrations if moves else None,
        )

    threads = tuple(map(filled, sandbox.threads))
    cache = _used(sandbox.cache, root) if sandbox.cache else None
    return replace(state, sandboxes=(replace(sandbox, threads=threads, cache=cache),))


def _used(cache: Cache, root: HostRoot) -> Cache:
    """Return what is known of a sandbox's caches with what it uses."""
    use = cache_use(root, cache.group) if cache.group else None
    if use is None:
        return cache
    return replace(
        cache,
        occupancy_bytes=use.occupancy,
        total_bytes=use.total,
        local_bytes=use.local,
    )
