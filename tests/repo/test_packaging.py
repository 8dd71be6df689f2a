"""What a node gets: pinned packages with known licences, and a wheel with the same bytes twice."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from scripts.packages import build_image, rootfs

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
LICENCES = (ROOT / "docs/licences.md").read_text()
NODE_LOCKS = ("requirements.lock", "requirements-cri.lock")

SPDX = {
    "3-Clause BSD License": "BSD-3-Clause",  # protobuf's metadata has words
}


def locked(*names: str) -> dict[str, str]:
    """Return the versions that lock files name, each with at least one hash."""
    found = {}
    for name in names:
        text = (ROOT / name).read_text()
        for entry in re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE):
            if (line := re.match(r"([a-z0-9-]+)==(\S+)", entry)) is not None:
                assert "--hash=sha256:" in entry, f"{name}: {line[1]} has no hash"
                found[line[1]] = line[2]
    return found


def rows() -> dict[str, tuple[str, str]]:
    """Return version and licence of each package of the page."""
    lines = re.findall(r"^\| ([a-z0-9-]+) \| ([0-9.]+) \| ([^|]+) \|", LICENCES, re.MULTILINE)
    return {name: (version, licence.strip()) for name, version, licence in lines}


def test_the_licences_are_those_of_the_lock() -> None:
    """Every package that a node gets is on the page, in the version that it gets, and no other."""
    assert {name: version for name, (version, _) in rows().items()} == locked(*NODE_LOCKS)


@pytest.mark.parametrize("name", sorted(rows()))
def test_a_licence_is_what_the_package_says(name: str) -> None:
    """Where the metadata has an SPDX expression, or words for one, it is that."""
    found = metadata.metadata(name)
    said = "".join(found.get_all("License-Expression") or found.get_all("License") or ())
    every = found.get_all("Classifier") or ()
    classifiers = [one for one in every if one.startswith("License ::")]
    licence = rows()[name][1]
    if said:
        assert licence == SPDX.get(said, said)
    elif name == "qemu-qmp":
        assert {one.rpartition("(")[2] for one in classifiers} == {"LGPLv2+)", "GPLv2)"}
    else:
        assert [one.rpartition(":: ")[2] for one in classifiers] == [f"{licence} License"]


def test_no_gpl_only_part_is_imported() -> None:
    """Of qemu.qmp the page names each module with its licence; those imported are LGPL."""
    folder = Path(str(metadata.distribution("qemu-qmp").locate_file("qemu/qmp")))
    modules = {one.stem for one in folder.glob("*.py")} - {"__init__"}
    gpl = {one for one in modules if "GNU GPL" in (folder / f"{one}.py").read_text()}
    assert gpl == {"legacy"}
    table = LICENCES.partition("## qemu.qmp")[2]
    named = {line: set(re.findall(r"`\.(\w+)`", line)) for line in table.splitlines()}
    assert set().union(*named.values()) == modules
    (only,) = [line for line, names in named.items() if "legacy" in names]
    assert "GPL-2.0-only" in only
    code = (
        "import sys, kata_pin.rights.monitor\n"
        "print(*(one for one in sys.modules if one.startswith('qemu.qmp.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = {one.removeprefix("qemu.qmp.") for one in done.stdout.split()}
    (lgpl,) = [line for line, names in named.items() if "qmp_client" in names]
    assert imported == named[lgpl]


def test_the_build_tool_is_pinned() -> None:
    """One version of setuptools everywhere: it decides the bytes of a wheel."""
    (tool,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    name, _, version = tool.partition("==")
    assert locked("requirements-build.lock") == {name: version}
    assert locked("requirements-dev.lock")[name] == version


def test_the_extra_is_locked_as_it_is_tested() -> None:
    """What the extra `cri` brings to a node is what the tests run with."""
    tested = locked("requirements-dev.lock")
    assert {name: tested[name] for name in locked("requirements-cri.lock")} == locked(
        "requirements-cri.lock"
    )


def test_the_readme_installs_what_is_locked() -> None:
    """Every package has a hash, the build tool too, and nothing else is fetched."""
    installs = [line for line in README.splitlines() if "pip install" in line]
    assert len(installs) == 2
    assert "--require-hashes -r requirements.lock -r requirements-build.lock" in installs[0]
    assert "--no-deps --no-build-isolation ." in installs[1]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git: the wheel is a commit's")
@pytest.mark.timeout(180)
def test_the_wheel_has_the_same_bytes_twice(tmp_path: Path) -> None:
    """Other folder, umask, time zone and locale: the same sha256, as it is printed."""
    sums = []
    for number, (umask, zone) in enumerate(((0o022, "UTC"), (0o077, "Asia/Tokyo"))):
        folder = tmp_path / str(number)
        temporary = tmp_path / f"tmp{number}"
        temporary.mkdir()
        venv = {"VENV": sys.prefix, "TMPDIR": str(temporary), "TZ": zone}
        before = os.umask(umask)
        try:
            done = subprocess.run(
                [str(ROOT / "scripts/wheel"), str(folder)],
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, **venv},
            )
        finally:
            os.umask(before)
        assert done.returncode == 0, done.stderr
        sums.append(done.stdout)
    assert sums[0] == sums[1]
    assert re.fullmatch(r"[0-9a-f]{64}  kata_pin-\S+\.whl\n", sums[0])


def test_the_containerfile_starts_as_the_image() -> None:
    """The published recipe ends with the settings that scripts/image writes."""
    text = (ROOT / "docs/image/Containerfile").read_text()
    last = dict(
        line.split(" ", 1) for line in text.rpartition("FROM scratch")[2].split("\n") if line
    )
    config = build_image.config("abc")
    assert last["USER"] == config["User"]
    assert last["WORKDIR"] == config["WorkingDir"]
    assert [last["ENV"]] == config["Env"]
    assert last["STOPSIGNAL"] == config["StopSignal"]
    assert json.loads(last["ENTRYPOINT"]) == config["Entrypoint"]
    assert f"debian:{rootfs.SUITE}-slim" in text
