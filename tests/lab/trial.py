"""`scripts/lab test`: a fresh machine, the project installed in it, tests/e2e, results back.

`scripts/lab bench` runs tests/bench there instead, without the installed daemon.

Results (default build/lab/FLAVOUR): junit.xml and pytest.txt, or tests.bench.txt, summary.json
(outcome and timings), console.log, journal.txt, install.txt, the captured topology, and
failures/TEST/ for each failing test. Whatever happens the machine is ended and what it left is
brought back if it still answers.

A machine that ends by itself (a kernel that panics, an emulator that crashes) is named with the
test that ran and the end of its console, and once another one goes on at the file of that test.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.lab import install, process, transfer, wheels
from tests.lab.channel import Channel
from tests.lab.errors import EX_NOT_BUILT, GoneError, LabError, NotBuiltError, NotUpError
from tests.lab.flavours import CPUS, NODES, Flavour
from tests.lab.image import VENV, Builder, Image, Tell
from tests.lab.machine import Machine, Running
from tests.lab.rootfs import RootBuilder
from tests.lab.settings import PROJECT, Settings

BOOTS: Final = 2
"""Boots tried before the tests count as not run."""

INSIDE: Final = "/srv/kata-pin"
"""Where everybody may read: the daemon, which has no rights and no /root, reads guest kernels."""
RESULTS: Final = "/root/results"
PUT_S: Final = 30
TESTS_S: Final = 300
"""Deadline of the whole test run; multiplied by the scale."""
TEST_S: Final = 90
"""Deadline of a test that sets none itself; multiplied by the scale."""
LOG_S: Final = 30
STAGE_S: Final = 60

_TREES: Final = (
    *("tests/e2e", "tests/support", "tests/data", "tests/lab", "hooks", "scripts"),
    *("tests/cluster", "tests/containerd", "tests/kubelet"),
)
_BENCH_TREES: Final = ("tests", "hooks", "scripts")
_NOT_INSIDE: Final = shutil.ignore_patterns("__pycache__", "*.pyc")
_CACHE: Final = ".cache"
_ARCHIVE: Final = f"{_CACHE}/kata-pin.tar"

_CLUSTER_ENVIRONMENT: Final = {
    "KATA_PIN_IMAGE": f"{INSIDE}/{_ARCHIVE}",  # tests/cluster/test_node.py
    "GOMAXPROCS": "4",  # one thread for each emulated CPU is no gain
    # On the disk, as root file systems are too much for memory, and short, as sockets are below it.
    "TMPDIR": "/srv",
}

KUBELET: Final = ("kubelet",)
CLUSTER: Final = ("kubelet", "containerd", "cluster")
"""Scripts that build programs which a machine can be given; a cluster's has our image too."""


_TEST: Final = re.compile(
    r"^((tests/\S+?\.py)::.+?) (?:(PASSED|SKIPPED|FAILED|ERROR)\b|$)", re.MULTILINE
)
"""A line of pytest's for a test: its name, its file, what it came to; the last is being run."""


class Left(NamedTuple):
    """What is left to run when a machine ended during a test, from the beginning of its file.

    Tests of one file may share what the first of them made.
    """

    during: str
    options: list[str]
    failed: list[str]


def left_to_run(output: str) -> Left | None:
    """Return what is left by what `pytest -v` has printed; None before its first test."""
    tests = [match.groups() for match in _TEST.finditer(output)]
    if not tests:
        return None
    during, last, _ = tests[-1]
    files = dict.fromkeys(file for _, file, _ in tests if file != last)
    failed = [
        name for name, file, outcome in tests if outcome in ("FAILED", "ERROR") and file != last
    ]
    return Left(during, [f"--ignore={file}" for file in files], failed)


