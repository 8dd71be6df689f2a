"""`scripts/deb`: the Debian package of the files as they are, for one release of Debian.

    scripts/deb [--folder DIST] [--release trixie]

It has the locked libraries in /usr/lib/kata-pin, for the release's own Python. What else it has is
what `kata-pin install` writes, but for hooks: that command registers them.
"""

from __future__ import annotations

import email.utils
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kata_pin import __version__
from scripts.packages import parts, stage
from scripts.packages.parts import Component

PYTHONS: Final = {"bookworm": "3.11", "trixie": "3.13"}
NUMBERS: Final = {"bookworm": "12", "trixie": "13"}

SCRIPTS: Final = Path(__file__).parent / "debian"
MAINTAINER: Final = "kata-pin maintainers <kata-pin@packages.invalid>"

_CONTROL: Final = """\
Package: kata-pin
Version: {version}
Section: admin
Priority: optional
Architecture: amd64
Maintainer: {maintainer}
Installed-Size: {size}
Depends: {depends}
Description: CPU placement for sandboxed containers
 Kata containers run in virtual machines. kata-pin keeps every host thread of
 such a machine on the CPUs that its containers were given, shows where each
 one runs, and measures who else used exclusive CPUs.
 .
 The package does not register the OCI hooks: kata-pin install does, and on
 runtimes with NRI none is needed.
"""

_DEPENDS: Final = (
    "python3 (>= {python})",
    "python3 (<< {python_after})",
    "libc6",
    "libstdc++6",
    "systemd | systemd-standalone-sysusers",
    "systemd | systemd-standalone-tmpfiles",
)

_COPYRIGHT: Final = """\
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: kata-pin

Files: *
Copyright: 2026, the authors of kata-pin
License: Apache-2.0
 On Debian systems the text is in /usr/share/common-licenses/Apache-2.0.
Comment:
 /usr/lib/kata-pin has these libraries, each with its own licence beside it:
 .
{libraries}
"""

_OVERRIDES: Final = """\
# Python libraries as their authors built them; Debian's versions are too old.
kata-pin: hardening-no-fortify-functions [usr/lib/kata-pin/*]
kata-pin: unstripped-binary-or-object [usr/lib/kata-pin/*]
kata-pin: embedded-library libyaml [usr/lib/kata-pin/*]
kata-pin: unusual-interpreter python [usr/lib/kata-pin/*]
"""


def main() -> int:
    """Build what the arguments say; return the exit status."""
    return stage.command(
        "deb", __doc__, tool="dpkg-deb", releases=PYTHONS, default="trixie", build=build
    )


def build(folder: Path, release: str) -> Path:
    """Build the package; return its path."""
    commit = parts.work_tree()
    version = f"{__version__}~deb{NUMBERS[release]}"
    with tempfile.TemporaryDirectory() as text:
        work = Path(text)
        root = work / "root"
        libraries = stage.stage(
            *(root, work),
            python=PYTHONS[release],
            interpreter="/usr/bin/python3",
            old_kernel=release == "bookworm",
            commit=commit,
        )
        _documents(root, version, libraries, commit)
        _control(root, version, PYTHONS[release])
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"kata-pin_{version}_amd64.deb"
        env = {"SOURCE_DATE_EPOCH": str(parts.commit_time(commit))}
        parts.run(
            ["dpkg-deb", "--root-owner-group", "-Zxz", "--build", str(root), str(target)], env=env
        )
    return target


def _documents(root: Path, version: str, libraries: Sequence[Component], commit: str) -> None:
    """Write what Debian's policy asks for."""
    names = "\n".join(
        f" {one.name} {one.version} {one.licence.partition(chr(10))[0]}".rstrip()
        for one in libraries
    )
    copyright_text = _COPYRIGHT.format(libraries=names)
    stage.write(root, f"{stage.DOCS}/copyright", copyright_text.encode())
    date = email.utils.formatdate(parts.commit_time(commit))
    log = (
        f"kata-pin ({version}) unstable; urgency=medium\n\n  * See NEWS.md.gz.\n\n"
        f" -- {MAINTAINER}  {date}\n"
    )
    stage.write(root, f"{stage.DOCS}/changelog.gz", stage.packed(log.encode()))
    stage.write(root, "/usr/share/lintian/overrides/kata-pin", _OVERRIDES.encode())


def _control(root: Path, version: str, python: str) -> None:
    files = [path for path in parts.files_of(root) if path.is_file()]
    control = root / "DEBIAN"
    control.mkdir(mode=0o755)
    major, minor = python.split(".")
    size = sum(path.stat().st_size for path in files) // 1024
    after = f"{major}.{int(minor) + 1}"
    depends = ", ".join(_DEPENDS).format(python=python, python_after=after)
    text = _CONTROL.format(version=version, maintainer=MAINTAINER, size=size, depends=depends)
    conffiles = [path for path in files if path.is_relative_to(root / "etc")]
    sums = "".join(
        f"{parts.digest(path, 'md5')}  {path.relative_to(root)}\n"
        for path in files
        if path not in conffiles
    )
    listed = "".join(f"/{path.relative_to(root)}\n" for path in conffiles)
    for name, content in (("control", text), ("md5sums", sums), ("conffiles", listed)):
        (control / name).write_text(content)
        (control / name).chmod(0o644)
    for script in sorted(SCRIPTS.iterdir()):
        shutil.copyfile(script, control / script.name)
        (control / script.name).chmod(0o755)


if __name__ == "__main__":
    sys.exit(main())
