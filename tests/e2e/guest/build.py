#!/usr/bin/env python3
"""Builds the test guest: Debian's kernel and a tiny initial ramdisk; prints the folder of both.

    tests/e2e/guest/build.py [--tree TREE] [--out FOLDER]

TREE is a Debian root with a kernel, busybox-static, python3 and, to measure latency, rt-tests;
without one the first two are fetched with `apt-get download`, and the others are this machine's, if
it has rt-tests. Without --out the result is kept
in the user's cache folder, by what it was made of, and an existing one is taken. Needs binutils;
with --tree neither root nor a network. The guest: `init` and `agent.py` beside this file.
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2]))

from tests.lab.ramdisk import Archive  # noqa: E402 - the path comes first

MODULES: Final = ("virtio_pci", "virtio_console", "vmw_vsock_virtio_transport")
LOAD_MODULES: Final = ("virtio_net", "virtiofs")
"""What a container loads that works on the network and on its shared folder; in load order in
/load, without those of MODULES."""

LATENCY: Final = ("cyclictest", "oslat")
"""Programs of rt-tests."""

PYTHON: Final = "usr/bin/python3"
LOADER: Final = "lib64/ld-linux-x86-64.so.2"
LIBRARIES: Final = ("lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu")
FOLDER: Final = 0o040755
PROGRAM: Final = 0o100755
FILE: Final = 0o100644
DOWNLOAD_S: Final = 300


def main() -> int:
    """Build and print the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tree", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tree = given.tree or fetched(Path(folder))
        print(build(tree, given.out or cache(tree)))
    return 0


def build(tree: Path, out: Path) -> Path:
    """Write vmlinuz and initrd.img of the guest to `out` if they are not there; return it."""
    if not (out / "initrd.img").exists():
        out.mkdir(parents=True, exist_ok=True)
        kernel = _kernel(tree)
        shutil.copyfile(kernel, out / "vmlinuz")
        part = out / f"initrd.part{os.getpid()}"
        part.write_bytes(ramdisk(tree, kernel.name.removeprefix("vmlinuz-")))
        part.rename(out / "initrd.img")
    return out


def ramdisk(tree: Path, release: str) -> bytes:
    """Return the initial ramdisk for a kernel release."""
    archive = Archive()
    folders = ("bin", "dev", "lib", "lib64", "load", "modules", "proc", "sys", "usr", "usr/lib")
    for name in folders:
        archive.add(name, FOLDER)
    archive.add("bin/busybox", PROGRAM, _busybox(tree).read_bytes())
    archive.add("agent.py", PROGRAM, (HERE / "agent.py").read_bytes())
    archive.add("init", PROGRAM, (HERE / "init").read_bytes())
    root = tree if (tree / PYTHON).exists() else Path("/")
    for name, mode, data in python(root):
        archive.add(name, mode, data)
    programs = [(root / PYTHON).resolve()]
    for name in LATENCY:
        if (root / "usr/bin" / name).exists():
            programs.append(root / "usr/bin" / name)
            archive.add(f"bin/{name}", PROGRAM, programs[-1].read_bytes())
    for name, path in libraries(root, programs).items():
        archive.add(f"lib/{name}", PROGRAM, path.read_bytes())
    own = dict(modules(tree, release, MODULES))
    more = dict(modules(tree, release, MODULES + LOAD_MODULES))
    for number, (name, data) in enumerate(more.items()):
        folder = "modules" if name in own else "load"
        archive.add(f"{folder}/{number:02}-{name}.ko", FILE, data)
    return archive.finish()


def modules(tree: Path, release: str, names: tuple[str, ...]) -> list[tuple[str, bytes]]:
    """Return modules and what they need, in loading order; built-in ones are left out.

    Read from the modules themselves: a package that was only unpacked has no modules.dep.
    """
    top = _first(tree, f"lib/modules/{release}", f"usr/lib/modules/{release}")
    files = {_stem(path): path for path in (top / "kernel").rglob("*.ko*")}
    order: dict[str, bytes] = {}

    def add(name: str) -> None:
        if name not in order and name in files:
            data = unpacked(files[name])
            for needed in _depends(data):
                add(needed)
            order[name] = data

    for name in names:
        add(name)
    return list(order.items())


