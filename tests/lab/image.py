"""Building a lab image: a Debian release as a disk, its kernel and its initial ramdisk.

In two steps, each kept in the cache under the hash of its recipe:
  base    debootstrap and the packages (minutes, needs the mirror)
  image   base + wheels + the files of guest/, written as an ext4 file (half a minute, no network)
A step is built beside its final name and renamed when whole, so an interrupted build is never
taken for a finished one; fetched packages are kept, so the next build goes on from there.
The recipe does not contain the packages' versions: `build --refresh` takes the mirror's newest.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, ParamSpec

from tests.lab import process, ramdisk, wheels
from tests.lab.errors import LabError
from tests.lab.flavours import Suite
from tests.lab.needs import missing_to_build, require
from tests.lab.settings import LAB, PROJECT, Settings

DISK: Final = "6G"
"""Size of the guest's disk; the file is sparse."""

STEP_DEADLINE_S: Final = 1200

VENV: Final = "/opt/kata-pin"
"""The virtual environment in the guest that gets the wheels, and later the project."""

AGENT: Final = "/usr/local/lib/kata-lab"
_AGENT_FILES: Final = ("agent.py", "frames.py")

Tell = Callable[[str], None]
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Image:
    """A built image: the files that a machine boots from."""

    folder: Path

    @property
    def disk(self) -> Path:
        """The root file system, never written by a machine."""
        return self.folder / "disk.img"

    @property
    def kernel(self) -> Path:
        """The kernel, as Debian ships it."""
        return self.folder / "vmlinuz"

    @property
    def initrd(self) -> Path:
        """The initial ramdisk."""
        return self.folder / "initrd.img"


