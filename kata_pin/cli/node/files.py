"""The files that `kata-pin install` puts on a node, made from hooks/ and the configuration.

Pure but for reading the package's own data; nothing here writes.
"""

from __future__ import annotations

import json
import marshal
import re
from collections.abc import Iterable
from enum import StrEnum
from importlib.resources import files
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from typing import Any, Final

import click
from click.shell_completion import ShellComplete, get_completion_class
from msgspec import Struct, field

from kata_pin.base.config.table import sample
from kata_pin.base.config.tree import Config, Hook
from kata_pin.base.errors import KataPinError
from kata_pin.base.values import QuietLevel
from kata_pin.service.configuration import DEFAULT_FILE

HOOK_PATH: Final = "/usr/libexec/kata-pin/kata-pin-hook"
HOOKS_DIR: Final = "/usr/share/containers/oci/hooks.d"  # read by CRI-O and by podman
CONTAINERD_FRAGMENT: Final = "/etc/kata-pin/containerd-hooks.json"
SPECS: Final = "/etc/kata-pin/containerd/"
"""The folder of the base runtime specs that containerd gets."""

CLASSES: Final = "/etc/kata-containers/kata-pin/"
"""The folder of configurations that kata_class.py makes, where Kata's are looked for by default."""

DROP_IN: Final = "kata-pin.toml"
CLASS_DROP_IN: Final = "kata-pin-class-"
"""How drop-ins of containerd are called: that of `install`, and the starts of those of classes,
which containerd reads before it."""

UNIT: Final = "/usr/lib/systemd/system/kata-pin.service"
PROGRAM_LINK: Final = "/usr/bin/kata-pin"
"""In every user's PATH, also in that of sudo."""

DOCUMENTS: Final = "/usr/share/doc/kata-pin"

PHASES: Final = ("createRuntime", "poststart", "poststop")
"""The phases that every supported Kata runs on the host (facts: Kata's hooks-handling.md, and the
sources of both runtimes)."""

KATA_ONLY_PHASES: Final = ("createContainer",)
"""Added where hooks are for Kata only: the Rust runtime runs it for each container."""

MAX_INTERPRETER: Final = 200
"""The kernel reads 256 bytes of a first line (execve(2)); `#!`, options and some room are ours."""

LOCK_NAME: Final = "kata-pin"
"""The folder below /run with the node's lock; also the default runtime directory."""

_UNIT_PATH: Final = r"/[^\s%$'\"\\]+"
"""What systemd.service(5) takes from ExecStart= as it is written."""

_PLACEHOLDER: Final = re.compile(r"@([A-Z_]+)@")


COMPLETE: Final = "_KATA_PIN_COMPLETE"
"""As in cli/quick.py, by which a shell is answered."""

COMPLETIONS: Final = {
    "bash": "/usr/share/bash-completion/completions/kata-pin",
    "zsh": "/usr/share/zsh/site-functions/_kata-pin",
    "fish": "/usr/share/fish/vendor_completions.d/kata-pin.fish",
}
"""The shells, with the file that each loads when kata-pin is completed first."""


class Runtime(StrEnum):
    """Who runs the hooks on this node."""

    CRIO = "crio"
    PODMAN = "podman"
    CONTAINERD = "containerd"


class NodeFile(Struct, frozen=True):
    """One file: its absolute path on the node, content and mode.

    A settings file is the administrator's once it is there: it is never overwritten.
    """

    path: str
    content: bytes
    mode: int = 0o644
    settings: bool = False


class NodeLink(Struct, frozen=True):
    """A symbolic link: its absolute path on the node, and the absolute path that it names."""

    path: str
    target: str


class Choices(Struct, frozen=True):
    """What the files depend on beside the configuration's content.

    `program` is the installed kata-pin, `python` the interpreter of the hook, `config_file` where
    the daemon reads its settings. `old_kernel`: it may be older than Linux 6.6.
    """

    program: str
    python: str = "/usr/bin/python3"
    runtimes: frozenset[Runtime] = frozenset()
    prestart: bool = False
    config_file: str = DEFAULT_FILE
    config: Config = field(default_factory=Config)
    old_kernel: bool = False


