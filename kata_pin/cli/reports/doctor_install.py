"""`doctor` on what `kata-pin install` and the steps after it leave on the node, and on hooks.

A node that runs kata-pin in another way (scripts/demo, a package of its own) has nothing to check.
"""

from __future__ import annotations

import glob
import grp
import os
import pwd
from collections.abc import Iterator
from typing import Final

from kata_pin.cli.node.changes import MANIFEST, Node
from kata_pin.cli.node.containerd import named_specs
from kata_pin.cli.node.files import CONTAINERD_FRAGMENT, HOOK_PATH, SPECS
from kata_pin.cli.reports import remedies
from kata_pin.config import Config
from kata_pin.host.files import read_text
from kata_pin.model.count_noun import count
from kata_pin.model.reports.doctor import Row
from kata_pin.remedy import here

SHOWN: Final = 3
"""Files named in a row."""

HOOK_FILES: Final = (
    "/etc/containers/oci/hooks.d/*.json",
    "/usr/share/containers/oci/hooks.d/*.json",
    "/run/containers/oci/hooks.d/*.json",
    "/etc/containerd/*.json",
    f"{SPECS}*.json",
)
"""Where CRI-O, podman and a base runtime spec of containerd may name our hook."""

HOOK_NAME: Final = "kata-pin-hook"


def installation(config: Config, node: Node | None = None) -> Iterator[Row]:
    """Yield whether the installed files are there, and the group and the runtime directory."""
    installed = node or Node()
    if not installed.installed:
        yield Row("installation", "info", f"no {MANIFEST}: not installed by kata-pin install")
        return
    missing, modified = installed.altered()
    if missing:
        remedy = "run kata-pin install again with the same options"
        yield Row("installation", "fail", f"{_named(missing)} missing", remedy)
    elif modified:
        yield Row("installation", "info", f"{_named(modified)} modified since: kept by install")
    else:
        yield Row("installation", "ok", "all installed files are in place")
    yield user(config.user)
    yield group(config.group)
    yield runtime_dir(config.runtime_dir)


def user(name: str) -> Row:
    """Return whether the unprivileged user exists that the daemon becomes."""
    try:
        pwd.getpwnam(name)
    except KeyError:
        text = f"no user {name}: the daemon runs as nobody, as other services may"
        return Row("user", "warn", text, "systemd-sysusers, then restart kata-pin")
    return Row("user", "ok", f"the daemon runs as {name}")


def group(name: str) -> Row:
    """Return whether the group that may read the state exists: the unit needs it to start."""
    try:
        grp.getgrnam(name)
    except KeyError:
        return Row("group", "fail", f"no group {name}", "systemd-sysusers")
    return Row("group", "ok", f"members of {name} may read the state")


def runtime_dir(path: str) -> Row:
    """Return whether the directory of the sockets exists: hooks spool into it at any time."""
    if not os.path.isdir(path):
        text = f"{path} does not exist: hooks cannot leave messages"
        return Row("runtime directory", "fail", text, "systemd-tmpfiles --create kata-pin.conf")
    return Row("runtime directory", "ok", path)


def hooks(
    patterns: tuple[str, ...] = HOOK_FILES,
    program: str = HOOK_PATH,
    fragment: str = CONTAINERD_FRAGMENT,
    specs: str = SPECS,
    *,
    by_nri: bool = False,
) -> Row:
    """Return the files that name the hook, and whether the hook is executable.

    `specs` is the folder of specs that do nothing until containerd's configuration names them.
    `by_nri`: NRI reports the containers, so none is needed.
    """
    found = [
        path
        for pattern in patterns
        for path in sorted(glob.glob(pattern))
        if HOOK_NAME in _text(path)
    ]
    if found and not os.access(program, os.X_OK):
        text = f"{', '.join(found)} name the hook, but {program} is not executable"
        return Row("hooks", "fail", text, "kata-pin install")
    idle = [path for path in found if path.startswith(specs)]
    if idle:
        named = named_specs(lambda path: _text(path).encode())
        idle = [path for path in idle if path not in named and "" not in named]
    if idle:
        text = f"containerd's configuration does not name {', '.join(idle)}"
        remedy = "kata-pin install --containerd says which line is missing"
        return Row("hooks", "warn", text, remedy)
    if found:
        return Row("hooks", "ok", f"installed: {', '.join(found)}")
    text = f"no runtime runs the hook: no file names {HOOK_NAME} in {', '.join(patterns)}"
    if os.path.exists(fragment):
        remedy = "kata-pin install --containerd, with --handler NAME if Kata's has another name"
        return Row("hooks", "warn", text, remedy)
    if by_nri:
        return Row("hooks", "ok", "none, and none needed: NRI reports containers")
    return Row("hooks", "warn", text, here(remedies.HOOKS))


def _text(path: str) -> str:
    try:
        return read_text(path)
    except OSError:
        return ""


def _named(paths: list[str]) -> str:
    more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return f"{count(len(paths), 'file')} ({', '.join(paths[:SHOWN])}{more})"
