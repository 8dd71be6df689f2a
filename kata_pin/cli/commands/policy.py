"""`kata-pin policy`: the administrator's orders, for nodes without Kubernetes and for now.

The orders are a file; the daemon follows it and changes running containers at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kata_pin.cli.options import Session, complete_sandbox, global_options
from kata_pin.cli.render import screen
from kata_pin.model.reports.settings import PolicyDocument

if TYPE_CHECKING:
    from kata_pin.sources.orders import Orders, OrdersFile

CLASSES = ("none", "share", "exclusive")


@click.group()
def policy() -> None:
    """Order how single pods have their CPUs; wins over annotations.

    none: the CPUs of the shared pool. share: CPUs of its own choice, on which others may run too.
    exclusive: CPUs that are nobody else's. For the policies annotation and topology (setting
    alloc.policy). Orders stand in the file of the setting alloc.orders, also for pods to come.
    """


@policy.command("set")
@click.argument("pod", shell_complete=complete_sandbox)
@click.argument("cpus", metavar="CLASS", type=click.Choice(CLASSES))
@global_options
@click.pass_obj
def set_(session: Session, pod: str, cpus: str) -> None:
    """Order a class for a pod; a pod that runs is changed without being made anew.

    POD is namespace/name, or for a pod that runs its name or the start of its sandbox id.
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
    """Take an order back: the pod's annotation decides again."""
    from kata_pin.errors import KataPinError

    file = _file(session)
    key = pod if pod in file.read() else _key(session, pod)
    if key not in file.read():
        raise KataPinError(f"nothing is ordered for {key}", hint="kata-pin policy get lists orders")
    orders = file.change(lambda known: known.pop(key, None))
    _report(session, orders, f"{key}: no order")


@policy.command()
@global_options
@click.pass_obj
def get(session: Session) -> None:
    """List the orders."""
    orders = _file(session).read()
    lines = [f"{pod}: {orders[pod].value}" for pod in sorted(orders)]
    _report(session, orders, "\n".join(lines) or "nothing is ordered")


def _file(session: Session) -> OrdersFile:
    from kata_pin.sources.orders import OrdersFile

    return OrdersFile(session.config.alloc.orders)


def _key(session: Session, pod: str) -> str:
    """Return what a pod is ordered by: its name, its sandbox's id where it has none.

    A full name is taken as it is: the pod may come later, and other runtimes' pods have no sandbox.
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
    """Say where an order has no effect."""
    chosen = session.config.alloc.policy
    if chosen in {"none", "static"}:
        text = f"the setting alloc.policy is {chosen}: orders have no effect under it"
        click.echo(f"kata-pin: {text}", err=True)