def registers_hook(path: str) -> bool:
    """Whether a file of ours makes a runtime run the hook."""
    return path.startswith(HOOKS_DIR) or is_drop_in(path)


def is_drop_in(path: str) -> bool:
    """Whether a file of ours is a drop-in of containerd's configuration."""
    name = path.rpartition("/")[2]
    return name == DROP_IN or name.startswith(CLASS_DROP_IN)


def serves_class(path: str) -> bool:
    """Whether a file of ours is one that `kata-class` makes."""
    return path.startswith(CLASSES) or f"/{CLASS_DROP_IN}" in path


def serves_containerd(path: str) -> bool:
    """Whether a file of ours is one that `install --containerd` makes."""
    return path.startswith(SPECS) or path.endswith(f"/{DROP_IN}")


def node_files(choices: Choices) -> tuple[NodeFile | NodeLink, ...]:
    """Return every file to install, in the order in which they may appear on the node.

    The hook comes before what names it. Raises KataPinError where a choice cannot work.
    """
    by_hand = [NodeFile(CONTAINERD_FRAGMENT, _json({"hooks": containerd_hooks(choices)}))]
    return (
        NodeFile(HOOK_PATH, hook_program(choices.python), 0o755),
        NodeFile(choices.config_file, sample().encode(), settings=True),
        NodeFile("/usr/lib/sysusers.d/kata-pin.conf", _filled("systemd/sysusers.conf", choices)),
        NodeFile("/usr/lib/tmpfiles.d/kata-pin.conf", _filled("systemd/tmpfiles.conf", choices)),
        NodeFile(UNIT, _filled("systemd/kata-pin.service", choices)),
        *_drop_ins(choices),
        *_hooks_dir(choices),
        *(by_hand if Runtime.CONTAINERD in choices.runtimes else []),
        *_documents(),
        *(NodeFile(path, completion(shell).encode()) for shell, path in COMPLETIONS.items()),
        *([NodeLink(PROGRAM_LINK, choices.program)] if choices.program != PROGRAM_LINK else []),
    )


def _drop_ins(choices: Choices) -> Iterable[NodeFile]:
    """Yield what the service needs on old kernels, and with some settings, only."""
    wanted = {
        "before-linux-6.6.conf": choices.old_kernel,
        "resctrl.conf": choices.config.resctrl.enabled,
        "realtime.conf": bool(choices.config.rt.priority),
        "quiet.conf": choices.config.quiet.acts,
        "quiet-full.conf": choices.config.quiet is QuietLevel.FULL,
    }
    for name in (name for name, is_wanted in wanted.items() if is_wanted):
        yield NodeFile(f"{UNIT}.d/{name}", _asset(f"systemd/{name}").encode())


def _documents() -> Iterable[NodeFile]:
    """Yield the man page, and what programs need to read the JSON documents."""
    folder = files("kata_pin.cli").joinpath("documents")
    yield NodeFile("/usr/share/man/man8/kata-pin.8", folder.joinpath("kata-pin.8").read_bytes())
    yield NodeFile(f"{DOCUMENTS}/json.md", folder.joinpath("json.md").read_bytes())
    for schema in sorted(folder.joinpath("schema").iterdir(), key=lambda one: one.name):
        yield NodeFile(f"{DOCUMENTS}/schema/{schema.name}", schema.read_bytes())


def completion(shell: str) -> str:
    """Return the completion script of one of the shells of COMPLETIONS."""
    kind = get_completion_class(shell)
    assert kind is not None, "click knows every shell of the table"
    # not source() of the shell's own class: bash's starts a bash to ask for its version
    made = kind(click.Group("kata-pin"), {}, "kata-pin", COMPLETE)
    return ShellComplete.source(made).strip() + "\n"


def hook_program(python: str) -> bytes:
    """Return the hook, compiled too, with the interpreter in its first line."""
    if not re.fullmatch(r"/[^\s]+", python) or len(python) > MAX_INTERPRETER:
        raise KataPinError(
            f"{python!r} cannot be the interpreter of a script",
            hint="give --python an absolute path without spaces",
        )
    source = files("kata_pin").joinpath("hook.py").read_text()
    code = compile(source, "kata-pin-hook", "exec", dont_inherit=True, optimize=2)
    values = {
        "PYTHON": python,
        "SOURCE": source,
        # version 2: later ones depend on reference counts, and each install would differ
        "CODE": marshal.dumps(code, 2).hex(),
        "MAGIC_NUMBER": MAGIC_NUMBER.hex(),
    }
    return _filled_with("oci/kata-pin-hook.in", values)


