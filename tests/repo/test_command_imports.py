"""What a command imports that only shows what the daemon knows: most of its time goes there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from kata_pin.base.documents.answers import Applied
from tests.support.installed import installed
from tests.unit import conftest
from tests.unit.cli import documents as docs
from tests.unit.conftest import Serve

serve = conftest.serve

DAEMON: Final = {
    f"kata_pin.service.{path.stem}"
    for path in (Path(__file__).parents[2] / "kata_pin/service").glob("*.py")
    if path.stem not in {"__init__", "protocol", "exchange"}
}
"""Modules of the service but for those that talk to it."""

NEVER: Final = {
    *("asyncio", "google", "logging", "psutil", "pyroute2", "rich", "socket", "yaml"),
    *("dataclasses", "difflib", "kata_pin.base.config", "kata_pin.base.allocation"),
    *("kata_pin.base.placement", "kata_pin.base.settings", "kata_pin.linux", "kata_pin.vmm"),
    *("kata_pin.placement", "kata_pin.records", "kata_pin.engine", "kata_pin.follow"),
    *("kata_pin.guest", "kata_pin.options", *DAEMON),
    *("kata_pin.base.documents.check", "kata_pin.base.documents.measured"),
}
"""What no command of this file imports; a package stands for all in it."""

CLICK: Final = {"click", "gettext", "inspect", "locale", "threading"}
"""click, and what only it needs: commands without options do not import it (quick.py)."""

DOCUMENTS: Final = {"uuid", "datetime", "msgspec"}
"""What help and completion do not import either."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program as packages install it."""
    return installed(tmp_path_factory.mktemp("installed"))


def imported(program: Path, arguments: list[str], **environ: str) -> set[str]:
    """Return the modules that the program imports and a bare interpreter does not."""
    interpreter, options = program.read_text().partition("\n")[0].removeprefix("#!").split()
    bare, _ = modules([interpreter, options, "-c", "pass"], {})
    found, printed = modules([interpreter, options, str(program), *arguments], environ)
    assert printed
    return found - bare


def modules(command: list[str], environ: dict[str, str]) -> tuple[set[str], bytes]:
    """Return what a run of the interpreter imports, and what it prints."""
    done = subprocess.run(
        [command[0], "-X", "importtime", *command[1:]],
        env={**os.environ, **environ}, capture_output=True, check=True, timeout=60,
    )  # fmt: skip
    names = re.findall(r"^import time:.*\| +(\S+)$", done.stderr.decode(), re.MULTILINE)
    return set(names), done.stdout


def among(modules: set[str], unwanted: set[str]) -> set[str]:
    """Return the modules that are unwanted or in an unwanted package."""
    return {one for one in modules if any(f"{one}.".startswith(f"{no}.") for no in unwanted)}


@pytest.mark.parametrize("arguments", [["show"], ["show", "--problems"], ["pin"], ["pin", "db-0"]])
def test_a_command_imports_what_it_shows(arguments: list[str], program: Path, serve: Serve) -> None:
    """The client, the document and its lines; click where there are options."""
    state = docs.state(docs.database(), docs.drifted())
    pinned = Applied(kind="pin", sandboxes=())
    config = serve({"state": lambda _: state, "pin": lambda _: pinned})
    found = imported(program, ["--config", str(config), *arguments])
    assert "kata_pin.cli.render.layout" in found
    assert among(found, NEVER) == set()
    assert ("click" in found) == ("--problems" in arguments)
    assert among(found, CLICK) == set() or "click" in found


def test_one_sandbox_is_shown_without_an_event_loop(program: Path, serve: Serve) -> None:
    """The command itself reads what threads did; only a tap or a vhost worker takes more."""
    sandbox = docs.sandbox("shop/cart", "1", vmm=docs.vmm(pid=os.getpid()))
    config = serve({"state": lambda _: docs.state(sandbox)})
    found = imported(program, ["--config", str(config), "show", "shop/cart"])
    read = {"files", "kernel_text", "descriptors", "task_counters"}
    assert {one for one in among(found, {"kata_pin.linux"}) if one.count(".") == 2} == {
        f"kata_pin.linux.{one}" for one in read
    }
    names = {"kata_pin.rights.calls", "kata_pin.base.documents.answers", "kata_pin.base.sandbox"}
    assert among(found, NEVER - {"kata_pin.linux"} | CLICK | names) == set()


def test_help_imports_no_click(program: Path) -> None:
    """The help is a file."""
    found = imported(program, ["--help"], COLUMNS="80")
    assert "kata_pin.cli.quick" in found
    assert among(found, NEVER | CLICK | DOCUMENTS) == set()


def test_completion_imports_no_click(program: Path, serve: Serve) -> None:
    """A key was pressed, and somebody waits."""
    config: Path = serve({"state": lambda _: docs.state(docs.database(), docs.drifted())})
    words = f"kata-pin --config {config} show d"
    found = imported(
        program, [], _KATA_PIN_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD="4"
    )
    assert "kata_pin.service.exchange" in found
    assert among(found, NEVER | CLICK | DOCUMENTS) == set()


def test_the_daemon_imports_no_client_of_http() -> None:
    """It and what draws keys take 2 MiB of a daemon that runs on every node."""
    found, _ = modules([sys.executable, "-c", "import kata_pin.service.app"], {})
    assert "kata_pin.peers.pages" in found
    assert among(found, {"email", "hashlib", "http.client", "secrets"}) == set()
