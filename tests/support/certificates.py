"""Certificates for tests, made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path


def certificate(folder: Path, names: str, *options: str) -> tuple[Path, Path]:
    """Return files with a certificate that is signed by itself, and its key."""
    key, made = folder / f"{names[4:]}.key", folder / f"{names[4:]}.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", f"/CN={names[4:]}", "-addext", f"subjectAltName={names}", *options),
            *("-keyout", str(key), "-out", str(made)),
        ],
        check=True,
        capture_output=True,
    )
    return made, key
