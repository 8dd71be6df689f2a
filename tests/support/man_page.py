"""The man page kata-pin(8), made from the commands' help and the settings table.

`scripts/man` writes docs/kata-pin.8 and a test compares both, so that help, table and page agree.
Only what neither says is written here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import click

from kata_pin import __version__
from kata_pin.base.config.table import SECTIONS, SETTINGS, Setting
from kata_pin.cli.main import cli
from kata_pin.cli.quick import COMMANDS

_DESCRIPTION: Final = """\
A Kata container runs in a virtual machine. What runs on the host are the threads of its VMM: vCPUs,
iothreads, the main loop, vhost workers, virtiofsd. kata-pin records the CPUs that each container of
a pod was given, finds every thread that works for the pod's sandbox and keeps it on them.

The OCI hook kata-pin-hook reports each container to the daemon, which pins the sandbox's threads
before the workload runs, and again after every change and audit. Only affinities are set; no
thread is moved to another cgroup.

Without the daemon, show, who, explain, check, doctor, pin and unpin read /proc and Kata's state
themselves and say so; history reads the daemon's last record. So do they if
a daemon does not answer within 2 s, except pin and unpin, which then fail."""

_OUTPUT: Final = """\
In the column vCPU→pCPU, 1→4 is a vCPU that may run on pCPU 4 only, 0,3→6-7 are two vCPUs on the
same set, and 1..8→4..11 pairs each vCPU of the range with its own pCPU. Affinities are those of the
kernel; ! marks drift from the expected affinity.

Tables wrap to fit the terminal and never cut a cpu list; columns that do not fit are named below
the table, and so are texts that several rows share, as [1]. * marks a last pCPU outside the
affinity: the thread has not run since its affinity was set, and moves when it wakes. In a pipe or a
file every row is one line. Colours are used on terminals only, and not with NO_COLOR."""

_HOOKS: Final = """\
For CRI-O and podman, install writes files into their hooks directory. containerd has no such
directory: install gives each Kata handler a base runtime spec with the hooks, by a drop-in where
containerd merges its files (2.0 and later); else it prints the lines to set. Then containerd must
be restarted. By hand: add the hooks of /etc/kata-pin/containerd-hooks.json to the handler's base
runtime spec, or to the output of ctr oci spec without process.rlimits, and name that file in the
table of the handler:"""

_CONTAINERD: Final = """\
base_runtime_spec = "/etc/containerd/kata-base-spec.json\"
"""

_STRICT: Final = """\
The hook always exits 0, so that no container fails because of kata-pin: without the daemon the
message is spooled and processed later. With the setting hook.strict it fails the container instead.
This works only in prestart and createRuntime of Kata's Go runtime: other hooks and the Rust runtime
ignore a hook's exit status, or run it too late."""

_FILES: Final = (
    ("/etc/kata-pin/config.yaml", "settings; defaults apply without it"),
    ("/usr/share/doc/kata-pin/", "json.md and schemas: what the output of --json holds"),
    ("/etc/kata-pin/containerd/", "base runtime specs with the hooks, one per handler"),
    ("/var/lib/kata-pin/installed", "what install wrote, for sha256sum -c, uninstall and doctor"),
    ("/run/kata-pin/control.sock", "all requests to the daemon, root only"),
    ("/run/kata-pin/status.sock", "read-only requests, for the group of the setting group"),
    ("/run/kata-pin/metrics.sock", "Prometheus' /metrics, for the same group"),
    ("/run/kata-pin/hook.sock", "messages of hooks"),
    (
        "/run/kata-pin/free-cpus",
        "mask of the pCPUs that hooks and commands move to: no container has them exclusively",
    ),
    ("/run/kata-pin/registry.db", "recorded containers, pins and history; survives the daemon"),
    ("/run/kata-pin/spool/", "hook messages that the daemon has not processed yet"),
)

_EXIT: Final = (
    ("0", "success"),
    ("1", "failure; for doctor: a check failed; for pin and unpin: the kernel refused an affinity"),
    ("2", "wrong usage"),
    (
        "3",
        "check: drift, conflict, foreign tasks, or (intruders: fail) an intruder; prove: violated",
    ),
    ("4", "check or prove: unknown (no permission, records lost, no daemon answers)"),
    ("78", "wrong configuration"),
)


