"""`kata-pin install --containerd`: Kata's runtime handlers get a base runtime spec with our hooks.

Two kinds of files: for each handler the spec that it has now (or containerd's own) with the hooks,
and one drop-in that names them. Whether a drop-in can do that is tried with `containerd config
dump` before it is written: containerd 2 merges configuration files key by key, 1.7 replaces the
whole table of a plugin, so there a drop-in would drop the plugin's other settings. containerd is
never restarted from here.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from msgspec import Struct

from kata_pin.base.errors import HostError, KataPinError, ParseError, reason_of
from kata_pin.cli.node.files import CLASS_DROP_IN, DROP_IN, HOOK_PATH, SPECS, NodeFile
from kata_pin.linux.files import HOST, read_text
from kata_pin.linux.process import read_process
from kata_pin.peers import containerd as wire

CONFIG: Final = "/etc/containerd/config.toml"
FOLDER: Final = "/etc/containerd/conf.d"
"""What containerd 2.2 and later imports by default."""

PROGRAM_S: Final = 30.0
"""Longest run of `containerd config dump` and `ctr oci spec`, in seconds."""

MAX_OUTPUT: Final = 1 << 20

_LOGGED_FILE: Final = re.compile(r"level=error .*\bfile=(/[^\s\"]{1,200})")

RESTART: Final = "systemctl restart containerd"

Run = Callable[[Sequence[str]], str]
"""Runs a program and returns its output; raises KataPinError."""


class Plan(Struct, frozen=True):
    """The files to install, specs first; `specs` are the paths by handler."""

    config: wire.RuntimeConfig
    specs: Mapping[str, str]
    files: tuple[NodeFile, ...]
    drop_in: str
    """The path of the drop-in, empty where it cannot work."""

    version: int
    """Of CONFIG itself, which the drop-in and the lines to add are written for."""

    @property
    def spec_files(self) -> tuple[NodeFile, ...]:
        """The files but the drop-in."""
        return tuple(file for file in self.files if file.path != self.drop_in)


def plan(hooks: Mapping[str, list[wire.Spec]], handlers: Iterable[str], run: Run) -> Plan | None:
    """Return what `handlers` (none: those of Kata) need; None where containerd has none of Kata.

    Raises KataPinError: no containerd, a configuration or a spec that cannot be read.
    """
    config = dump(run, CONFIG)
    names = tuple(handlers) or tuple(one.name for one in config.handlers.values() if one.is_kata)
    if not names:
        return None
    for name in names:
        if name not in config.handlers:
            known = ", ".join(config.handlers)
            raise KataPinError(
                f"containerd has no runtime handler {name}", hint=f"it has {known or 'none'}"
            )
    specs = {name: f"{SPECS}{name}.json" for name in names}
    files = [
        NodeFile(path, wire.encode_spec(_merged(config.handlers[name], hooks, run)))
        for name, path in specs.items()
    ]
    version = own_version(config)
    drop_in = wire.drop_in(config, version, specs)
    if not merges(config.with_base_specs(specs), drop_in, version, run):
        return Plan(config, specs, tuple(files), "", version)
    path = f"{imported_folder() or FOLDER}/{DROP_IN}"
    return Plan(config, specs, (*files, NodeFile(path, drop_in.encode())), path, version)


def check_specs(paths: Iterable[str]) -> None:
    """Raise KataPinError for a spec without our hook, and for one that containerd could not load.

    Its CRI plugin would not start.
    """
    for path in paths:
        data = _read(path)
        wire.parse_spec(data, path)
        if not wire.runs_program(data, HOOK_PATH):
            raise KataPinError(
                f"{path} has no hook of kata-pin", hint="remove it, then install again"
            )


def next_steps(done: Plan, run: Run) -> list[str]:
    """Return what is left to do after the files are installed.

    Raises KataPinError where containerd does not make of the drop-in what was meant.
    """
    now = dump(run, CONFIG)
    expected = (done.config.plugins, done.config.with_base_specs(done.specs))  # not imported yet
    if done.drop_in and now.plugins not in expected:
        raise KataPinError(f"{done.drop_in} would change other settings of containerd too")
    left = [name for name, path in done.specs.items() if _base_spec(now, name) != path]
    if not left:
        changed = changed_at([*(file.path for file in done.files), *places(_text)])
        if not running_since(changed):
            return ["containerd: new Kata pods run the hooks, nothing is left to do"]
        return [f"containerd: restart it, so that new Kata pods run the hooks:\n  {RESTART}"]
    files = dict(_loaded(_text, [CONFIG]))
    why = "a drop-in would change other settings than ours"
    if done.drop_in:
        if done.drop_in not in files:
            step = f'add "{os.path.dirname(done.drop_in)}/*.toml" to the top-level list imports'
            return [f"containerd: in {CONFIG} {step}, then restart it:\n  {RESTART}"]
        if files[done.drop_in].encode() not in {file.content for file in done.files}:
            return [f"containerd: {done.drop_in} was modified: remove it, then run this again"]
        why = f"{done.drop_in} has no effect: a file that is read later names another spec"
    missing: dict[str, list[str]] = {}
    for name in left:
        path, plugin = _place(done, name, files)
        table, line = wire.table_of(plugin, name), f'{wire.BASE_SPEC} = "{done.specs[name]}"'
        missing.setdefault(path, [f"In {path} set"]).extend((f"  {table}", f"  {line}"))
    steps = [line for lines in missing.values() for line in lines]
    return ["\n".join([f"containerd: {why}.", *steps, f"then restart it:\n  {RESTART}"])]


def _place(done: Plan, name: str, files: Mapping[str, str]) -> tuple[str, str]:
    """Return the file whose table of a handler is read last, and how it names the plugin."""
    found = CONFIG, wire.plugin_of(done.config, done.version)
    for path, text in files.items():
        with contextlib.suppress(ParseError):
            plugin = wire.handler_plugins(text).get(name)
            if plugin and path != done.drop_in:
                found = path, plugin
    return found


def _base_spec(config: wire.RuntimeConfig, name: str) -> str:
    handler = config.handlers.get(name)
    return handler.base_spec if handler else ""


def dump(run: Run, config: str) -> wire.RuntimeConfig:
    """Return what containerd makes of a configuration file; raises KataPinError.

    On a node without CONFIG these are its defaults, which 1.7 does not dump.
    """
    if config == CONFIG and not os.path.exists(config):
        return wire.parse_dump(run(("containerd", "config", "default")))
    return wire.parse_dump(run(("containerd", "--config", config, "config", "dump")))


def run_program(command: Sequence[str]) -> str:
    """Run a program of containerd; return its output. Raises KataPinError."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=PROGRAM_S,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KataPinError(f"{' '.join(command)}: {reason_of(error)}") from error
    if done.returncode or len(done.stdout) > MAX_OUTPUT:
        last = done.stderr.strip().splitlines()[-1:] or ["no usable output"]
        file = _LOGGED_FILE.search(done.stderr)  # containerd 2 names it there alone
        where = f" ({file[1]})" if file else ""
        raise KataPinError(f"{' '.join(command)} failed: {last[0][:500]}{where}")
    return done.stdout


