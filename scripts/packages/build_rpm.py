"""`scripts/rpm`: the .rpm of the files as they are, for one release of a distribution.

    scripts/rpm [--folder DIST] [--release el10]

It has the files of the Debian package, for another Python: that of python3.12 on Enterprise Linux,
which has an older python3 beside it in release 9. docs/upgrade.md says what was tried.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kata_pin import __version__
from scripts.packages import parts, stage
from scripts.packages.parts import Component

SCRIPTLETS: Final = Path(__file__).parent / "rpm" / "scriptlets"
LICENCE: Final = "/usr/share/licenses/kata-pin/LICENSE"
_SHELLS: Final = ("bash-completion", "fish", "zsh")
"""Folders below /usr/share of shells that a node need not have."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a release has."""

    python: str
    old_kernel: bool = False


TARGETS: Final = {
    "el9": Target("3.12", old_kernel=True),
    "el10": Target("3.12"),
    "fc42": Target("3.13"),
}

_HEAD: Final = """\
%global debug_package %{{nil}}
%global __os_install_post %{{nil}}
%global _build_id_links none
%global _buildhost localhost
%global use_source_date_epoch_as_buildtime 1
%global clamp_mtime_to_source_date_epoch 1

Name: kata-pin
Version: {version}
Release: 1.{release}
Summary: CPU placement for sandboxed containers
License: Apache-2.0
# What rpm finds by itself depends on the building machine, and offers our libraries to others.
AutoReqProv: no
Requires: {interpreter}
Requires: findutils
Requires: glibc >= 2.28
Requires: libstdc++
Requires: systemd
Requires: /usr/bin/flock
{bundled}

%description
Kata containers run in virtual machines. kata-pin keeps every host thread of
such a machine on the CPUs that its containers were given, shows where each
one runs, and measures who else used exclusive CPUs.

The package does not register the OCI hooks: kata-pin install does, and on
runtimes with NRI none is needed.

%install
mkdir -p %{{buildroot}}
cp -a {root}/. %{{buildroot}}/

"""


def main() -> int:
    """Build what the arguments say; return the exit status."""
    return stage.command(
        "rpm", __doc__, tool="rpmbuild", releases=TARGETS, default="el10", build=build
    )


def build(folder: Path, release: str) -> Path:
    """Build the package; return its path."""
    commit = parts.work_tree()
    target = TARGETS[release]
    interpreter = f"/usr/bin/python{target.python}"
    with tempfile.TemporaryDirectory() as text:
        work = Path(text)
        root = work / "root"
        libraries = stage.stage(
            *(root, work),
            python=target.python,
            interpreter=interpreter,
            old_kernel=target.old_kernel,
            commit=commit,
        )
        stage.write(root, LICENCE, (parts.ROOT / "LICENSE").read_bytes())
        head = _HEAD.format(
            version=__version__,
            release=release,
            interpreter=interpreter,
            bundled=_bundled(libraries),
            root=root,
        )
        scriptlets = SCRIPTLETS.read_text().replace("@PYTHON@", interpreter)
        spec = work / "kata-pin.spec"
        spec.write_text("\n".join([head + scriptlets, "%files", *_files(root), ""]))
        parts.run(
            ["rpmbuild", "-bb", "--quiet", "--target=x86_64-linux", f"-D_topdir {work}", str(spec)],
            env={"SOURCE_DATE_EPOCH": str(parts.commit_time(commit)), "LC_ALL": "C"},
        )
        (made,) = work.glob("RPMS/*/*.rpm")
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(made, folder))


def _bundled(libraries: Sequence[Component]) -> str:
    """Return a line for each library, by which an advisory finds this package."""
    lines = (f"Provides: bundled(python3dist({one.name})) = {one.version}" for one in libraries)
    return "\n".join(lines)


def _files(root: Path) -> Iterator[str]:
    """Yield the lines of %files: all files, and the folders that no other package has."""
    for path in parts.files_of(root):
        name = path.relative_to(root)
        attr = f"%attr({path.stat().st_mode & 0o777:04o}, root, root)"
        if path.is_dir():
            if any(part.startswith("kata-pin") or part in _SHELLS for part in name.parts):
                yield f'%dir {attr} "/{name}"'
        elif name.parts[0] == "etc":
            yield f'%config(noreplace) {attr} "/{name}"'
        else:
            yield f'{"%license " if f"/{name}" == LICENCE else ""}{attr} "/{name}"'


if __name__ == "__main__":
    sys.exit(main())