class Builder:
    """Builds and finds the image of one release."""

    def __init__(self, settings: Settings, suite: Suite, tell: Tell) -> None:
        self._settings = settings
        self._suite = suite
        self._tell = tell
        self._cache = settings.cache
        self._log = self._cache / "logs" / f"build-{suite.name}.log"
        self._limit = STEP_DEADLINE_S * settings.scale

    def packages(self) -> list[str]:
        """Return the packages that the image gets."""
        names: set[str] = set()
        for file in ("common", self._suite.name):
            for line in (LAB / "packages" / file).read_text().splitlines():
                if line.strip() and not line.startswith("#"):
                    names.add(line.strip())
        return sorted(names)

    def base_key(self) -> str:
        """Return the hash of everything that the base is made from."""
        recipe = [self._suite.name, *self.packages(), *_DPKG_LINES]
        return _digest("\n".join(recipe).encode())

    def image_key(self) -> str:
        """Return the hash of everything that the image is made from."""
        parts = [self.base_key().encode(), wheels.guest_lock().encode(), DISK.encode()]
        for name, file in self._guest_files():
            parts += [name.encode(), file.read_bytes(), str(file.stat().st_mode & 0o111).encode()]
        parts += [(LAB / name).read_bytes() for name in ("image.py", "ramdisk.py")]
        return _digest(b"\0".join(parts))

    def find(self) -> Image | None:
        """Return the image of the present recipe if it is built."""
        folder = self._image_folder()
        return Image(folder) if folder.exists() else None

    def build(self, *, refresh: bool = False) -> Image:
        """Return the image, building what is missing; `refresh` builds all of it anew."""
        image = self.find()
        if image and not refresh:
            return image
        require(missing_to_build(self._suite.name, self._cache), "build a lab image")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with _lock(self._cache / f"build-{self._suite.name}.lock", self._limit):
            if refresh:
                shutil.rmtree(self._base_folder(), ignore_errors=True)
                shutil.rmtree(self._image_folder(), ignore_errors=True)
            image = self.find()
            if image is None:
                started = time.monotonic()
                self._build_image(self._build_base())
                self._tell(f"image of {self._suite.name}: {time.monotonic() - started:.0f} s")
                self._drop_old()
            return Image(self._image_folder())

    def destroy(self) -> None:
        """Remove everything built for this release; fetched packages stay."""
        for kind in ("base", "images", "wheels"):
            for folder in (self._cache / kind).glob(f"{self._suite.name}-*"):
                shutil.rmtree(folder)

    def _base_folder(self) -> Path:
        return self._cache / "base" / f"{self._suite.name}-{self.base_key()}"

    def _image_folder(self) -> Path:
        return self._cache / "images" / f"{self._suite.name}-{self.image_key()}"

    def _guest_files(self) -> Iterator[tuple[str, Path]]:
        """Yield the path in the guest and the file of everything that the lab adds."""
        for layer in ("common", self._suite.name):
            top = LAB / "guest" / layer
            for file in sorted(top.rglob("*")):
                if file.is_file():
                    yield f"/{file.relative_to(top)}", file
        for name in _AGENT_FILES:
            yield f"{AGENT}/tests/lab/{name}", LAB / name

    def _build_base(self) -> Path:
        """Make the base: debootstrap, then the packages with apt inside.

        With apt and not with --include, because debootstrap resolves no virtual packages.
        """
        base = self._base_folder()
        if base.exists():
            return base
        part = base.with_suffix(".part")
        tree = part / "tree"
        bootstrapped = part / "bootstrapped"
        if not bootstrapped.exists():
            shutil.rmtree(part, ignore_errors=True)
            tree.mkdir(parents=True)
            self._step("debootstrap", self._bootstrap, tree)
            bootstrapped.touch()
        self._step("packages", self._install_packages, tree)
        part.rename(base)
        return base

    def _bootstrap(self, tree: Path) -> None:
        debs = self._debs()
        self._run(
            *(*process.PRIVATE, "debootstrap", "--variant=minbase", f"--cache-dir={debs}"),
            *(self._suite.name, str(tree), self._settings.find_mirror()),
        )

    def _install_packages(self, tree: Path) -> None:
        archives = tree / "var/cache/apt/archives"
        _copy_debs(self._debs(), archives)
        _write(tree / "usr/sbin/policy-rc.d", "#!/bin/sh\nexit 101\n", mode=0o755)
        _write(tree / "etc/dpkg/dpkg.cfg.d/kata-lab", "\n".join(_DPKG_LINES) + "\n")
        _write(tree / "etc/initramfs-tools/conf.d/kata-lab", "MODULES=list\n")
        shutil.copyfile("/etc/resolv.conf", tree / "etc/resolv.conf")
        try:
            self._chroot(tree, "dpkg", "--configure", "-a", "--force-confold")
            self._chroot(tree, "apt-get", "-q", "update")
            self._chroot(
                *(tree, "apt-get", "-q", "-y", "-o", "Dpkg::Use-Pty=0"),
                *("-o", "Dpkg::Options::=--force-confold", "install", "--no-install-recommends"),
                *self.packages(),
            )
        finally:
            _copy_debs(archives, self._debs())
        for file in archives.glob("*.deb"):
            file.unlink()
        shutil.rmtree(tree / "var/lib/apt/lists")
        for name in ("usr/sbin/policy-rc.d", "etc/resolv.conf"):
            (tree / name).unlink()

    def _build_image(self, base: Path) -> None:
        """Make the image from a copy of the base."""
        final = self._image_folder()
        part = final.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        tree = part / "tree"
        found = wheels.fetch(self._suite, self._cache, self._log, deadline_s=self._limit)
        self._step("copy of the base", self._copy_base, base, tree)
        self._step("wheels", self._install_wheels, tree, found)
        self._step("files", self._configure, tree)
        kernel = _only(tree / "boot", "vmlinuz-*")
        release = kernel.name.removeprefix("vmlinuz-")
        shutil.copy2(kernel, part / "vmlinuz")
        ramdisk.build(tree, release, part / "initrd.img")
        self._step("disk", self._make_disk, tree, part / "disk.img")
        shutil.rmtree(tree)
        packages = _versions(base / "tree")
        about = {"suite": self._suite.name, "kernel": release, "packages": packages}
        (part / "about.json").write_text(json.dumps(about, indent=1, sort_keys=True))
        part.rename(final)

    def _copy_base(self, base: Path, tree: Path) -> None:
        self._run("cp", "-a", "--reflink=auto", str(base / "tree"), str(tree))

    def _install_wheels(self, tree: Path, found: Path) -> None:
        """Make the virtual environment natively: under emulation it would take minutes."""
        inside = tree / "tmp/wheels"
        shutil.copytree(found, inside)
        self._chroot(tree, "python3", "-m", "venv", VENV)
        self._chroot(
            *(tree, f"{VENV}/bin/python", "-m", "pip", "--disable-pip-version-check"),
            *("install", "--no-index", "--no-deps", "--require-hashes"),
            *("--find-links=/tmp/wheels", "-r", "/tmp/wheels/lock.txt"),
        )
        shutil.rmtree(inside)

    def _configure(self, tree: Path) -> None:
        for name, file in self._guest_files():
            target = tree / name.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
            target.chmod(0o755 if os.access(file, os.X_OK) else 0o644)
        _write(tree / "etc/machine-id", "")
        self._chroot(tree, "passwd", "--quiet", "--delete", "root")
        self._chroot(tree, "sh", "/usr/local/lib/kata-lab/configure")

    def _make_disk(self, tree: Path, disk: Path) -> None:
        with disk.open("wb") as file:
            file.truncate(int(DISK.removesuffix("G")) * 2**30)
        self._run("mkfs.ext4", "-q", "-F", "-m", "0", "-L", "root", "-d", str(tree), str(disk))

    def _drop_old(self) -> None:
        """Remove what older recipes of this release left; a running machine keeps its open disk."""
        keep = {self._base_folder(), self._image_folder()}
        for kind in ("base", "images"):
            for folder in (self._cache / kind).glob(f"{self._suite.name}-*"):
                if folder not in keep:
                    shutil.rmtree(folder)

    def _debs(self) -> Path:
        folder = self._cache / "debs" / self._suite.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _step(self, name: str, step: Callable[P, None], *args: P.args, **kw: P.kwargs) -> None:
        started = time.monotonic()
        step(*args, **kw)
        self._tell(f"  {name}: {time.monotonic() - started:.0f} s")

    def _chroot(self, tree: Path, *argv: str) -> None:
        inside = f'mount -t proc proc "{tree}/proc" && exec chroot "{tree}" "$@"'
        self._run(*process.PRIVATE, "sh", "-c", inside, "sh", *argv)

    def _run(self, *argv: str) -> None:
        env = {
            **{name: os.environ[name] for name in os.environ if name.lower().endswith("_proxy")},
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "DEBIAN_FRONTEND": "noninteractive",
            "HOME": "/root",
            "LC_ALL": "C.UTF-8",
        }
        process.run(argv, deadline_s=self._limit, log=self._log, env=env, cwd=PROJECT)