def named_specs(read: Callable[[str], bytes], root: str = "/") -> dict[str, str]:
    """Return the base runtime specs that containerd's files name, each with the file.

    A file that cannot be read as TOML may name any: it stands for `""`. Imports of imported files
    count, as containerd follows them.
    """
    found: dict[str, str] = {}
    for path, text in _loaded(read, [CONFIG, *_files(f"{FOLDER}/*.toml", root)], root):
        try:
            specs = wire.base_specs(text)
        except ParseError:
            specs = frozenset({""})
        for spec in specs:
            found.setdefault(spec, path)
    return found


def importer(path: str, read: Callable[[str], bytes], root: str = "/") -> str:
    """Return the file whose imports name a path itself, or nothing.

    containerd does not start without that file; what a pattern matched may go.
    """
    for file, text in _loaded(read, [CONFIG], root):
        with contextlib.suppress(ParseError):
            for one in wire.parse_imports(text):
                if "*" not in one and _beside(file, one) == path:
                    return file
    return ""


def places(read: Callable[[str], bytes]) -> Iterator[str]:
    """Yield the files of containerd's configuration, and folders in which others may have been."""
    for file, text in _loaded(read, [CONFIG, *_files(f"{FOLDER}/*.toml", "/")]):
        yield file
        with contextlib.suppress(ParseError):
            yield from (os.path.dirname(_beside(file, one)) for one in wire.parse_imports(text))


def _beside(file: str, imported: str) -> str:
    return os.path.normpath(os.path.join(os.path.dirname(file), imported))


def _loaded(
    read: Callable[[str], bytes], paths: list[str], root: str = "/"
) -> Iterator[tuple[str, str]]:
    """Yield configuration files and their text, in containerd's order: imports after the others."""
    for path in paths:  # grows
        text = read(path).decode("utf-8", "replace")
        yield path, text
        with contextlib.suppress(ParseError):
            for one in wire.parse_imports(text):
                more = _files(_beside(path, one), root)
                paths += (file for file in more if file not in paths)


