"""`kata-pin pools`, `alloc` and `policy`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import click
from msgspec.structs import replace

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.documents.answers import PolicyDocument
from kata_pin.base.documents.pools import Allocation, AllocExplainDocument, Grant, PoolsDocument
from kata_pin.base.documents.state import State
from kata_pin.base.errors import KataPinError, ParseError, StateError
from kata_pin.base.placement import KubeletState
from kata_pin.base.values import CpuClass
from kata_pin.cli.options import CommandGroup, complete_sandbox, cpu_list, global_options
from kata_pin.cli.render import screen
from kata_pin.cli.reports import words
from kata_pin.cli.reports.words import safe
from kata_pin.cli.session import Session

if TYPE_CHECKING:
    from kata_pin.base.allocation import AttachedDevice
    from kata_pin.base.config.alloc import Alloc
    from kata_pin.options.allocation.orders import Orders, OrdersFile
    from kata_pin.options.allocation.policy import Policy


# `kata-pin pools` and `kata-pin alloc`: what the allocator did or would do. Read-only.
#
# Only the kubelet writes its checkpoint. `what-if` and `compare` ask a policy in this process,
# about this node as the state document shows it, or about a captured host without containers.

SHOWN: Final = 5
"""Containers named in an error."""

MAX_CPUS: Final = 8192

_TOPOLOGY = click.option("--topology", metavar="FILE", type=click.Path(),
                         help="Topology of another host: a folder with its sys, or output of "
                         "scripts/capture-host.")  # fmt: skip


@click.group(cls=CommandGroup)
def alloc() -> None:
    """Inspect what the allocator did or would do."""


@click.command()
@global_options
@click.pass_obj
def pools(session: Session) -> None:
    """Show the allocator's pools of pCPUs and their owners.

    Reserved, housekeeping, shared and exclusive pCPUs per NUMA node, then the pCPUs of every
    container, cpusets that were not sent yet, and refused requests. For nodes on which kata-pin
    allocates CPUs (setting alloc.policy).
    """
    state = session.connect().state()
    if session.json:
        screen.document(pools_document(state))
        return
    from kata_pin.options.allocation import render as render_pools

    screen.show(render_pools.pools(state, screen.output()))


def pools_document(state: State) -> PoolsDocument:
    """Return the `pools` document: what the state document says of allocation."""
    return PoolsDocument(time=state.time, daemon=state.daemon, allocation=state.allocation)


@alloc.command()
@click.argument("container")
@global_options
@click.pass_obj
def explain(session: Session, container: str) -> None:
    """Explain why a container has its CPUs.

    Shows the rule or override that decided, its pCPUs, and the cpuset sent to the runtime.
    CONTAINER is an id or its start, a name, or namespace/pod/name; `vm:` and a sandbox id for a VM.
    """
    grant = choose_grant(session.connect().state(), container)
    screen.report(
        AllocExplainDocument(grant=grant), json=session.json, by="options.allocation.render:explain"
    )


def choose_grant(state: State, text: str) -> Grant:
    """Return the one grant that `text` names; raises KataPinError when there is none or several."""
    allocation = state.allocation
    if allocation is None:
        raise KataPinError(
            "CPU allocation is off (alloc.policy: none)",
            hint="kata-pin explain SANDBOX explains affinities",
        )
    if allocation.suspended:
        raise KataPinError(f"CPU allocation is suspended: {allocation.suspended}")
    every = allocation.grants
    for matches in (
        [one for one in every if text in {one.id, f"{one.pod}/{one.name}"}],
        [one for one in every if one.name == text],
        [one for one in every if text and one.id.startswith(text)],
    ):
        if len(matches) == 1:
            return matches[0]
        if matches:
            named = ", ".join(f"{safe(one.pod)} ({one.id[:12]})" for one in matches[:SHOWN])
            raise KataPinError(
                f"{safe(text)!r} matches {len(matches)} containers: {named}",
                hint="give more of the id, or namespace/pod/name",
            )
    for holder in allocation.holders:
        if text in {holder.id, holder.name, f"{holder.pod}/{holder.name}"}:
            raise KataPinError(
                f"kata-pin gave {safe(text)!r} no CPUs: its pCPUs {holder.cpus} are exclusive by "
                f"{words.holder_source(holder)} ({safe(holder.reason)})",
                hint="kata-pin pools lists all containers with such pCPUs",
            )
    raise KataPinError(f"no container {safe(text)!r}", hint="kata-pin pools lists them")


@alloc.command()
@global_options
@click.pass_obj
def export(session: Session) -> None:
    """Print the grants as a kubelet checkpoint.

    In the format of cpu_manager_state, version 2, with its checksum, for tools that read it. The
    format cannot represent CPUs chosen by `share` containers.
    """
    from kata_pin.options.allocation.supposed import as_kubelet, state_of
    from kata_pin.peers.kubelet.checkpoint import dump_checkpoint

    allocation = _deciding(session)
    if allocation is None:
        raise KataPinError("CPU allocation is off or suspended", hint="kata-pin pools shows why")
    sys.stdout.write(dump_checkpoint(as_kubelet(state_of(allocation))).decode() + "\n")


@alloc.command()
@click.argument("checkpoint", required=False, type=click.Path(), metavar="[FILE]")
@click.option("--policy", metavar="NAME", help="Compare with what this policy would give if "
              "it took over from the kubelet.  [default: alloc.policy, else static]")  # fmt: skip
@_TOPOLOGY
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
    from kata_pin.options.allocation.supposed import as_kubelet, comparison, state_of, taken_over

    path = checkpoint or session.config.paths.kubelet_state
    kubelet = _read(path, own=checkpoint is None)
    allocation = None if policy or topology else _deciding(session)
    if allocation is not None:
        name, ours = allocation.policy, as_kubelet(state_of(allocation))
    else:
        settings = session.config.alloc
        name = policy or (settings.policy if settings.on else "static")
        ours = taken_over(kubelet, _policy(replace(settings, policy=name), topology))
    told = comparison(kubelet, ours, source=path, policy=name, hypothetical=allocation is None)
    screen.report(told, json=session.json, by="options.allocation.render:compare")


def _policy(settings: Alloc, topology: str | None) -> Policy:
    """Return the policy of these settings, for this node or for a captured host."""
    from kata_pin.linux.files import HOST
    from kata_pin.linux.topology import read_capture, read_topology
    from kata_pin.options.allocation.checked_policy import make_policy

    return make_policy(settings, read_capture(topology) if topology else read_topology(HOST))


def _device(address: str, topology: str | None) -> AttachedDevice:
    """Return a PCI device of this node, or of a captured host that is a folder."""
    from os.path import isdir

    from kata_pin.linux.devices import pci_device
    from kata_pin.linux.files import HOST, HostRoot

    if topology and not isdir(topology):
        raise KataPinError(f"{topology} lists no devices", hint="--near needs a folder with sys")
    try:
        device = pci_device(HostRoot(topology) if topology else HOST, address)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--near") from None
    if device is None:
        raise KataPinError(f"no PCI device {address}", hint="lspci -D lists them")
    return device


def _deciding(session: Session) -> Allocation | None:
    """Return the allocator's report, None if it is off or suspended."""
    allocation = session.connect().state().allocation
    return None if allocation is None or allocation.suspended else allocation


