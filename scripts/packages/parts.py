"""What an image and a package are made of: Debian's packages, locked wheels, and our own wheel.

Everything is fetched by apt and pip, which check signatures and hashes, and kept in the user's
cache; nothing of the machine that builds gets into the result.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.parser import BytesParser
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
KEYRING: Final = Path("/usr/share/keyrings/debian-archive-keyring.gpg")

NOT_HERE: Final = 77
"""Exit status where this machine lacks what is needed, as of scripts/kubelet."""

_PLATFORMS: Final = {
    "amd64": ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"),
    "arm64": ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64"),
}

UNUSED: Final = frozenset({"pygments", "markdown-it-py", "mdurl"})
"""Locked because rich's metadata wants them; only its parts that we do not import do."""

_LEFT_OUT: Final = re.compile(
    r"qemu/qmp/legacy\.py\Z|.*/tests?/|[^/]*\.data/(scripts|headers|data)/"
)
"""Of wheels: the one module that is GPL only, tests, and what is installed beside a package."""

_DEADLINE_S: Final = 600


class NotHereError(Exception):
    """This machine lacks a program or a mirror."""


class BuildError(Exception):
    """A step failed."""


@dataclass(frozen=True, slots=True)
class Component:
    """One part, as the bill of materials names it."""

    kind: str  #: `deb` or `pypi`
    name: str
    version: str
    licence: str = ""
    sha256: str = ""
    arch: str = ""


def cache_folder() -> Path:
    """Return where parts are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "kata-pin" / "packages"


def run(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> str:
    """Return a program's output; raises BuildError with what it complained of."""
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_DEADLINE_S,
        env=None if env is None else {**os.environ, **env},
        cwd=cwd,
    )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip())[-2000:]
        raise BuildError(f"{' '.join(command[:4])} failed with status {done.returncode}:\n{said}")
    return done.stdout


def need(*programs: str) -> None:
    """Raise NotHereError unless all of these programs are here."""
    missing = [one for one in programs if shutil.which(one) is None]
    if missing:
        raise NotHereError(f"{', '.join(missing)} not installed")


def digest(path: Path, algorithm: str = "sha256") -> str:
    """Return the digest of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


# -- Debian's packages


def debs(folder: Path, suite: str, arch: str, names: Sequence[str]) -> list[Path]:
    """Download packages and all that they need into a folder, from the mirrors of this machine.

    apt resolves and verifies them for an empty system of that release. Raises NotHereError and
    BuildError.
    """
    need("apt-get", "dpkg-deb")
    if not KEYRING.exists():
        raise NotHereError("package debian-archive-keyring not installed")
    state = folder / "apt"
    for name in ("etc/preferences.d", "lists/partial", "archives/partial"):
        (state / name).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    (state / "sources.list").write_text("\n".join(_sources(suite)) + "\n")
    config = {
        "Dir": state,
        "Dir::Etc": "etc",
        "Dir::Etc::SourceList": state / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State": state,
        "Dir::State::status": state / "status",
        "Dir::Cache": state,
        "APT::Architecture": arch,
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Debug::NoLocking": "true",
    }
    lines = [f'{key} "{value}";' for key, value in config.items()]
    (state / "apt.conf").write_text("\n".join([*lines, f'APT::Architectures {{"{arch}";}};', ""]))
    env = {"APT_CONFIG": str(state / "apt.conf"), "LC_ALL": "C"}
    run(["apt-get", "-q", "update", "-o", "APT::Update::Error-Mode=any"], env=env)
    run(["apt-get", "-q", "-y", "install", "--download-only", *names], env=env)
    return sorted((state / "archives").glob("*.deb"))


def _sources(suite: str) -> list[str]:
    """Return the lines of sources.list, with the mirrors that this machine's apt is given."""
    sites = _sites()
    if "Debian" not in sites and os.geteuid() == 0:
        run(["apt-get", "-q", "update"])  # without lists apt does not say whose a mirror is
        sites = _sites()
    if "Debian" not in sites:
        raise NotHereError("apt is configured with no mirror of Debian")
    wanted = [
        ("Debian", suite),
        ("Debian", f"{suite}-updates"),
        ("Debian-Security", f"{suite}-security"),
    ]
    return [
        f"deb [signed-by={KEYRING}] {sites[label]} {one} main"
        for label, one in wanted
        if label in sites
    ]