_DPKG_LINES: Final = (
    # A lab machine is read by nobody, and its build is not worth a sync for every file.
    "force-unsafe-io",
    "path-exclude=/usr/share/doc/*",
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/info/*",
)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def _write(file: Path, text: str, *, mode: int = 0o644) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(mode)


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise LabError(f"expected one {pattern} in {folder}, found {len(found)}")
    return found[0]


def _copy_debs(source: Path, target: Path) -> None:
    """Copy packages that are not there yet; a link where the file system allows one."""
    for file in source.glob("*.deb"):
        copy = target / file.name
        if not copy.exists():
            try:
                copy.hardlink_to(file)
            except OSError:
                shutil.copyfile(file, copy)


def _versions(tree: Path) -> dict[str, str]:
    """Return the installed packages and versions of a Debian tree."""
    listing = subprocess.run(
        ["dpkg-query", f"--admindir={tree}/var/lib/dpkg", "-W", "-f", "${Package} ${Version}\\n"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    return dict(line.split(" ", 1) for line in listing.splitlines())


@contextmanager
def _lock(file: Path, deadline_s: float) -> Iterator[None]:
    """Hold the lock `file`; raise LabError when another build keeps it too long."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    limit = time.monotonic() + deadline_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > limit:
                    raise LabError(f"another build holds {file}") from None
                time.sleep(0.5)
        yield
    finally:
        os.close(descriptor)
