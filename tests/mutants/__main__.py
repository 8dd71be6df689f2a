"""Runs mutants: `scripts/mutants [--list] [--markdown] [NAME ...]`; a NAME may be a pattern.

Each is put into a copy of the project, its tests run there until one fails, and the copy is
restored; the working tree is only read. Progress goes to stderr. In the end all tests that failed
are run without a bug: one that fails then too proves nothing, and its mutant counts as survived.

Exit status: 0 if every mutant was caught, 1 if one survived, 2 if one is stale or unknown.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, NoReturn

from tests.mutants.catalogue import ROOT, Mutant, Patch, Sources, StaleError, load

LIMIT_S: Final = 240.0
"""How long the tests of one mutant may take in all."""

_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (\S+?::.+?)(?: - .*)?$", re.MULTILINE)
_COPIED: Final = ("kata_pin", "tests", "scripts", "hooks", "docs")


@dataclass(frozen=True)
class Result:
    """What happened to a mutant: `test` is the one that caught it, `why` why none did."""

    mutant: Mutant
    seconds: float
    test: str = ""
    why: str = ""


@dataclass(frozen=True)
class _Tests:
    """What a run of pytest ended with; `failed` is the first test that failed."""

    status: int
    failed: str
    output: str


class Copy:
    """A copy of the project in `folder`, in which one mutant at a time is tried."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in _COPIED:
            shutil.copytree(
                ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("*.pyc")
            )
        for path in ROOT.iterdir():
            if path.is_file():
                shutil.copy2(path, folder / path.name)
        _copy_environment(folder)
        folder.chmod(0o755)  # tests run programs as other users
        (folder / ".cache").mkdir()
        for built in (ROOT / ".cache").glob("*"):
            if built.name != "qemu":  # a path that daemons of these tests alone look at
                (folder / ".cache" / built.name).symlink_to(built)

    def try_out(self, mutant: Mutant, patch: Patch) -> Result:
        """Put the bug in, run the mutant's tests, and take it out again."""
        began = time.monotonic()
        path = self._folder / patch.path
        sound = path.read_text()
        self._write(path, patch.text)
        try:
            tests = self._run(mutant.tests, LIMIT_S)
            chance: list[str] = []
            while tests.failed and not tests.failed.startswith("tests/unit/"):
                # Of what waits for processes, one failure may be chance: then the others decide.
                again = self._run([tests.failed], LIMIT_S)
                if again.status:
                    tests = again
                    break
                chance.append(f"--deselect={tests.failed}")
                tests = self._run([*mutant.tests, *chance], LIMIT_S)
        finally:
            self._write(path, sound)
        seconds = time.monotonic() - began
        if tests.status == 0:
            return Result(mutant, seconds, why="every test passed")
        if tests.status != 1 or not tests.failed:
            return Result(mutant, seconds, why=f"no verdict: {tests.output[-300:]!r}")
        return Result(mutant, seconds, test=tests.failed)

    def unsound(self, tests: Sequence[str]) -> set[str]:
        """Return which of these tests fail without any bug."""
        left, failing = sorted(set(tests)), set[str]()
        while left:  # each run ends with its first failure
            failed = self._run(left, LIMIT_S * 5).failed
            if failed not in left:
                break
            failing.add(failed)
            left = left[left.index(failed) + 1 :]
        return failing

    @staticmethod
    def _write(path: Path, text: str) -> None:
        """Replace a module; compiled files are told apart by seconds only, so drop this one's."""
        path.write_text(text)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()

    def _run(self, tests: Sequence[str], limit_s: float) -> _Tests:
        options = ["-x", "-q", "--no-header", "--tb=line", "-p", "no:randomly"]
        process = subprocess.Popen(
            [".venv/bin/python", "-m", "pytest", *options, "-p", "no:cacheprovider", *tests],
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return _Tests(-1, "", f"more than {limit_s:.0f} s")
        finally:
            _end(process)
        failed = _FAILED.search(output)
        return _Tests(process.returncode, failed[1] if failed else "", output)


def _copy_environment(folder: Path) -> None:
    """Make a virtual environment like ours, whose `kata_pin` and programs are those of the copy."""
    ours, theirs = ROOT / ".venv", folder / ".venv"
    shutil.copytree(ours / "bin", theirs / "bin", symlinks=True)
    shutil.copy2(ours / "pyvenv.cfg", theirs)
    for packages in ours.glob("lib/python*/site-packages"):
        below = theirs / packages.relative_to(ours)
        below.mkdir(parents=True)
        for entry in packages.iterdir():
            (below / entry.name).symlink_to(entry)
    for path in (*theirs.glob("bin/kata-pin"), *theirs.glob("lib/*/*/__editable__*.py")):
        text = path.read_text().replace(str(ROOT), str(folder))
        path.unlink()  # the link, not the file behind it
        path.write_text(text)
    (theirs / "bin/kata-pin").chmod(0o755)


def _end(process: subprocess.Popen[str]) -> None:
    """Kill what the tests left, however they ended."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _chosen(mutants: Sequence[Mutant], patterns: Sequence[str]) -> list[Mutant]:
    """Return the mutants that a pattern names; raises ValueError for a pattern without any."""
    for pattern in patterns:
        if not any(fnmatchcase(mutant.name, pattern) for mutant in mutants):
            raise ValueError(f"no mutant is named {pattern}")
    return [
        mutant
        for mutant in mutants
        if not patterns or any(fnmatchcase(mutant.name, pattern) for pattern in patterns)
    ]


def _row(result: Result, *, markdown: bool) -> str:
    name = result.mutant.name
    if markdown:
        test = f"`{result.test.replace('|', ' ')}`" if result.test else f"survived: {result.why}"
        return f"| {name} | `{result.mutant.function}` | {test} |"
    verdict = f"caught    {result.test}" if result.test else f"SURVIVED  {result.why}"
    return f"{name:<60} {result.seconds:>5.1f} s  {verdict}"


def _try_all(mutants: Sequence[Mutant], *, markdown: bool) -> int:
    sources = Sources()
    patches = [(mutant, sources.patch(mutant)) for mutant in mutants]
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(Path(folder))
        for mutant, patch in patches:
            results.append(copy.try_out(mutant, patch))
            print(_row(results[-1], markdown=False), file=sys.stderr, flush=True)
        unsound = copy.unsound([one.test for one in results if one.test])
    results = [
        dataclasses.replace(one, test="", why=f"{one.test} fails without the bug too")
        if one.test in unsound
        else one
        for one in results
    ]
    if markdown:
        print("| mutant | in | caught by |", "|---|---|---|", sep="\n")
    for one in results:
        print(_row(one, markdown=markdown))
    survived = sum(not one.test for one in results)
    print(f"\n{len(results)} mutants: {len(results) - survived} caught, {survived} survived")
    return 1 if survived else 0


def _interrupted(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(prog="scripts/mutants", description="Try mutants.")
    parser.add_argument("names", metavar="NAME", nargs="*", help="mutants (default: all)")
    parser.add_argument("--list", action="store_true", help="list them, and run nothing")
    parser.add_argument("--markdown", action="store_true", help="print a table for the docs")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupted)
    try:
        mutants = _chosen(load(), arguments.names)
        if arguments.list:
            print("\n".join(f"{mutant.name:<60} {mutant.function}" for mutant in mutants))
            return 0
        return _try_all(mutants, markdown=arguments.markdown)
    except (StaleError, ValueError) as error:
        print(f"scripts/mutants: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
