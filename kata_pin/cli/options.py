"""The options of every command: --config, --debug and --json, before or after its name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from kata_pin.cli.quick import sandbox_names
from kata_pin.cli.session import Session

if TYPE_CHECKING:
    from kata_pin.base.cpuset import CpuSet

F = TypeVar("F", bound=Callable[..., Any])


_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SPAN: Final = re.compile(r"([0-9]{1,6})([smhd])\Z")


class FiniteNumber(click.FloatRange):
    """A number within bounds, which `nan` would pass."""

    def convert(
        self, value: float, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number; raises BadParameter."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


class CommandGroup(click.Group):
    """A group that names the nearest command where one is mistyped."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command; raises UsageError with a suggestion if there is none."""
        known = self.list_commands(ctx)
        unknown = bool(args) and args[0] not in known and not args[0].startswith("-")
        completing = ctx.resilient_parsing  # a shell wants no error
        if unknown and not completing and self.get_command(ctx, args[0]) is None:
            from difflib import get_close_matches

            near = get_close_matches(args[0], known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Commands: {', '.join(known)}."
            ctx.fail(f"No such command {args[0]!r}. {hint}")
        return super().resolve_command(ctx, args)


def session_of(ctx: click.Context) -> Session:
    """Return the run's session."""
    return ctx.ensure_object(Session)


def global_options(command: F) -> F:
    """Add --config, --debug and --json to a command."""
    for option in (_JSON, _DEBUG, _CONFIG):
        command = option(command)
    return command


def _remember_config(ctx: click.Context, _: click.Parameter, value: str | None) -> None:
    if value == "":
        raise click.BadParameter("names no file")
    if value is not None:
        session_of(ctx).config_file = value


def _remember_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not session_of(ctx).debug:
        import logging

        session_of(ctx).debug = True
        logging.basicConfig(level=logging.DEBUG, format="%(levelname)s %(name)s: %(message)s")


def _remember_json(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        session_of(ctx).json = True


_CONFIG = click.option(
    "--config",
    metavar="FILE",
    type=click.Path(),
    expose_value=False,
    callback=_remember_config,
    help="Configuration file.  [default: /etc/kata-pin/config.yaml]",
)
_DEBUG = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    callback=_remember_debug,
    help="Log to stderr, and print the traceback of an error.",
)
_JSON = click.option(
    "--json",
    is_flag=True,
    expose_value=False,
    callback=_remember_json,
    help="Print JSON; json.md in docs/ or /usr/share/doc/kata-pin describes it.",
)


def cpu_list(ctx: click.Context, param: click.Parameter, text: str | None) -> CpuSet | None:
    """Return the CPU set that an argument or option names, such as `0-3,8`; None if not given."""
    if text is None:
        return None
    from kata_pin.base.cpuset import CpuSet
    from kata_pin.base.errors import KataPinError

    try:
        return CpuSet.parse(text)
    except KataPinError as error:
        raise click.BadParameter(error.message, ctx, param) from error


def time_span(_: click.Context, __: click.Parameter, value: str | None) -> int | None:
    """Return the seconds of a time span."""
    if value is None:
        return None
    found = _SPAN.match(value)
    if found is None:
        raise click.BadParameter(f"{value!r} is not a time span such as 90s, 15m, 2h or 1d")
    return int(found[1]) * _UNITS[found[2]]


def in_namespace(command: F) -> F:
    """Add -n NAMESPACE to a command about sandboxes."""
    return click.option(
        "-n", "--namespace", metavar="NAMESPACE", help="Only pods of this Kubernetes namespace."
    )(command)


def measured_for(command: F) -> F:
    """Add --for SPAN to a command that measures exclusive pCPUs for a moment."""
    return click.option(
        "--for",
        "seconds",
        metavar="SPAN",
        callback=time_span,
        help="How long exclusive pCPUs are measured, such as 10s; 0s: not at all.  "
        "[default: isolation.check_s of the configuration]",
    )(command)


def complete_sandbox(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the pods and ids that start with `incomplete`; none if no daemon answers quickly."""
    return sandbox_names(session_of(ctx).runtime_dir, incomplete)
