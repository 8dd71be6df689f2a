"""The file system of the image: Debian's Python, the libraries it needs, locked wheels, our code.

No shell, no package manager, nothing with a set-uid bit. The base (everything but our own code) is
kept in the cache by what it is made of.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from scripts.packages import oci, parts
from scripts.packages.oci import Layer
from scripts.packages.parts import BuildError, Component

SUITE: Final = "trixie"
PYTHON: Final = "3.13"

PACKAGES: Final = (
    f"python{PYTHON}-minimal",
    f"libpython{PYTHON}-stdlib",
    "libgcc-s1",
    "libstdc++6",
)
"""What apt is asked for: libgcc_s is loaded by glibc when a thread ends, libstdc++ by protobuf."""

TRIPLETS: Final = {"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}

LIBRARIES: Final = "usr/lib/kata-pin"
"""Our code and the wheels; nothing else of Python's path is used (see entry())."""


def entry(python: str = "/usr/bin/python3", libraries: str = f"/{LIBRARIES}") -> str:
    """Return the program /usr/bin/kata-pin for an interpreter and libraries, by absolute paths."""
    return f"""\
#!{python} -IS
import sys

sys.path.append("{libraries}")
from kata_pin.cli.entry import main

sys.exit(main())
"""


UID: Final = 65531
REPORTER: Final = 65532
"""The daemon's user and group, and a user in that group for what has no rights at all."""

_FILES: Final = {
    "etc/passwd": f"root:x:0:0::/:/none\nkata-pin:x:{UID}:{UID}::/:/none\n"
    f"reporter:x:{REPORTER}:{UID}::/:/none\nnobody:x:65534:65534::/:/none\n",
    "etc/group": f"root:x:0:\nkata-pin:x:{UID}:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "usr/bin/kata-pin": entry(),
}

_FOLDERS: Final = ("dev", "proc", "run", "sys", "tmp")

_LINKS: Final = {
    "bin": "usr/bin",
    "lib": "usr/lib",
    "lib64": "usr/lib64",
    "usr/bin/python3": f"python{PYTHON}",
}

_STDLIB_WITHOUT: Final = re.compile(
    r"(test|idlelib|tkinter|turtledemo|ensurepip|venv|pydoc_data|_pyrepl|curses|dbm|unittest|__phello__)/"
    r"|config-[^/]*/|turtle\.py\Z|sitecustomize\.py\Z"
    r"|lib-dynload/(_test|_ctypes_test|_xxtestfuzz|xx|_tkinter|_dbm|_gdbm|_curses|readline|_codecs_)"
)
"""Parts of the standard library that no program of the image uses."""

_LOCKS: Final = (parts.ROOT / "requirements.lock",)
_CRI_LOCK: Final = parts.ROOT / "requirements-cri.lock"

_BASE_TEXT: Final = "Debian's Python and locked libraries"


@dataclass(frozen=True, slots=True)
class Base:
    """A built base: its folder, its layer, and what it is made of."""

    root: Path
    layer: Layer
    components: tuple[Component, ...]


