"""`kata-pin alloc what-if`: what a policy would give a container, and what it compared.

Read-only: the policy is asked in this process, about this node as the state document shows it or
about a captured host without containers. Out of scope: what it did give (`alloc explain`).
"""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal, InvalidOperation
from typing import Final

import click

from kata_pin.cli.options import Session, global_options
from kata_pin.cli.render import screen
from kata_pin.errors import KataPinError
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.settings import CpuClass

MAX_CPUS: Final = 8192


def _quantity(ctx: click.Context, param: click.Parameter, text: str) -> int:
    """Return a CPU quantity as Kubernetes writes it in thousandths of a CPU, rounded up."""
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


def _cpu_list(ctx: click.Context, param: click.Parameter, text: str) -> CpuSet:
    try:
        return CpuSet.parse(text)
    except KataPinError as error:
        raise click.BadParameter(error.message, ctx, param) from error


@click.command("what-if")
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
@click.option("--topology", metavar="FILE", type=click.Path(), help="Topology of another host: a "
              "folder with its sys, or output of scripts/capture-host.")  # fmt: skip
@click.option("--taken", callback=_cpu_list, default="", metavar="CPUS",
              help="pCPUs that are exclusive to other containers.")  # fmt: skip
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
) -> None:
    """Show what a policy would give a container, and why.

    Prints its pCPUs, the effect on other containers, and the candidates in order of comparison with
    their sort keys. Nothing is changed. Uses the settings of section alloc; pCPUs that the
    kubelet's static policy assigned count as taken.
    """
    from kata_pin.cli.reports.whatif import Question, answer, occupied
    from kata_pin.daemon.allocation.policies import make_policy
    from kata_pin.host.capture import read_capture
    from kata_pin.host.root import HOST
    from kata_pin.host.topology import read_topology

    settings = session.config.alloc
    if policy is not None:
        settings = replace(settings, policy=policy)
    if not settings.on:
        raise KataPinError("no policy given", hint="use --policy static, annotation or topology")
    document = None if topology else session.provider.state()
    host = read_capture(topology) if topology else read_topology(HOST)
    chosen = make_policy(settings, host)
    wanted = CpuClass(cpu_class) if cpu_class else None
    if wanted is None and settings.policy == "annotation":
        wanted = CpuClass.EXCLUSIVE
    state = occupied(chosen, document, taken)
    told = answer(chosen, state, Question(millis, wanted, kata, pod))
    screen.report(told, json=session.json, by="whatif:what_if")