class Trial:
    """One run of the tests in one machine."""

    def __init__(
        self,
        settings: Settings,
        flavour: Flavour,
        tell: Tell,
        results: Path,
        *,
        peers: Sequence[str] = (),
        bench: bool = False,
    ) -> None:
        """`peers`: what the machine gets of KUBELET or CLUSTER. `bench`: it runs no tests."""
        self._peers = peers
        self._bench = bench
        self._settings = settings
        self._flavour = flavour
        self._tell = tell
        self._results = results
        self._machine = Machine(settings, flavour, tell)
        self._timings: dict[str, float] = {}

    def run(self, arguments: Sequence[str], *, keep: bool, reuse: bool) -> int:
        """Build, boot, install, test, bring back; return the exit code."""
        builder = Builder(self._settings, self._flavour.suite, self._tell)
        if not (reuse and self._machine.running()):
            self._machine.check_needs(built=builder.find() is not None, results=self._results)
        shutil.rmtree(self._results, ignore_errors=True)
        self._results.mkdir(parents=True)
        outcome, code, reason = "error", 1, ""
        with tempfile.TemporaryDirectory() as folder:
            try:
                with self._timed("build"):
                    image = builder.build()
                    programs = {peer: Path(self._script(peer)) for peer in self._peers}
                    project = install.prepare(Path(folder), self._results / "install.txt")
                    tests = self._stage(Path(folder), programs)
                with self._timed("boot"):
                    running = self._boot(image, keep=keep, reuse=reuse)
                try:
                    code = self._test(running, project, tests, arguments)
                except GoneError as error:
                    left = self._left(error)
                    running = self._boot(image, keep=keep, reuse=False)
                    code = self._test(running, project, tests, (*arguments, *left.options))
                    for name in left.failed:
                        self._tell(f"FAILED {name} - in the machine that ended")
                        code = 1
                outcome = "passed" if code == 0 else "failed"
            except (NotBuiltError, NotUpError) as error:
                outcome, code, reason = "not run", error.exit_code, str(error)
                self._tell(f"lab: {error}")
            except LabError as error:
                reason = str(error)
                raise
            except KeyboardInterrupt:
                outcome, reason = "interrupted", "interrupted"
                raise
            finally:
                self._bring_console()
                if not keep:
                    self._machine.stop()
                self._summarize(outcome, reason)
        self._tell(f"{self._flavour.name}: {outcome}; results in {self._results}")
        return code

    def _boot(self, image: Image, *, keep: bool, reuse: bool) -> Running:
        """Boot, once more if the machine does not come up; replace a running one, or reuse it."""
        running = self._machine.running()
        if running and reuse:
            return running
        self._machine.stop()
        for left in reversed(range(BOOTS)):
            try:
                return self._machine.boot(image, die_with_us=not keep)
            except NotUpError as error:
                if not left:
                    raise
                self._tell(f"lab: {error}\nlab: trying once more")
        raise AssertionError("unreachable")

    def _left(self, error: GoneError) -> Left:
        """Tell how the machine ended and return what another one is to run; `error` if nothing."""
        text = self._results / "pytest.txt"
        left = left_to_run(text.read_text(errors="replace") if text.exists() else "")
        if left is None:
            raise error
        self._bring_console()
        console = self._results / "console.log"
        self._tell(f"lab: the machine ended during {left.during}")
        self._tell(process.tail(console))
        self._tell(process.tail(self._results / "qemu.log"))
        console.rename(console.with_name("console-ended.log"))
        return left

    def _test(
        self,
        running: Running,
        project: install.Project,
        tests: Path,
        arguments: Sequence[str],
    ) -> int:
        try:
            with self._machine.connect() as channel:
                with self._timed("put"):
                    channel.run(["rm", "-rf", INSIDE, RESULTS], deadline_s=PUT_S * running.scale)
                    transfer.put(
                        channel,
                        [str(tests)],
                        str(Path(INSIDE).parent),
                        deadline_s=PUT_S * running.scale,
                    )
                with self._timed("install"):
                    done = install.install(
                        channel, project, self._flavour.suite, scale=running.scale
                    )
                self._tell(f"  {done.text}")
                if "cluster" in self._peers or self._bench:  # they have their own daemons
                    stop = ["systemctl", "stop", "kata-pin"]
                    channel.run(stop, deadline_s=PUT_S * running.scale)
                with self._timed("tests"):
                    return self._run_inside(channel, running, arguments, installed=done.ok)
        finally:
            self._bring_results(running)

    @staticmethod
    def _script(name: str, *arguments: str) -> str:
        """Return what a script that builds something prints; NotBuiltError where it cannot."""
        environment = {**os.environ, "VENV": str(Path(wheels.python_with_pip()).parents[1])}
        done = subprocess.run(
            [str(PROJECT / "scripts" / name), *arguments],
            stdout=subprocess.PIPE, text=True, check=False, env=environment,
        )  # fmt: skip
        if done.returncode == EX_NOT_BUILT:
            raise NotBuiltError(f"scripts/{name} cannot build here what the tests need")
        if done.returncode:
            raise LabError(f"scripts/{name} ended with {done.returncode}")
        return done.stdout.strip()

    def _stage(self, folder: Path, programs: Mapping[str, Path]) -> Path:
        """Lay out what the machine gets besides the installed project."""
        stage = folder / "inside" / Path(INSIDE).name
        for name in _BENCH_TREES if self._bench else _TREES:
            if (PROJECT / name).is_dir():
                shutil.copytree(PROJECT / name, stage / name, ignore=_NOT_INSIDE)
        # No assembler inside: the firmware of idle guests goes along, as scripts/firmware made it.
        firmware = [str(PROJECT / "scripts/firmware"), str(stage / ".cache/firmware")]
        # Likewise the Linux guest, of the release's own kernel.
        tree = RootBuilder(self._settings, self._flavour.suite, self._tell).build_root()
        guest = [sys.executable, str(PROJECT / "tests/e2e/guest/build.py"), f"--tree={tree}"]
        guest += [f"--out={stage / '.cache/guest'}"]
        for argv in (firmware, guest):
            process.run(
                argv, deadline_s=STAGE_S, log=self._results / "install.txt", env=dict(os.environ)
            )
        for peer, built in programs.items():  # see _run_inside
            shutil.copytree(built, stage / _CACHE / "kata-pin" / peer / built.name, symlinks=True)
        if "cluster" in programs:
            built_image = self._script("image", "--work-tree", "--folder", str(folder / "image"))
            shutil.copy2(built_image.split()[1], stage / _ARCHIVE)
        return stage

    def _run_inside(
        self, channel: Channel, running: Running, arguments: Sequence[str], *, installed: bool
    ) -> int:
        name, options = "tests.bench", list(arguments)
        if not self._bench:
            name, options = "pytest", ["-c", "tests/e2e/pytest.ini", f"--rootdir={INSIDE}"]
            options += [f"--junitxml={RESULTS}/junit.xml", "--durations=0", "-v"]
            options += [f"--timeout={TEST_S * running.scale:g}", *(arguments or ["tests/e2e"])]
        with (self._results / f"{name}.txt").open("ab") as text:

            def show(data: bytes) -> None:
                text.write(data)
                os.write(2, data)

            done = channel.run(
                [f"{VENV}/bin/python", "-m", name, *options],
                deadline_s=TESTS_S * running.scale,
                stdout=show,
                stderr=show,
                env={
                    "KATA_PIN_LAB": json.dumps(self._promises(running, installed=installed)),
                    "KATA_PIN_WAIT_SCALE": str(running.scale),  # tests/support/waiting.py
                    "XDG_CACHE_HOME": f"{INSIDE}/{_CACHE}",  # where scripts look for programs
                    **(_CLUSTER_ENVIRONMENT if "cluster" in self._peers else {}),
                },
                cwd=INSIDE,
            )
        return 0 if done.code == 0 else 1

    def _promises(self, running: Running, *, installed: bool) -> dict[str, Any]:
        """Return what tests/e2e/node.py reads."""
        flavour = self._flavour
        return {
            "flavour": flavour.name,
            "suite": flavour.suite.name,
            "accel": running.accel,
            "scale": running.scale,
            "cpus": CPUS,
            "nodes": NODES,
            "cores": flavour.cores,
            "threads": flavour.threads,
            "kernel": flavour.suite.kernel,
            "cgroup": flavour.cgroup,
            "kvm": flavour.model == "kvm" or running.accel == "kvm",
            "pins_stick": flavour.suite.pins_stick,
            "nri": flavour.suite.nri,
            "installed": installed,
            "results": RESULTS,
        }

    def _bring_results(self, running: Running) -> None:
        """Fetch what the tests wrote and the journal; a machine that is gone only gets a line."""
        limit = LOG_S * running.scale
        try:
            with self._machine.connect() as channel:
                script = f"mkdir -p {RESULTS} && journalctl --no-pager -o short-precise"
                journal = f"{script} > {RESULTS}/journal.txt"
                channel.run(["sh", "-c", journal], deadline_s=limit)
                with tempfile.TemporaryDirectory() as folder:
                    transfer.get(channel, [RESULTS], folder, deadline_s=limit)
                    brought = Path(folder) / Path(RESULTS).name
                    shutil.copytree(brought, self._results, dirs_exist_ok=True)
            if (self._results / "told.txt").exists():
                self._tell((self._results / "told.txt").read_text().rstrip())
        except LabError as error:
            self._tell(f"lab: results could not be brought back: {error}")

    def _bring_console(self) -> None:
        for name in ("console.log", "qemu.log"):
            if (self._machine.folder / name).exists():
                shutil.copy2(self._machine.folder / name, self._results / name)

    def _summarize(self, outcome: str, reason: str) -> None:
        summary = {
            "flavour": self._flavour.name,
            "outcome": outcome,
            "reason": reason,
            "seconds": {name: round(value, 1) for name, value in self._timings.items()},
        }
        (self._results / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._timings[name] = time.monotonic() - began


def run(
    settings: Settings,
    flavour: Flavour,
    tell: Callable[[str], None],
    *,
    results: str | None,
    arguments: Sequence[str],
    keep: bool,
    reuse: bool,
    peers: Sequence[str],
    bench: bool,
) -> int:
    """Run tests in a fresh machine of `flavour`, or the bench; return the command's exit code."""
    folder = Path(results) if results else PROJECT / "build" / "lab" / flavour.name
    trial = Trial(settings, flavour, tell, folder, peers=peers, bench=bench)
    return trial.run(arguments, keep=keep, reuse=reuse)
