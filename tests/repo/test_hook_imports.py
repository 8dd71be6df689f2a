"""The hook's import budget: every container of a node pays for what it imports."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.commandline import run
from tests.support.hooks import HOOK, INTERPRETER, STATE, HookDaemon, runtime_directory

HOOK_PATH = "usr/libexec/kata-pin/kata-pin-hook"


def imported(command: list[str]) -> set[str]:
    """Return the modules that a run of the interpreter imports (`-X importtime`)."""
    done = subprocess.run(
        [INTERPRETER, "-X", "importtime", *command], input=STATE, capture_output=True,
        check=True, timeout=20,
    )  # fmt: skip
    return set(re.findall(r"^import time:.*\| +(\S+)$", done.stderr.decode(), re.MULTILINE))


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("daemon_up", [True, False])
def test_hook_imports_only_what_is_built_in(*, installed: bool, daemon_up: bool) -> None:
    """A whole run of the hook, answered or spooling, imports _socket and select alone."""
    bare = imported(["-IS", "-c", "pass"])
    with runtime_directory() as directory:
        program = directory / HOOK_PATH if installed else HOOK
        if installed:
            assert run(["install", "--root", str(directory), "--program", "/usr/bin/true"]) == 0
        call = ["-IS", str(program), "createRuntime", f"--runtime-dir={directory}"]
        if daemon_up:
            with HookDaemon(directory) as daemon:
                extra = imported(call) - bare
            assert daemon.messages
        else:
            extra = imported(call) - bare
            assert list((directory / "spool").iterdir())
    assert extra == {"_socket", "select"}


def test_hook_is_one_file() -> None:
    """The hook imports nothing of the package, at no level and under no condition."""
    tree = ast.parse(HOOK.read_text())
    names = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    names |= {node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names == {"posix", "sys", "time", "_socket", "select"}


def test_hook_starts_isolated() -> None:
    """The first line keeps site-packages, the environment and the cwd out (`-IS`)."""
    assert Path(HOOK).read_text().startswith("#!/usr/bin/python3 -IS\n")
