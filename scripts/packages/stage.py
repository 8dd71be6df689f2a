"""What a .deb and an .rpm share: their command line, and their files.

The files are those that `kata-pin install` writes, but for hooks, which that command registers, and
the locked libraries.
"""

from __future__ import annotations

import argparse
import gzip
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from kata_pin.cli.node.files import Choices, NodeFile, node_files
from scripts.packages import parts, rootfs
from scripts.packages.parts import Component

PROGRAM: Final = "/usr/bin/kata-pin"
DOCS: Final = "/usr/share/doc/kata-pin"


def command(
    name: str,
    about: str | None,
    *,
    tool: str,
    releases: Iterable[str],
    default: str,
    build: Callable[[Path, str], Path],
) -> int:
    """Run `scripts/NAME`: build for the release that its arguments say; return the exit status.

    `tool` is the program that it needs, `build` takes the folder and the release.
    """
    parser = argparse.ArgumentParser(
        prog=f"scripts/{name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, default=Path("dist"), help="where it goes")
    parser.add_argument("--release", choices=releases, default=default, help="of the distribution")
    options = parser.parse_args()
    try:
        parts.need(tool)
        print(build(options.folder, options.release))
    except parts.NotHereError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return parts.NOT_HERE
    except parts.BuildError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    return 0


def stage(
    root: Path, work: Path, *, python: str, interpreter: str, old_kernel: bool, commit: str
) -> list[Component]:
    """Write the files below a folder; return the libraries among them.

    `python` is the version as 3.13, `interpreter` its absolute path on the node. `old_kernel`: the
    release's kernel is older than Linux 6.6. Raises NotHereError and BuildError.
    """
    libraries = _libraries(root / rootfs.LIBRARIES, work, python, commit)
    choices = Choices(program=PROGRAM, python=interpreter, old_kernel=old_kernel)
    for one in node_files(choices):
        assert isinstance(one, NodeFile), "the program is in its place: no link"
        if "/man/" in one.path:
            write(root, f"{one.path}.gz", packed(one.content))
        else:
            write(root, one.path, one.content, one.mode)
    write(root, PROGRAM, rootfs.entry(interpreter).encode(), 0o755)
    write(root, f"{DOCS}/NEWS.md.gz", packed((parts.ROOT / "CHANGELOG.md").read_bytes()))
    return libraries


def write(root: Path, path: str, content: bytes, mode: int = 0o644) -> None:
    """Write a file below a root; its folders can be entered by everybody, whatever the umask."""
    target = root / path.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)
    target.chmod(mode)
    for folder in target.relative_to(root).parents:
        (root / folder).chmod(0o755)


def packed(content: bytes) -> bytes:
    """Return the content as gzip, the same bytes each time."""
    return gzip.compress(content, 9, mtime=0)


def _libraries(folder: Path, work: Path, python: str, commit: str) -> list[Component]:
    """Unpack the wheels, our own too; return the others."""
    found = parts.wheels(work / "wheels", python, "amd64", parts.ROOT / "requirements.lock")
    kept = [one for one in found if parts.wheel_component(one).name not in parts.UNUSED]
    for wheel in [*kept, parts.own_wheel(work, commit)]:
        parts.unpack_wheel(wheel, folder)
    for path in parts.files_of(folder):
        program = path.is_dir() or path.read_bytes().startswith(b"#!")
        path.chmod(0o755 if program else 0o644)
    return [parts.wheel_component(wheel) for wheel in kept]
