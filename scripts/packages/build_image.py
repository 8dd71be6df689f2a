"""`scripts/image`: the image of a commit as an OCI archive, with its bill of materials beside it.

scripts/image [--folder DIST] [--commit HEAD | --work-tree] [--arch amd64] [--refresh] [--cri]
scripts/image --root FOLDER    the file system only, as docs/image/Containerfile copies it
"""

from __future__ import annotations

import argparse
import datetime
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from kata_pin import __version__
from scripts.packages import oci, parts, rootfs, sbom

REPOSITORY: Final = "localhost/kata-pin"
"""A name with a host part that nothing ever pulls; whoever pushes the image gives it another."""


def main() -> int:
    """Build what the arguments say; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="scripts/image",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, default=Path("dist"), help="where the archive goes")
    parser.add_argument("--commit", default="HEAD", help="what is built")
    parser.add_argument("--work-tree", action="store_true", help="build the files as they are")
    parser.add_argument("--arch", choices=rootfs.TRIPLETS, default="amd64", help="the processor")
    parser.add_argument("--refresh", action="store_true", help="take newer packages of Debian")
    parser.add_argument("--cri", action="store_true", help="add grpcio: see docs/image/README.md")
    parser.add_argument("--root", type=Path, help="write the file system here, and no archive")
    parser.add_argument("--base", action="store_true", help="build what all commits share, only")
    options = parser.parse_args()
    try:
        base = rootfs.base(options.arch, refresh=options.refresh, cri=options.cri)
        if options.base:
            return 0
        commit = parts.work_tree() if options.work_tree else parts.commit(options.commit)
        with tempfile.TemporaryDirectory() as text:
            added = Path(text)
            own = rootfs.own(added, base, options.arch, commit)
            if options.root:
                shutil.copytree(base.root, options.root, symlinks=True)
                shutil.copytree(added, options.root, dirs_exist_ok=True)
            else:
                tag = f"{__version__}-cri" if options.cri else __version__
                _archive(base, added, own, options.folder, tag, arch=options.arch, commit=commit)
    except parts.NotHereError as error:
        print(f"image: {error}", file=sys.stderr)
        return parts.NOT_HERE
    except parts.BuildError as error:
        print(f"image: {error}", file=sys.stderr)
        return 1
    return 0


def config(commit: str) -> dict[str, Any]:
    """Return how a container of the image starts."""
    return {
        "User": "0:0",
        "Entrypoint": ["/usr/bin/kata-pin"],
        "Env": ["PATH=/usr/bin"],
        "WorkingDir": "/",
        "StopSignal": "SIGTERM",
        "Labels": {
            "org.opencontainers.image.title": "kata-pin",
            "org.opencontainers.image.version": __version__,
            "org.opencontainers.image.revision": commit,
            "org.opencontainers.image.licenses": "Apache-2.0",
        },
    }


def _archive(
    base: rootfs.Base,
    added: Path,
    own: parts.Component,
    folder: Path,
    tag: str,
    *,
    arch: str,
    commit: str,
) -> None:
    """Write archive and bill of materials; print the image's digest and the archive's name."""
    files = [*parts.files_of(added)]
    if wrong := rootfs.unwanted([*parts.files_of(base.root), *files]):
        raise parts.BuildError(f"set-uid, or writable by everybody: {', '.join(wrong)}")
    made_at = datetime.datetime.fromtimestamp(parts.commit_time(commit), datetime.UTC)
    created = f"{made_at:%Y-%m-%dT%H:%M:%SZ}"
    made = oci.image(
        (base.layer, oci.layer(added, files, "kata-pin")),
        name=f"{REPOSITORY}:{tag}",
        arch=arch,
        created=created,
        config=config(commit),
    )
    bill = sbom.document(
        (*base.components, own),
        name="kata-pin",
        version=__version__,
        kind="container",
        digest=made.digest,
        created=created,
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"kata-pin-{tag}-{arch}.oci.tar"
    path.write_bytes(oci.archive(made))
    path.with_suffix("").with_suffix(".cdx.json").write_text(bill)
    print(f"{made.digest}  {path}")


if __name__ == "__main__":
    sys.exit(main())
