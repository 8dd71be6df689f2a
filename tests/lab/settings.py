"""Where the lab keeps things and what may be set, all by environment variables.

KATA_PIN_LAB_CACHE   everything that is kept (default: kata-pin/lab in the user's cache folder)
KATA_PIN_LAB_MIRROR  the Debian mirror (default: the one that apt is configured with)
KATA_PIN_LAB_ACCEL   auto (default), tcg or kvm
KATA_PIN_LAB_QEMU    who emulates: host (default), this machine's, or trixie, Debian 13's
KATA_PIN_LAB_SCALE   multiplies every deadline (default: 1, on top of what emulation needs)
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.lab.errors import LabError

PROJECT: Final = Path(__file__).resolve().parents[2]
LAB: Final = PROJECT / "tests" / "lab"
APT_UPDATE_S: Final = 120


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one command."""

    cache: Path
    mirror: str
    accel: str
    scale: float
    qemu: str = "host"

    @classmethod
    def read(cls) -> Settings:
        """Read the environment; raise LabError for a value that makes no sense."""
        home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        accel = os.environ.get("KATA_PIN_LAB_ACCEL", "auto")
        if accel not in ("auto", "tcg", "kvm"):
            raise LabError(f"KATA_PIN_LAB_ACCEL is {accel!r}, not auto, tcg or kvm")
        qemu = os.environ.get("KATA_PIN_LAB_QEMU", "host")
        if qemu not in ("host", "trixie"):
            raise LabError(f"KATA_PIN_LAB_QEMU is {qemu!r}, not host or trixie")
        try:
            scale = float(os.environ.get("KATA_PIN_LAB_SCALE", "1"))
        except ValueError:
            raise LabError("KATA_PIN_LAB_SCALE is not a number") from None
        return cls(
            cache=Path(os.environ.get("KATA_PIN_LAB_CACHE") or f"{home}/kata-pin/lab").absolute(),
            mirror=os.environ.get("KATA_PIN_LAB_MIRROR", ""),
            accel=accel,
            scale=scale,
            qemu=qemu,
        )

    def find_mirror(self) -> str:
        """Return the Debian mirror: the setting, else that of this machine's apt."""
        if self.mirror:
            return self.mirror
        site = _site_of_apt()
        if not site and os.geteuid() == 0:
            _update_apt(APT_UPDATE_S * self.scale)
            site = _site_of_apt()
        if site:
            return site
        raise LabError(
            "no Debian mirror: apt is configured with none (or cannot be updated); "
            "set KATA_PIN_LAB_MIRROR"
        )


def _update_apt(deadline_s: float) -> None:
    """Have apt fetch its lists: without them it does not say which of its sources is Debian's."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            ["apt-get", "-q", "update"], stdout=subprocess.DEVNULL, check=False, timeout=deadline_s
        )


def _site_of_apt() -> str:
    """Return the Debian mirror of this machine's apt, "" if it knows none."""
    listing = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(ORIGIN)|$(LABEL)|$(SITE)"],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    ).stdout
    for line in listing.splitlines():
        origin, _, rest = line.partition("|")
        label, _, site = rest.partition("|")
        if origin == label == "Debian" and site:
            return site
    return ""
