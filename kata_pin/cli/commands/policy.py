"""`kata-pin policy`: override the CPU class of single pods.

Overrides are stored in a file; the daemon watches it and changes running containers at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kata_pin.cli.options import Commands, Session, complete_sandbox, global_options
from kata_pin.cli.render import screen
from kata_pin.model.reports.settings import PolicyDocument

if TYPE_CHECKING:
    from kata_pin.sources.orders import Orders, OrdersFile

CLASSES = ("none", "share", "exclusive")


@click.group(cls=Commands)
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
    from kata_pin.model.settings import CpuClass

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
    from kata_pin.errors import KataPinError

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
    from kata_pin.sources.orders import OrdersFile

    return OrdersFile(session.config.alloc.orders)


def _key(session: Session, pod: str) -> str:
    """Return the key of a pod's override: its full name, or its sandbox id without one.

    A full name is used as given: the pod may not exist yet, or belong to another runtime.
    """
    from kata_pin.cli.reports.selection import choose
    from kata_pin.errors import KataPinError
    from kata_pin.wire.orders import is_pod

    if "/" in pod:
        if not is_pod(pod):
            raise KataPinError(f"{pod!r} is not namespace/name")
        return pod
    chosen = choose(session.provider.names(), pod)
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
