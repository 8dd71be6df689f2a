"""The command `scripts/lab`: words in, exit codes out.

Exit codes: 0 done, 1 failed (or a test failed), 2 usage, 75 a machine did not come up, 77 a program
that a test needs cannot be built; `run` and `enter` end with the code of the machine's command.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import Final

from tests.lab import terminal, transfer, trial
from tests.lab.errors import LabError
from tests.lab.flavours import DEFAULT, FLAVOURS, SUITES, flavour
from tests.lab.image import Builder
from tests.lab.machine import Machine, machines
from tests.lab.settings import Settings

COMMAND_S: Final = 360.0
"""Deadline of `run`, multiplied by the machine's scale; --deadline sets another."""


_WITH_REST: Final = frozenset({"run", "put", "get", "test", "bench"})
"""Commands whose flavour is followed by other words."""


def tell(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run one command; return the exit code."""
    words = _name_flavour(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(words)
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    try:
        return int(args.handler(Settings.read(), args) or 0)
    except LabError as error:
        tell(f"lab: {error}")
        return error.exit_code
    except OSError as error:  # a place of this machine that we may not use, or that is full
        tell(f"lab: {error.strerror}: {error.filename}" if error.filename else f"lab: {error}")
        return 1
    except KeyboardInterrupt:
        tell("lab: interrupted")
        return 130


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _name_flavour(words: list[str]) -> list[str]:
    """Make the flavour an option, so that `run uname` and `run bookworm-v1 uname` both parse."""
    if words and words[0] in _WITH_REST and len(words) > 1 and words[1] in FLAVOURS:
        return [words[0], f"--flavour={words[1]}", *words[2:]]
    return words


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/lab",
        description="Lab machines of kata-pin: 16-CPU nodes under systemd in QEMU (docs/lab.md).",
        epilog=f"Flavours: {', '.join(FLAVOURS)}; without one: {DEFAULT}.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    build = commands.add_parser("build", help="build the image, if its recipe changed")
    build.add_argument("flavour", nargs="?", default=DEFAULT, choices=FLAVOURS)
    build.add_argument("--refresh", action="store_true", help="build anew, with new packages")
    build.set_defaults(handler=_build)

    for name, handler, text in (
        ("boot", _boot, "build if needed, start, and wait until it is up"),
        ("enter", _enter, "a shell in the machine"),
        ("stop", _stop, "end the machine; its disk is as built at the next boot"),
        ("destroy", _destroy, "end the machine and remove its image"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("flavour", nargs="?", default=DEFAULT, choices=FLAVOURS)
        command.set_defaults(handler=handler)

    run = commands.add_parser("run", help="run a command in the machine")
    run.add_argument("--flavour", default=DEFAULT, help=argparse.SUPPRESS)
    run.add_argument("--deadline", type=float, metavar="SECONDS")
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="[--] COMMAND")
    run.set_defaults(handler=_run)

    for name, handler, text in (
        ("put", _put, "copy files and folders into a folder of the machine"),
        ("get", _get, "copy files and folders of the machine into a folder"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--flavour", default=DEFAULT, help=argparse.SUPPRESS)
        command.add_argument("sources", nargs="+", metavar="SOURCE")
        command.add_argument("folder", metavar="FOLDER")
        command.set_defaults(handler=handler)

    status = commands.add_parser("status", help="what is built and what runs")
    status.set_defaults(handler=_status)

    test = commands.add_parser("test", help="run tests/e2e in a fresh machine, bring back results")
    for peers, text in (
        (trial.KUBELET, "put the real kubelet in (scripts/kubelet)"),
        (trial.CLUSTER, "put a whole cluster in (scripts/cluster, containerd, kubelet, image)"),
    ):
        name = f"--with-{peers[-1]}"
        test.add_argument(
            name, dest="peers", action="store_const", const=peers, default=(), help=text
        )
    test.add_argument("arguments", nargs="*", metavar="-- PYTEST ARGUMENT")
    bench = commands.add_parser("bench", help="run scripts/bench in a fresh machine")
    bench.add_argument("arguments", nargs="+", metavar="-- BENCH ARGUMENT")
    bench.set_defaults(peers=())
    for command in (test, bench):
        command.add_argument("--flavour", default=DEFAULT, help=argparse.SUPPRESS)
        command.add_argument(
            "--keep", action="store_true", help="leave the machine running afterwards"
        )
        command.add_argument("--reuse", action="store_true", help="use a running machine as it is")
        command.add_argument("--results", metavar="FOLDER", help="default: build/lab/FLAVOUR")
        command.set_defaults(handler=_test, bench=command is bench)
    return parser


def _machine(settings: Settings, args: argparse.Namespace) -> Machine:
    return Machine(settings, flavour(args.flavour), tell)


def _builder(settings: Settings, args: argparse.Namespace) -> Builder:
    return Builder(settings, flavour(args.flavour).suite, tell)


def _build(settings: Settings, args: argparse.Namespace) -> None:
    tell(str(_builder(settings, args).build(refresh=args.refresh).folder))


def _boot(settings: Settings, args: argparse.Namespace) -> None:
    machine = _machine(settings, args)
    if machine.running():
        tell(f"{args.flavour} is running already")
        return
    builder = _builder(settings, args)
    machine.check_needs(built=builder.find() is not None)
    machine.boot(builder.build())


def _enter(settings: Settings, args: argparse.Namespace) -> int:
    with _machine(settings, args).connect() as channel:
        return terminal.interact(channel, ["bash", "-l"])


def _run(settings: Settings, args: argparse.Namespace) -> int:
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise LabError("run needs a command")
    machine = _machine(settings, args)
    deadline = args.deadline or COMMAND_S * machine.need().scale
    with machine.connect() as channel:
        return channel.run(
            command,
            deadline_s=deadline,
            stdin=None if sys.stdin.isatty() else sys.stdin.buffer,
            stdout=lambda data: os.write(1, data),
            stderr=lambda data: os.write(2, data),
        ).code


def _put(settings: Settings, args: argparse.Namespace) -> None:
    machine = _machine(settings, args)
    limit = COMMAND_S * machine.need().scale
    with machine.connect() as channel:
        transfer.put(channel, args.sources, args.folder, deadline_s=limit)


def _get(settings: Settings, args: argparse.Namespace) -> None:
    machine = _machine(settings, args)
    limit = COMMAND_S * machine.need().scale
    with machine.connect() as channel:
        transfer.get(channel, args.sources, args.folder, deadline_s=limit)


def _stop(settings: Settings, args: argparse.Namespace) -> None:
    stopped = _machine(settings, args).stop()
    tell(f"{args.flavour}: {'stopped' if stopped else 'was not running'}")


def _destroy(settings: Settings, args: argparse.Namespace) -> None:
    machine = _machine(settings, args)
    machine.destroy()
    for other in machines(settings, tell):
        if other.flavour.suite is machine.flavour.suite and other.running():
            tell(f"the image stays: {other.flavour.name} runs from it")
            return
    _builder(settings, args).destroy()


def _status(settings: Settings, _: argparse.Namespace) -> None:
    print(f"cache    {settings.cache}")
    for suite in SUITES.values():
        image = Builder(settings, suite, tell).find()
        print(f"image    {suite.name:<14} {image.folder.name if image else 'not built'}")
    for machine in machines(settings, tell):
        running = machine.running()
        state = "stopped"
        if running:
            up = "coming up" if running.boot_s is None else f"up after {running.boot_s:.0f} s"
            state = f"pid {running.pid}, {running.accel}, {up}"
        print(f"machine  {machine.flavour.name:<14} {state}")


def _test(settings: Settings, args: argparse.Namespace) -> int:
    return trial.run(
        settings,
        flavour(args.flavour),
        tell,
        results=args.results,
        arguments=args.arguments,
        bench=args.bench,
        # A machine that ran before is not ended by a test that only borrowed it.
        keep=args.keep or args.reuse,
        reuse=args.reuse,
        peers=args.peers,
    )