def base(arch: str, *, refresh: bool = False, cri: bool = False) -> Base:
    """Return the base, from the cache if it was built of the same lock files by the same code.

    `refresh` asks Debian's mirror for newer packages, `cri` adds the extra's libraries. Raises
    NotHereError and BuildError.
    """
    locks = (*_LOCKS, _CRI_LOCK) if cri else _LOCKS
    sources = [*sorted(Path(__file__).parent.glob("*.py")), *locks]
    key = hashlib.sha256(b"\0".join(one.read_bytes() for one in sources)).hexdigest()[:16]
    folder = parts.cache_folder() / f"base-{SUITE}-{arch}-{key}"
    with _locked(folder.with_suffix(".lock")):
        if refresh or not (folder / "base.json").exists():
            _build(folder, arch, locks)
        found = json.loads((folder / "base.json").read_text())
        layer = Layer((folder / "layer.tar.gz").read_bytes(), found["diff_id"], _BASE_TEXT)
    components = tuple(Component(**one) for one in found["components"])
    return Base(folder / "root", layer, components)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(folder: Path, arch: str, locks: Iterable[Path]) -> None:
    parts.need("apt-get", "dpkg-deb", "readelf")
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as text:
        work = Path(text)
        tree, root = work / "tree", work / "root"
        debs = parts.debs(work, SUITE, arch, PACKAGES)
        owners: dict[str, Component] = {}
        for deb in debs:
            found = parts.deb_component(deb)
            part = work / "one"
            parts.run(["dpkg-deb", "-x", str(deb), str(part)])
            for path in parts.files_of(part):
                owners[_merged(path.relative_to(part))] = found
            _merge(part, tree)
        used = _python(tree, root, arch)
        wheels = [
            wheel
            for lock in locks
            for wheel in parts.wheels(work / lock.stem, PYTHON, arch, lock)
            if parts.wheel_component(wheel).name not in parts.UNUSED
        ]
        for wheel in wheels:
            parts.unpack_wheel(wheel, root / LIBRARIES)
        used |= _libraries(tree, root, arch)
        components = sorted({owners[path] for path in used}, key=lambda one: one.name)
        for one in components:
            _copy(tree, root, f"usr/share/doc/{one.name}/copyright")
        _own_files(root)
        _compile(root, root, arch, f"usr/lib/python{PYTHON}", LIBRARIES, sources=False)
        components += [parts.wheel_component(wheel) for wheel in wheels]
        made = oci.layer(root, parts.files_of(root), _BASE_TEXT)
        folder.mkdir()
        root.rename(folder / "root")
        (folder / "layer.tar.gz").write_bytes(made.data)
        written = {"diff_id": made.diff_id, "components": [asdict(one) for one in components]}
        (folder / "base.json").write_text(json.dumps(written))  # last: it says that all is there


def _merged(path: Path) -> str:
    """Return a path of a package on a system whose /lib is a link to /usr/lib."""
    return f"usr/{path}" if path.parts[0] in {"lib", "lib64", "bin", "sbin"} else str(path)


def _merge(part: Path, tree: Path) -> None:
    """Move a package's files to the tree of all."""
    for path in parts.files_of(part):
        target = tree / _merged(path.relative_to(part))
        if path.is_dir() and not path.is_symlink():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target, follow_symlinks=False)
    shutil.rmtree(part)


def _copy(tree: Path, root: Path, name: str) -> str:
    """Copy a file with the links that lead to it; return the path of the file itself."""
    for _ in range(8):
        source, target = tree / name, root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.is_symlink():
            shutil.copyfile(source, target, follow_symlinks=False)
        if not source.is_symlink():
            target.chmod(0o755 if source.stat().st_mode & 0o100 else 0o644)
            return name
        link = os.readlink(source)
        name = os.path.normpath(link.lstrip("/") if link.startswith("/") else f"{name}/../{link}")
        name = _merged(Path(name))
    raise BuildError(f"too many links: {name}")


def _python(tree: Path, root: Path, arch: str) -> set[str]:
    """Copy the interpreter and its standard library; return what was copied."""
    used = {_copy(tree, root, f"usr/bin/python{PYTHON}")}
    home = tree / f"usr/lib/python{PYTHON}"
    for path in parts.files_of(home):
        inner = str(path.relative_to(home))
        if path.is_dir() or _STDLIB_WITHOUT.match(inner) or "__pycache__" in inner:
            continue
        name = str(path.relative_to(tree))
        if path.is_symlink() and not path.exists():
            continue  # into a package that is not asked for
        used.add(_copy(tree, root, name))
    loader = {"amd64": "ld-linux-x86-64.so.2", "arm64": "ld-linux-aarch64.so.1"}[arch]
    where = "usr/lib64" if arch == "amd64" else "usr/lib"
    used.add(_copy(tree, root, f"{where}/{loader}"))
    return used