def _sites() -> dict[str, str]:
    """Return apt's mirrors by their label."""
    text = run(["apt-get", "indextargets", "--format", "$(ORIGIN)|$(LABEL)|$(REPO_URI)"])
    found = {}
    for line in text.splitlines():
        origin, label, site = line.split("|", 2)
        if origin == "Debian" and site:
            found[label] = site
    return found


def deb_component(path: Path) -> Component:
    """Return what a .deb says of itself."""
    fields = run(
        ["dpkg-deb", "-W", "--showformat=${Package}|${Version}|${Architecture}", str(path)]
    )
    name, version, arch = fields.split("|")
    return Component("deb", name, version, sha256=digest(path), arch=arch)


# -- wheels


def wheels(folder: Path, python: str, arch: str, lock: Path) -> list[Path]:
    """Download the wheels that a lock file names, hashes checked, for a Python and processor."""
    folder.mkdir(parents=True, exist_ok=True)
    abi = f"cp{python.replace('.', '')}"
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
    command += ["--no-deps", "--require-hashes", "--only-binary=:all:", "--progress-bar=off"]
    command += ["--implementation=cp", f"--python-version={python}"]
    command += [f"--platform={one}" for one in _PLATFORMS[arch]]
    command += [f"--abi={abi}", "--abi=abi3", "--abi=none", f"--dest={folder}", "-r", str(lock)]
    run(command)
    return sorted(folder.glob("*.whl"))


def wheel_component(path: Path) -> Component:
    """Return what a wheel says of itself (METADATA, core metadata of Python packages)."""
    with zipfile.ZipFile(path) as archive:
        (name,) = [one for one in archive.namelist() if one.endswith(".dist-info/METADATA")]
        fields = BytesParser().parsebytes(archive.read(name), headersonly=True)
    licence = fields["License-Expression"] or fields["License"] or ""
    named = re.sub(r"[-_.]+", "-", fields["Name"]).lower()
    return Component("pypi", named, fields["Version"], licence.strip(), digest(path))


def unpack_wheel(path: Path, folder: Path) -> None:
    """Unpack a wheel as an installer would, without its scripts: they would name an interpreter."""
    with zipfile.ZipFile(path) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith("/") or _LEFT_OUT.match(name):
                continue
            inner = re.sub(r"^[^/]*\.data/(purelib|platlib)/", "", name)
            if inner.startswith("/") or ".." in inner.split("/"):
                raise BuildError(f"{path.name} has a file {name}")
            target = folder / inner
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(name))


def own_wheel(folder: Path, commit: str) -> Path:
    """Build the wheel of a commit; raises BuildError."""
    run([str(ROOT / "scripts/wheel"), str(folder), commit], env={"VENV": sys.prefix})
    (found,) = folder.glob("kata_pin-*.whl")
    return found


# -- the commit


def work_tree() -> str:
    """Return a commit of the work tree: HEAD, or one of git's objects that no branch names."""
    if not run(["git", "status", "--porcelain"], cwd=ROOT):
        return commit("HEAD")
    index = cache_folder() / f"index-{os.getpid()}"
    index.parent.mkdir(parents=True, exist_ok=True)
    date = run(["git", "log", "-1", "--format=%cI"], cwd=ROOT).strip()
    someone = {"NAME": "kata-pin", "EMAIL": "kata-pin@localhost", "DATE": date}
    env = {
        f"GIT_{who}_{key}": text for who in ("AUTHOR", "COMMITTER") for key, text in someone.items()
    }
    env["GIT_INDEX_FILE"] = str(index)
    try:
        run(["git", "add", "-A"], env=env, cwd=ROOT)
        tree = run(["git", "write-tree"], env=env, cwd=ROOT).strip()
        return run(
            ["git", "commit-tree", "-p", "HEAD", "-m", "work tree", tree], env=env, cwd=ROOT
        ).strip()
    finally:
        index.unlink(missing_ok=True)


def commit(name: str) -> str:
    """Return the full name of a commit."""
    return run(["git", "rev-parse", "--verify", f"{name}^{{commit}}"], cwd=ROOT).strip()


def commit_time(name: str) -> int:
    """Return when a commit was made, in seconds since 1970."""
    return int(run(["git", "log", "-1", "--format=%ct", name], cwd=ROOT))


def files_of(folder: Path) -> Iterator[Path]:
    """Yield everything below a folder, sorted, no link followed."""
    for path in sorted(folder.iterdir()):
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from files_of(path)
