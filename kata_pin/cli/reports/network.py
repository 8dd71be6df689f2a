"""The network side of one sandbox: the interfaces of its VMM and their vhost workers.

Read by the command line where one sandbox is looked at, so that the daemon neither grows by
pyroute2 nor waits for netlink.
"""

from __future__ import annotations

from dataclasses import replace
from errno import EACCES, EPERM

from kata_pin.errors import HostError, TaskGone
from kata_pin.host.process import is_alive
from kata_pin.host.root import HOST
from kata_pin.model.reports.network import Network
from kata_pin.model.reports.sandbox import Sandbox
from kata_pin.model.reports.state import State
from kata_pin.model.thread import ProcessKey


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
    from kata_pin.host.netns import interfaces, read_descriptors

    workers = any(thread.role == "vhost" for thread in sandbox.threads)
    try:
        if not workers and not read_descriptors(HOST, vmm.pid).queues:
            return None
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
