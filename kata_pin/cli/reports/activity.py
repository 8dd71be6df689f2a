"""What one sandbox's threads have been through.

The interfaces of its VMM with their vhost workers are read here too.
"""

from __future__ import annotations

from contextlib import closing
from errno import EACCES, EPERM

from msgspec.structs import replace

from kata_pin.base.documents.state import Cache, Network, Sandbox, State, Thread
from kata_pin.base.errors import HostError, TaskGone
from kata_pin.base.threads import ThreadKey
from kata_pin.linux.descriptors import read_descriptors
from kata_pin.linux.files import HOST
from kata_pin.linux.task_counters import TaskSampler

# Read by the command line where one sandbox is looked at, from files that anybody may read.


def with_activity(state: State) -> State:
    """Return the state with these figures of the threads of its only sandbox."""
    (sandbox,) = state.sandboxes
    keys = {one.tid: ThreadKey(one.tgid, one.tid, one.starttime) for one in sandbox.threads}
    with closing(TaskSampler(HOST, room=0)) as sampler:
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
    cache = _used(sandbox.cache) if sandbox.cache else None
    return replace(state, sandboxes=(replace(sandbox, threads=threads, cache=cache),))


def _used(cache: Cache) -> Cache:
    """Return what is known of a sandbox's caches with what it uses."""
    if not cache.group:
        return cache
    from kata_pin.linux.resctrl import cache_use  # only the option makes groups

    use = cache_use(HOST, cache.group)
    if use is None:
        return cache
    return replace(
        cache,
        occupancy_bytes=use.occupancy,
        total_bytes=use.total,
        local_bytes=use.local,
    )


# Read by the command line where one sandbox is looked at, so that the daemon neither grows by
# pyroute2 nor waits for netlink.


def with_network(state: State) -> State:
    """Return the state with the network of its only sandbox."""
    (sandbox,) = state.sandboxes
    return replace(state, sandboxes=(replace(sandbox, network=read_network(sandbox)),))


def read_network(sandbox: Sandbox) -> Network | None:
    """Return the interfaces of a sandbox's VMM; None if it has neither a tap nor a vhost worker.

    Only a VMM that has one is worth 0.1 s of CPU time, which the import of pyroute2 takes.
    """
    vmm = sandbox.vmm
    if vmm is None:
        return None

    workers = any(thread.role == "vhost" for thread in sandbox.threads)
    try:
        if not workers and not read_descriptors(HOST, vmm.pid).queues:
            return None
        from kata_pin.base.sandbox import ProcessKey
        from kata_pin.linux.network import interfaces
        from kata_pin.linux.process import is_alive

        found = interfaces(HOST, vmm.pid)
    except TaskGone:
        return Network(problem=f"VMM process {vmm.pid} has exited")
    except HostError as error:
        denied = "run as root" if error.errno in {EACCES, EPERM} else ""
        hint = error.hint or denied
        return Network(problem=f"cannot {error.message}" + (f"; {hint}" if hint else ""))
    if not is_alive(HOST, ProcessKey(vmm.pid, vmm.starttime)):  # another process by now
        return Network(problem=f"VMM process {vmm.pid} has exited")
    return Network(found)
