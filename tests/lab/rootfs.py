"""A Debian root as a folder, for tests that need its programs but no machine.

It is the base of a lab image (image.py), so whoever has built the lab has it already. Nobody writes
to it: a test lays a file system of its own over it.
"""

from __future__ import annotations

from pathlib import Path

from tests.lab.flavours import SUITES
from tests.lab.image import Builder, Tell, _lock
from tests.lab.needs import missing_to_build, require
from tests.lab.settings import Settings


class RootBuilder(Builder):
    """Finds and builds the root of one release."""

    def find_root(self) -> Path | None:
        """Return the folder if it is built for the present list of packages."""
        tree = self._base_folder() / "tree"
        return tree if tree.exists() else None

    def build_root(self) -> Path:
        """Return the folder, built if need be; LabError says what is missing or went wrong."""
        found = self.find_root()
        if found is not None:
            return found
        require(missing_to_build(self._suite.name, self._cache), "build a Debian root")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with _lock(self._cache / f"build-{self._suite.name}.lock", self._limit):
            return self._build_base() / "tree"


def root_builder(tell: Tell) -> RootBuilder:
    """Return the builder of the Debian 13 root, the first release with NRI in containerd."""
    return RootBuilder(Settings.read(), SUITES["trixie"], tell)