def _read(path: str, *, own: bool) -> KubeletState:
    """Return a checkpoint: the node's own, or a copy of any owner that the caller names."""
    from kata_pin.linux.files import read_bytes
    from kata_pin.peers.kubelet.checkpoint import MAX_BYTES, parse_checkpoint, read_kubelet

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


def _quantity(ctx: click.Context, param: click.Parameter, text: str) -> int:
    """Return a CPU quantity as Kubernetes writes it in thousandths of a CPU, rounded up."""
    from decimal import Decimal, InvalidOperation

    try:
        exact = Decimal(text[:-1]) if text.endswith("m") else Decimal(text) * 1000
        millis = int(exact.to_integral_value("ROUND_CEILING"))
    except (InvalidOperation, OverflowError, ValueError):
        raise click.BadParameter(
            f"{text!r} is not a CPU quantity such as 4, 0.5 or 500m", ctx, param
        ) from None
    if not 0 <= millis <= MAX_CPUS * 1000:
        raise click.BadParameter(f"{text!r} is not within 0 to {MAX_CPUS}", ctx, param)
    return millis


@alloc.command("what-if")
@click.option("--cpus", "millis", callback=_quantity, required=True, metavar="N",
              help="CPU request and limit of the container, such as 4, 0.5 or 500m.")  # fmt: skip
@click.option("--policy", metavar="NAME", help="static, annotation, topology or an installed "
              "policy.  [default: alloc.policy]")  # fmt: skip
@click.option("--class", "cpu_class", type=click.Choice([one.value for one in CpuClass]),
              help="Override the class, as `policy set` does.")  # fmt: skip
@click.option("--pod", default="", metavar="NAMESPACE/NAME",
              help="Add it to an existing pod on this node.")  # fmt: skip
@click.option(
    "--kata/--no-kata", default=True, help="Treat the container as a Kata (VM) container (default)."
)
@_TOPOLOGY
@click.option("--taken", callback=cpu_list, default="", metavar="CPUS",
              help="pCPUs that are exclusive to other containers.")  # fmt: skip
@click.option("--near", multiple=True, metavar="PCI-ADDRESS",
              help="PCI device that the container would have, such as 0000:3b:00.1. "
              "Repeatable.")  # fmt: skip