def unpacked(file: Path) -> bytes:
    """Return a module's content, which Debian 13 ships compressed."""
    data = file.read_bytes()
    return lzma.decompress(data) if file.suffix == ".xz" else data


def _depends(module: bytes) -> list[str]:
    """Return what a module needs, from its .modinfo section: `depends=a,b`."""
    line = module.partition(b"\0depends=")[2].partition(b"\0")[0].decode()
    return [name.replace("-", "_") for name in line.split(",") if name]


def python(tree: Path) -> Iterator[tuple[str, int, bytes]]:
    """Yield name, mode and content of what `python3 -IS` needs for modules that are built in."""
    program = (tree / PYTHON).resolve()
    home = f"usr/lib/{program.name}"
    for folder in ("usr/bin", home, f"{home}/encodings", f"{home}/lib-dynload"):
        yield folder, FOLDER, b""
    yield PYTHON, PROGRAM, program.read_bytes()
    for name in ("os.py", *(f"encodings/{name}.py" for name in ("__init__", "aliases", "utf_8"))):
        yield f"{home}/{name}", FILE, (tree / home / name).read_bytes()
    yield LOADER, PROGRAM, _first(tree, LOADER, f"usr/{LOADER}").read_bytes()


def libraries(tree: Path, programs: Sequence[Path]) -> dict[str, Path]:
    """Return the libraries that programs need, and those that they need, by name."""
    found: dict[str, Path] = {}
    waiting = [*programs]
    while waiting:
        listed = subprocess.run(
            ["readelf", "-d", str(waiting.pop())],
            check=True, capture_output=True, text=True, timeout=30,
        ).stdout  # fmt: skip
        for name in re.findall(r"\(NEEDED\).*\[(.+)\]", listed):
            if name not in found and not name.startswith("ld-linux"):
                found[name] = _first(tree, *(f"{folder}/{name}" for folder in LIBRARIES))
                waiting.append(found[name])
    return found


def fetched(folder: Path) -> Path:
    """Return a tree of this release's kernel and busybox, fetched with apt."""
    listed = subprocess.run(
        ["apt-cache", "depends", "linux-image-amd64"],
        check=True, capture_output=True, text=True, timeout=60,
    ).stdout  # fmt: skip
    kernel = next(word for word in listed.split() if word.startswith("linux-image-") and
                  word != "linux-image-amd64")  # fmt: skip
    subprocess.run(
        ["apt-get", "-q", "download", kernel, "busybox-static"],
        check=True, cwd=folder, stdout=sys.stderr, timeout=DOWNLOAD_S,
    )  # fmt: skip
    tree = folder / "tree"
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", str(package), str(tree)], check=True, timeout=120)
    return tree


def cache(tree: Path) -> Path:
    """Return the folder for the guest that this tree and these sources make."""
    digest = hashlib.sha256(_kernel(tree).read_bytes())
    for name in ("build.py", "init", "agent.py"):
        digest.update((HERE / name).read_bytes())
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "kata-pin/guest" / digest.hexdigest()[:12]


def _kernel(tree: Path) -> Path:
    found = sorted((tree / "boot").glob("vmlinuz-*"))
    if not found:
        raise SystemExit(f"there is no kernel in {tree}/boot")
    return found[-1]


def _busybox(tree: Path) -> Path:
    return _first(tree, "bin/busybox", "usr/bin/busybox")


def _first(tree: Path, *names: str) -> Path:
    for name in names:
        if (tree / name).exists():
            return tree / name
    raise SystemExit(f"there is no {names[0]} in {tree}")


def _stem(path: Path) -> str:
    return path.name.partition(".")[0].replace("-", "_")


if __name__ == "__main__":
    sys.exit(main())
