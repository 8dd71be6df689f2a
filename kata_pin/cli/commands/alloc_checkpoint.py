"""`kata-pin alloc export` and `compare`: grants in the kubelet's format, and a comparison with it.

Read-only: only the kubelet writes its checkpoint.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import click

from kata_pin.cli.options import Session, global_options
from kata_pin.cli.render import screen
from kata_pin.errors import KataPinError, StateError
from kata_pin.model.node import KubeletState
from kata_pin.model.reports.pools import Allocation


@click.command()
@global_options
@click.pass_obj
def export(session: Session) -> None:
    """Print the grants as a kubelet checkpoint.

    In the format of cpu_manager_state, version 2, with its checksum, for tools that read it. The
    format cannot represent CPUs chosen by `share` containers.
    """
    from kata_pin.cli.reports.whatif import state_of
    from kata_pin.policy.alloc.kubelet_convert import as_kubelet
    from kata_pin.wire.kube.checkpoint import dump_checkpoint

    allocation = _deciding(session)
    if allocation is None:
        raise KataPinError("CPU allocation is off or suspended", hint="kata-pin pools shows why")
    sys.stdout.write(dump_checkpoint(as_kubelet(state_of(allocation))).decode() + "\n")


@click.command()
@click.argument("checkpoint", required=False, type=click.Path(), metavar="[FILE]")
@click.option("--policy", metavar="NAME", help="Compare with what this policy would give if "
              "it took over from the kubelet.  [default: alloc.policy, else static]")  # fmt: skip
@click.option("--topology", metavar="FILE", type=click.Path(), help="Topology of another host: a "
              "folder with its sys, or output of scripts/capture-host.")  # fmt: skip
@global_options
@click.pass_obj
def compare(
    session: Session, *, checkpoint: str | None, policy: str | None, topology: str | None
) -> None:
    """Compare a kubelet checkpoint with kata-pin's grants.

    FILE defaults to this node's cpu_manager_state. If kata-pin does not allocate CPUs here, or with
    --policy, shows which containers would keep their pCPUs if that policy took over from the
    kubelet. Nothing is changed.
    """
    from kata_pin.cli.reports.comparison import comparison, taken_over
    from kata_pin.cli.reports.whatif import state_of
    from kata_pin.daemon.allocation.policies import make_policy
    from kata_pin.host.capture import read_capture
    from kata_pin.host.root import HOST
    from kata_pin.host.topology import read_topology
    from kata_pin.policy.alloc.kubelet_convert import as_kubelet

    path = checkpoint or session.config.paths.kubelet_state
    kubelet = _read(path, own=checkpoint is None)
    allocation = None if policy or topology else _deciding(session)
    if allocation is not None:
        name, ours = allocation.policy, as_kubelet(state_of(allocation))
    else:
        settings = session.config.alloc
        name = policy or (settings.policy if settings.on else "static")
        host = read_capture(topology) if topology else read_topology(HOST)
        ours = taken_over(kubelet, make_policy(replace(settings, policy=name), host))
    told = comparison(kubelet, ours, source=path, policy=name, hypothetical=allocation is None)
    screen.report(told, json=session.json, by="compare:compare")


def _deciding(session: Session) -> Allocation | None:
    """Return the allocator's report, None if it is off or suspended."""
    allocation = session.provider.state().allocation
    return None if allocation is None or allocation.suspended else allocation


def _read(path: str, *, own: bool) -> KubeletState:
    """Return a checkpoint: the node's own, or a copy that the caller names, whoever owns it."""
    from kata_pin.errors import ParseError
    from kata_pin.host.files import read_bytes
    from kata_pin.sources.kubelet import read_kubelet
    from kata_pin.wire.kube.checkpoint import MAX_BYTES, parse_checkpoint

    if own:
        found = read_kubelet(path)
        if found is None:
            raise StateError(f"{path}: no such file", hint="give the path of a checkpoint")
        return found
    try:
        return parse_checkpoint(read_bytes(path, MAX_BYTES + 1))
    except OSError as error:
        raise StateError(f"{path}: {error.strerror}") from error
    except ParseError as error:
        raise StateError(f"{path}: {error}") from error