@global_options
@click.pass_obj
def what_if(
    session: Session,
    *,
    millis: int,
    policy: str | None,
    cpu_class: str | None,
    pod: str,
    kata: bool,
    topology: str | None,
    taken: CpuSet,
    near: tuple[str, ...],
) -> None:
    """Show what a policy would give a container, and why.

    Prints its pCPUs, the effect on other containers, and the candidates in order of comparison with
    their sort keys. Nothing is changed. Uses the settings of section alloc; pCPUs that
    others gave exclusively, such as the kubelet's static policy, count as taken. The pod has no
    annotation: with the policy annotation its class is none unless --class says otherwise.
    """
    from kata_pin.options.allocation.supposed import Question, answer, occupied

    settings = session.config.alloc
    if policy is not None:
        settings = replace(settings, policy=policy)
    if not settings.on:
        raise KataPinError("no policy given", hint="use --policy static, annotation or topology")
    document = None if topology else session.connect().state()
    chosen = _policy(settings, topology)
    wanted = CpuClass(cpu_class) if cpu_class else None
    state = occupied(chosen, document, taken)
    devices = tuple(_device(one, topology) for one in near)
    told = answer(chosen, state, Question(millis, wanted, kata, pod, devices))
    if kata and not pod and not topology:
        from kata_pin.cli.doctor.sandboxes import of_limit

        notes = (*told.notes, *of_limit(session.config, document, millis))
        told = replace(told, notes=notes)
    screen.report(told, json=session.json, by="options.allocation.render:what_if")


# `kata-pin policy`: override the CPU class of single pods.
#
# Overrides are stored in a file; the daemon watches it and changes running containers at once.

CLASSES = ("none", "share", "exclusive")


@click.group(cls=CommandGroup)
def policy() -> None:
    """Override the CPU class of a pod (takes precedence over annotations).

    none: the CPUs of the shared pool. share: CPUs chosen for the pod, which others may use too.
    exclusive: CPUs that no other container may use. For the policies annotation and topology
    (setting alloc.policy). Overrides are stored in `alloc.orders` and also apply to future pods.
    """


@policy.command("set")
@click.argument("pod", shell_complete=complete_sandbox)
@click.argument("cpus", metavar="CLASS", type=click.Choice(CLASSES))
@global_options
@click.pass_obj
def set_(session: Session, pod: str, cpus: str) -> None:
    """Set the CPU class of a pod; a running pod is changed without a restart.

    POD is namespace/name or, for a running pod, its name or the start of its sandbox id.
    """
    key = _key(session, pod)
    orders = _file(session).change(lambda known: known.update({key: CpuClass(cpus)}))
    _report(session, orders, f"{key}: {cpus}")
    _warn(session)


@policy.command()
@click.argument("pod", shell_complete=complete_sandbox)
@global_options
@click.pass_obj
def unset(session: Session, pod: str) -> None:
    """Remove the override of a pod: its annotation decides again."""
    file = _file(session)
    key = pod if pod in file.read() else _key(session, pod)
    if key not in file.read():
        raise KataPinError(f"no override for {key}", hint="kata-pin policy get lists overrides")
    orders = file.change(lambda known: known.pop(key, None))
    _report(session, orders, f"{key}: override removed")


@policy.command()
@global_options
@click.pass_obj
def get(session: Session) -> None:
    """List all overrides."""
    orders = _file(session).read()
    lines = [f"{pod}: {orders[pod].value}" for pod in sorted(orders)]
    _report(session, orders, "\n".join(lines) or "no overrides")


def _file(session: Session) -> OrdersFile:
    from kata_pin.options.allocation.orders import OrdersFile

    return OrdersFile(session.config.alloc.orders)


def _key(session: Session, pod: str) -> str:
    """Return the key of a pod's override: its full name, or its sandbox id without one.

    A full name is used as given: the pod may not exist yet, or belong to another runtime.
    """
    from kata_pin.cli.reports.words import choose
    from kata_pin.options.allocation.orders import is_pod

    if "/" in pod:
        if not is_pod(pod):
            raise KataPinError(f"{pod!r} is not namespace/name")
        return pod
    chosen = choose(session.connect().names(), pod)
    return chosen.pod if is_pod(chosen.pod) else chosen.id


def _report(session: Session, orders: Orders, text: str) -> None:
    if session.json:
        named = {pod: orders[pod].value for pod in sorted(orders)}
        screen.document(PolicyDocument(overrides=named))
    else:
        click.echo(text)


def _warn(session: Session) -> None:
    """Warn if overrides have no effect."""
    chosen = session.config.alloc.policy
    if chosen in {"none", "static"}:
        text = f"the override has no effect while alloc.policy is {chosen}"
        click.echo(f"kata-pin: {text}", err=True)