def _filled(asset: str, choices: Choices) -> bytes:
    """Return an asset with its @PLACEHOLDERS@ filled in."""
    runtime_dir = choices.config.runtime_dir
    if not re.fullmatch(r"/run/[^\s%]+", runtime_dir):
        raise KataPinError(
            f"runtime_dir {runtime_dir} is not below /run",
            hint="the service and the spool need a directory that is emptied at boot",
        )
    for option, path in (("--program", choices.program), ("--config", choices.config_file)):
        if not re.fullmatch(_UNIT_PATH, path):
            raise KataPinError(
                f"the service cannot start {path!r}",
                hint=f"give {option} an absolute path without white space, %, $, quotes and \\",
            )
    name = runtime_dir.removeprefix("/run/")
    values = {
        "PROGRAM": choices.program,
        # named, a missing file is an error; without it the daemon takes the defaults
        "CONFIG": "" if choices.config_file == DEFAULT_FILE else f" --config {choices.config_file}",
        "USER": choices.config.user,
        "GROUP": choices.config.group,
        "RUNTIME_DIR": runtime_dir,
        "RUNTIME_NAMES": name if name == LOCK_NAME else f"{name} {LOCK_NAME}",
    }
    return _filled_with(asset, values)


def _filled_with(asset: str, values: dict[str, str]) -> bytes:
    return _PLACEHOLDER.sub(lambda match: values[match[1]], _asset(asset)).encode()


def _hooks_dir(choices: Choices) -> Iterable[NodeFile]:
    """Yield the files of hooks.d, one a phase; CRI-O's serve podman too, which reads them."""
    if Runtime.CRIO in choices.runtimes:
        _refuse_strict(choices.config)
        template = json.loads(_asset("oci/crio.json"))
    elif Runtime.PODMAN in choices.runtimes:
        template = json.loads(_asset("oci/podman.json"))
    else:
        return
    for phase in _phases(choices):
        hook = {**template["hook"], "args": _arguments(phase, choices.config)}
        content = _json({**template, "hook": hook, "stages": [phase]})
        yield NodeFile(f"{HOOKS_DIR}/90-kata-pin-{phase}.json", content)


def _refuse_strict(config: Config) -> None:
    """Raise KataPinError: CRI-O's hooks run for containers without a VMM too, the node's own."""
    if config.hook.strict:
        raise KataPinError(
            "hook.strict with CRI-O would fail every container that does not use Kata",
            hint="set hook.strict: false",
        )


def containerd_hooks(choices: Choices) -> dict[str, list[dict[str, Any]]]:
    """Return the hooks of a base runtime spec, by phase."""
    [template] = json.loads(_asset("oci/containerd.json"))["hooks"]["createRuntime"]
    phases = (*_phases(choices), *KATA_ONLY_PHASES)
    return {p: [{**template, "args": _arguments(p, choices.config)}] for p in phases}


def _phases(choices: Choices) -> tuple[str, ...]:
    return ("prestart", *PHASES) if choices.prestart else PHASES


def _arguments(phase: str, config: Config) -> list[str]:
    """Return the hook's argv: what is the default in the hook too is left out."""
    arguments = ["kata-pin-hook", phase]
    if config.runtime_dir != Config().runtime_dir:
        arguments.append(f"--runtime-dir={config.runtime_dir}")
    if config.hook.record_ms != Hook().record_ms:
        arguments.append(f"--record-ms={config.hook.record_ms}")
    if config.hook.pin_ms != Hook().pin_ms:
        arguments.append(f"--pin-ms={config.hook.pin_ms}")
    if config.hook.strict:
        arguments.append("--strict")
    return arguments


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _asset(name: str) -> str:
    return Path(str(files("kata_pin.cli").joinpath("assets", name))).read_text(encoding="utf-8")
