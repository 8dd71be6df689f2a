"""The core without any option: a copy of the package whose rooms of options are removed.

`make_core(folder)` returns the Python that runs it. As a plugin of pytest (`-p`) this switches off,
in every node of a test, what is on by default.
"""

from __future__ import annotations

import shutil
import site
import sys
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OFF = {"isolation": {"watch": False}}
"""Settings with which no option is due."""


def make_core(folder: Path) -> Path:
    """Make the copy, and an environment that has it and what this one has; return its Python."""
    shutil.copytree(ROOT / "kata_pin", folder / "kata_pin", symlinks=False)
    for room in (folder / "kata_pin" / "options").iterdir():
        if room.is_dir():
            shutil.rmtree(room)
    for name in ("tests", "docs", "hooks", "scripts", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    environment = folder / "venv"
    venv.create(environment, symlinks=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    # A folder of packages that is named in a .pth file has no say by .pth files of its own, so
    # the package that is installed there for editing is not found.
    (packages / "core.pth").write_text("\n".join([str(folder), *site.getsitepackages()]))
    program = environment / "bin" / "kata-pin"
    program.write_text(
        f"#!{environment / 'bin' / 'python'}\nfrom kata_pin.cli.entry import main\nmain()\n"
    )
    program.chmod(0o755)
    for part in (folder, environment, environment / "bin"):
        part.chmod(0o755)
    return environment / "bin" / "python"


def pytest_configure() -> None:
    """Switch options off in the nodes of tests; refuse the whole package."""
    import kata_pin
    from tests.support import daemon

    package = Path(kata_pin.__file__).parent
    assert not [one for one in (package / "options").iterdir() if one.name.isidentifier()
                and one.is_dir() and one.name != "__pycache__"], package  # fmt: skip
    assert Path(sys.prefix) == package.parent / "venv", sys.prefix
    configure = daemon.Node.configure

    def without_options(node: daemon.Node, **settings: Any) -> None:
        configure(node, **{**OFF, **settings})

    setattr(daemon.Node, "configure", without_options)  # noqa: B010 - a method
