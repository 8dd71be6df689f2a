"""The checkout as packages install it: the program of scripts/packages, and a folder of libraries.

The folder has links to this checkout and to the locked libraries of this environment, without what
is installed here for development and costs each start: files of `site`, typing_extensions.
"""

from __future__ import annotations

import compileall
import os
import re
import sys
from importlib.metadata import distribution
from pathlib import Path

from scripts.packages.parts import ROOT, UNUSED
from scripts.packages.rootfs import entry


def installed(folder: Path) -> Path:
    """Return the program, made below a folder that has nothing of these names yet."""
    libraries = folder / "libraries"
    libraries.mkdir()
    for path in (ROOT / "kata_pin", *_locked()):
        (libraries / path.name).symlink_to(path)
    compileall.compile_dir(ROOT / "kata_pin", quiet=2)
    program = folder / "kata-pin"
    program.write_text(entry(os.path.realpath(sys.executable), str(libraries)))
    program.chmod(0o755)
    return program


def _locked() -> set[Path]:
    """Return the packages and modules of the libraries that are installed on a node."""
    names = re.findall(r"^([\w.-]+)==", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    found = set()
    for one in map(distribution, set(names) - UNUSED):
        tops = {file.parts[0] for file in one.files or ()} - {"..", "__pycache__"}
        found |= {Path(str(one.locate_file(top))) for top in tops}
    return found