def page() -> str:
    """Return the man page as roff (man(7))."""
    lines = [
        '.\\" Made by scripts/man from the commands and the settings table: do not edit.',
        f'.TH KATA\\-PIN 8 "" "kata\\-pin {__version__}" "System Administration"',
        *_section("NAME"),
        "kata\\-pin \\- CPU placement for the host threads of Kata sandboxes",
        *_section("SYNOPSIS"),
        "\\fBkata\\-pin\\fR [\\fIOPTIONS\\fR] \\fICOMMAND\\fR [\\fIARGS\\fR]",
        *_section("DESCRIPTION"),
        *_paragraphs(_DESCRIPTION),
        *_section("OPTIONS"),
        "Valid before or after the command.",
        *_options(cli),
        *_section("COMMANDS"),
        *_commands(),
        *_section("OUTPUT"),
        *_paragraphs(_OUTPUT),
        *_section("CONFIGURATION"),
        *_configuration(),
        *_section("HOOKS"),
        *_paragraphs(_HOOKS),
        ".PP",
        ".nf",
        *(_roff(line) for line in _CONTAINERD.splitlines()),
        ".fi",
        ".PP",
        *_paragraphs(_STRICT),
        *_section("FILES"),
        *(line for entry in _FILES for line in _tagged(*entry)),
        *_section("EXIT STATUS"),
        *(line for entry in _EXIT for line in _tagged(*entry)),
        *_section("SEE ALSO"),
        "\\fBtaskset\\fR(1), \\fBsched_setaffinity\\fR(2), \\fBcpuset\\fR(7), \\fBcgroups\\fR(7)",
    ]
    return "\n".join(lines) + "\n"


class _Listed(click.Group):
    """The group `kata-pin` with its commands' own words, as click shows it on 80 columns."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the first paragraph of each command's help."""
        found = {name: cli.get_command(ctx, name) for name in COMMANDS}
        texts = {name: _help_text(one).partition("\n\n")[0] for name, one in found.items() if one}
        with formatter.section("Commands"):
            formatter.write_dl([(name, " ".join(text.split())) for name, text in texts.items()])


def own_help() -> str:
    """Return the help of `kata-pin` itself."""
    group = _Listed("kata-pin", params=cli.params, help=cli.help)
    names = ["-h", "--help"]
    context = click.Context(group, info_name="kata-pin", terminal_width=78, help_option_names=names)
    return group.get_help(context)


def _section(title: str) -> list[str]:
    return [f".SH {title}"]


def _paragraphs(text: str) -> Iterator[str]:
    for n, paragraph in enumerate(text.split("\n\n")):
        if n:
            yield ".PP"
        yield _roff(" ".join(paragraph.split()))


def _tagged(tag: str, text: str) -> list[str]:
    return [".TP", f"\\fB{_roff(tag)}\\fR", _roff(text)]


def _commands() -> Iterator[str]:
    context = click.Context(cli, info_name="kata-pin")
    for name in COMMANDS:
        found = cli.get_command(context, name)
        assert found is not None, "the table of commands names only commands"
        yield from _command(name, found)


def _command(name: str, command: click.Command) -> Iterator[str]:
    """Yield one command; the commands of a group follow it by their whole name."""
    context = click.Context(command, info_name=name)
    usage = " ".join(
        piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]"
    )
    yield f".SS kata\\-pin {_roff(f'{name} {usage}'.strip())}"
    yield from _paragraphs(_help_text(command))
    yield from _options(command)
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            found = command.get_command(context, inner)
            assert found is not None, "a group lists only commands that it has"
            yield from _command(f"{name} {inner}", found)


def _help_text(command: click.Command) -> str:
    return (command.help or "").replace("\b", "").strip()


def _options(command: click.Command) -> Iterator[str]:
    """Yield a command's options; those of every command only at the top."""
    everywhere = {"config", "debug", "json"} if command is not cli else set()
    context = click.Context(command)
    for option in command.params:
        if not isinstance(option, click.Option) or option.name in everywhere:
            continue
        record = option.get_help_record(context)
        if record is not None:
            yield from _tagged(record[0], record[1])


def _configuration() -> Iterator[str]:
    yield _roff(
        "One YAML file, /etc/kata-pin/config.yaml or that of --config. It begins with version: 1. "
        "An unknown key is an error that names the nearest one. Values are read as "
        "written: 010 is not octal, and on is not a boolean. Anchors and tags are refused."
    )
    section = ""
    for entry in SETTINGS:
        parent = entry.key.rpartition(".")[0]
        if parent != section:
            section = parent
            title = (SECTIONS[section].__doc__ or "").partition("\n")[0]
            yield f".SS {_roff(section)}"
            yield _roff(title)
        yield from _setting(entry)


def _setting(entry: Setting) -> Iterator[str]:
    row = entry.row
    yield from _tagged(entry.key, f"{row.help}.")
    yield ".br"
    yield _roff(f"Value: {row.kind.words}. Default: {entry.default_text}.")
    if row.example:
        yield ".br"
        yield _roff(f"Example: {row.example}")


def _roff(text: str) -> str:
    """Return a text as one line of roff that shows it as it is."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped[:1] in {".", "'"} else escaped