def changed_at(paths: Iterable[str]) -> float:
    """Return the latest Unix time at which one of these files or folders was changed; 0 if none."""
    latest = 0.0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            latest = max(latest, os.stat(path).st_mtime)
    return latest


def running_since(when: float) -> bool:
    """Whether a containerd of this root file system started before a Unix time."""
    uptime = time.clock_gettime(time.CLOCK_BOOTTIME)
    age = time.time() - when
    ours = os.stat("/")
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError, KataPinError):
            process = read_process(HOST, int(name))
            if process.comm != "containerd":
                continue
            if not os.path.samestat(os.stat(f"/proc/{name}/root"), ours):
                continue
            if uptime - process.key.starttime / os.sysconf("SC_CLK_TCK") > age:
                return True
    return False


def _files(pattern: str, root: str) -> list[str]:
    """Return the existing files below a root that fit a pattern, as paths on the node."""
    found = glob.glob(glob.escape(root.rstrip("/")) + pattern)
    return sorted(f"/{os.path.relpath(path, root)}" for path in found if os.path.isfile(path))


def imported_folder() -> str:
    """Return the folder of a pattern in CONFIG's imports that fits our drop-ins, or nothing.

    A folder that is a pattern itself, or has `..`, is not ours to choose from.
    """
    try:
        imports = wire.parse_imports(read_text(CONFIG, wire.MAX_SPEC))
    except (OSError, ParseError):  # containerd itself reads it; its own default remains
        return ""
    for pattern in imports:
        folder, name = os.path.split(pattern)
        plain = folder == os.path.normpath(folder) == glob.escape(folder)
        fits = all(fnmatch.fnmatchcase(ours, name) for ours in (DROP_IN, f"{CLASS_DROP_IN}x.toml"))
        if os.path.isabs(folder) and plain and fits:
            return folder
    return ""


def own_version(config: wire.RuntimeConfig) -> int:
    """Return the version of CONFIG itself, which containerd may have migrated for its dump.

    A drop-in has the same: containerd 2.3 does not start with one that is newer than the file that
    imports it, and earlier ones then do not migrate that file (its pull request 12891).
    """
    if not os.path.exists(CONFIG):  # containerd's defaults are of its newest version
        return config.version
    return wire.parse_version(_read(CONFIG).decode("utf-8", "replace"), CONFIG)


def merges(expected: Mapping[str, object], drop_in: str, version: int, run: Run) -> bool:
    """Whether containerd makes the expected settings of its plugins of CONFIG and a drop-in.

    `version` is that of CONFIG, in whose place a file is that imports it, and by way of another one
    the drop-in: containerd reads what CONFIG itself imports, then the drop-in, as it will be.
    """
    with tempfile.TemporaryDirectory(prefix="kata-pin-") as folder:
        added, last, main = (os.path.join(folder, one) for one in (DROP_IN, "last", "config.toml"))
        _write(added, drop_in)
        _write(last, f'version = {version}\nimports = ["{added}"]\n')
        files = [path for path in (CONFIG, last) if os.path.exists(path)]
        listed = ", ".join(f'"{path}"' for path in files)
        _write(main, f"version = {version}\nimports = [{listed}]\n")
        try:
            merged = dump(run, main)
        except KataPinError:  # it refuses both, or not even the table of handlers is left
            return False
    return merged.plugins == expected


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _merged(handler: wire.Handler, hooks: Mapping[str, list[wire.Spec]], run: Run) -> wire.Spec:
    base = handler.base_spec
    if base:
        if not os.path.exists(base):
            hint = (
                "correct the line that names it, or create the file: CRI does not start without it"
            )
            if base.startswith(SPECS):
                hint = "run kata-pin uninstall, remove any line that names it, and install again"
            raise KataPinError(
                f"containerd's handler {handler.name} names {base}, which does not exist", hint=hint
            )
        spec = wire.parse_spec(_read(base), base)
    else:
        command = ("ctr", "oci", "spec")
        spec = wire.without_defaults(wire.parse_spec(run(command).encode(), " ".join(command)))
    return wire.with_hooks(spec, hooks, HOOK_PATH)


def _text(path: str) -> bytes:
    return _read(path) if os.path.exists(path) else b""


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(wire.MAX_SPEC + 1)
    except OSError as error:
        raise HostError("read", path, error.errno or 0) from error
