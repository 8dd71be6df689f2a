"""A package of somebody else with an option: written into a folder, found by its entry point alone.

    make_package(folder)     # then the folder goes onto Python's path

`siren` reports sandboxes with more threads than `siren.most_threads`: a setting, a metric, a kind
of findings, a command that asks the daemon, a row of `doctor`, and what `config check` says.
"""

from __future__ import annotations

from pathlib import Path

ROW = '''\
"""The row: what the configuration and the command line know of the option."""

from msgspec import Struct

from kata_pin.base.config.kinds import integer, setting
from kata_pin.base.config.options import Option
from kata_pin.base.errors import ConfigError
from kata_pin.base.documents.check import FindingRow


class Siren(Struct, frozen=True):
    """When sandboxes are too loud."""

    most_threads: int = setting(100, "most threads of a sandbox", integer(1, 10000))
    on: bool = setting(True, "whether it counts")

    def __post_init__(self) -> None:
        if self.most_threads == 13:
            raise ConfigError("13 brings bad luck", key="siren.most_threads")


CROWDED = FindingRow(
    "siren:crowded",
    "a sandbox has more threads than `siren.most_threads`",
    fails=True,
    counted="sandboxes",
    remedy="give the VM fewer vCPUs",
)
OPTION = Option(
    "siren",
    "siren_option.keeper",
    lambda config: config.added["siren"].on,
    settings=Siren,
    doctor="siren_option.checks:prerequisites",
    config_check="siren_option.checks:problems",
    findings=(CROWDED,),
    commands={"siren": "siren_option.command:siren"},
)
'''

KEEPER = '''\
"""The option in the daemon."""

from msgspec import Struct

from kata_pin.base.documents.document import VERSION
from kata_pin.engine.counters import MetricRow, readings
from kata_pin.service.options import Running
from siren_option import CROWDED, Siren


class Loud(Struct, frozen=True, kw_only=True):
    """The document of `siren`."""

    version: int = VERSION
    kind: str = "siren"
    threads: dict[str, int]


class Keeper(Running):
    """Counts the threads of each pass."""

    def __init__(self, core) -> None:
        self._core = core
        self._threads = {}

    def passed(self, outcome) -> None:
        self._threads[outcome.sandbox_id] = len(outcome.report.threads)

    def ended(self, outcome) -> None:
        self._threads.pop(outcome.sandbox_id, None)

    def findings(self):
        most = self._core.live.now.added.get("siren", Siren()).most_threads
        for sandbox, number in self._threads.items():
            if number > most:
                yield CROWDED.found(sandbox, "", f"{sandbox} has {number} threads, at most {most}")

    def verbs(self):
        return {"siren": lambda: Loud(threads=self._threads)}

    def metrics(self):
        return readings(METRICS, self._threads)


METRICS = (MetricRow("siren_threads", "Threads.", lambda threads: sum(threads.values())),)


def start(core) -> Keeper:
    return Keeper(core)
'''

CHECKS = '''\
"""What `doctor` and `config check` say."""

from kata_pin.base.documents.state import Row
from kata_pin.base.errors import ConfigError


def prerequisites(examined):
    loud = sum(len(one.threads) for one in examined.state.sandboxes)
    yield Row("siren", "ok", f"{loud} threads, {'node' if examined.node else 'sandbox'}")


def problems(config, topology):
    if config.added["siren"].most_threads == 99:
        yield ConfigError(f"99 is nothing for {topology.present}", key="siren.most_threads")
'''

COMMAND = '''\
"""`kata-pin siren`."""

import click

from kata_pin.cli.options import global_options


@click.command()
@global_options
@click.pass_obj
def siren(session) -> None:
    """Print the threads of each sandbox."""
    from siren_option.keeper import Loud

    for sandbox, number in session.connect().option(Loud, "siren").threads.items():
        click.echo(f"{sandbox} {number}")
'''


def make_package(folder: Path, entry: str = "", *, name: str = "siren", option: str = "") -> Path:
    """Write the package into a folder of Python's path, readable for everybody; return it.

    Another `name` makes another package, with an option of that name unless `option` is another's.
    """
    option = option or name
    package, info = folder / f"{name}_option", folder / f"{name}-1.0.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    for file, text in (
        ("__init__", ROW),
        ("keeper", KEEPER),
        ("checks", CHECKS),
        ("command", COMMAND),
    ):
        (package / f"{file}.py").write_text(text.replace("siren", name))
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    entry = entry or f"{name}_option:OPTION"
    (info / "entry_points.txt").write_text(f"[kata_pin.options]\n{option} = {entry}\n")
    folder.chmod(0o755)
    return folder