def _libraries(tree: Path, root: Path, arch: str) -> set[str]:
    """Copy the shared libraries that the programs and modules there need, and those of glibc."""
    places = [f"usr/lib/{TRIPLETS[arch]}", "usr/lib"]
    used: set[str] = set()
    wanted = {"libgcc_s.so.1", "libnss_files.so.2", "libnss_dns.so.2", "libresolv.so.2"}
    pending = [path for path in parts.files_of(root) if path.is_file() and _is_elf(path)]
    while pending or wanted:
        for path in pending:
            wanted |= _needed(path)
        pending = []
        for name in sorted(wanted):
            place = next((one for one in places if (tree / one / name).exists()), None)
            if place is None:
                if name.startswith(("ld-linux", "libnss_")):
                    continue
                raise BuildError(f"no package has the library {name}")
            if not (root / place / name).exists():
                used.add(_copy(tree, root, f"{place}/{name}"))
                pending.append(root / place / name)
        wanted = set()
    return used


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _needed(path: Path) -> set[str]:
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", parts.run(["readelf", "-dW", str(path)])))


def _own_files(root: Path) -> None:
    for name in _FOLDERS:
        (root / name).mkdir(exist_ok=True)
    for name, target in _LINKS.items():
        if (root / target).exists() or "/" in name:
            os.symlink(target, root / name)
    for name, text in _FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "usr/bin/kata-pin").chmod(0o755)


def _compile(base: Path, root: Path, arch: str, *folders: str, sources: bool) -> None:
    """Compile all Python below folders of a root with the base's interpreter; keep sources or not.

    Compiled files are believed without a look at the source: the root is read-only. Those of others
    are left out, a seventh of the image: tracebacks have their line numbers all the same.
    """
    libraries = f"{base}/usr/lib/{TRIPLETS[arch]}"
    loader = next(path for path in (base / "usr/lib64", base / "usr/lib") if path.exists())
    (program,) = loader.glob("ld-linux*")
    python = [str(program), "--library-path", libraries, f"{base}/usr/bin/python{PYTHON}"]
    code = (
        "import compileall, sys\n"
        "from py_compile import PycInvalidationMode as Mode\n"
        "ok = [compileall.compile_dir(one, quiet=1, stripdir=sys.argv[1], prependdir='/',\n"
        "      legacy=sys.argv[2] == 'alone', invalidation_mode=Mode.UNCHECKED_HASH,\n"
        "      maxlevels=20) for one in sys.argv[3:]]\n"
        "sys.exit(not all(ok))\n"
    )
    paths = [str(root / one) for one in folders]
    kind = "beside" if sources else "alone"
    parts.run([*python, "-ISB", "-c", code, str(root), kind, *paths], env={"PYTHONHASHSEED": "0"})
    for path in () if sources else [one for root in paths for one in Path(root).rglob("*.py")]:
        if not path.with_suffix(".pyc").exists():
            raise BuildError(f"{path} was not compiled")
        path.unlink()


def own(folder: Path, made: Base, arch: str, commit: str) -> Component:
    """Put what a commit adds to the base into a folder; raises BuildError.

    Those are our code, compiled, and our licence.
    """
    with tempfile.TemporaryDirectory() as work:
        wheel = parts.own_wheel(Path(work), commit)
        parts.unpack_wheel(wheel, folder / LIBRARIES)
        component = parts.wheel_component(wheel)
    _compile(made.root, folder, arch, f"{LIBRARIES}/kata_pin", sources=True)
    licence = folder / "usr/share/doc/kata-pin/copyright"
    licence.parent.mkdir(parents=True)
    shutil.copyfile(parts.ROOT / "LICENSE", licence)
    return component


def unwanted(paths: Iterable[Path]) -> list[str]:
    """Return what must not be in an image: set-uid files, and what everybody may write."""
    return [str(path) for path in paths if not path.is_symlink() and path.stat().st_mode & 0o6002]
