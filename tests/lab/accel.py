"""Whether KVM of this machine can run a lab machine, found out by trying and remembered.

A /dev/kvm that opens proves little: on some virtual machines it runs paused or tiny guests and dies
on a stock kernel. So Debian's own kernel is started under it, once for each kernel, QEMU and host.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.lab import process
from tests.lab.flavours import Accel, Flavour
from tests.lab.image import Image, Tell
from tests.lab.settings import Settings

TRIAL_S: Final = 45
"""How long the kernel may take to reach user space under KVM; a working one needs about 2 s."""

_REACHED: Final = b"Run /init as init process"

SCALE: Final[dict[Accel, float]] = {"kvm": 1.0, "tcg": 10.0}
"""Deadlines are written for KVM; emulation with sixteen CPUs on two takes about ten times that."""


def choose(settings: Settings, flavour: Flavour, image: Image, tell: Tell) -> Accel:
    """Return how to run `flavour` on this machine: `kvm` only where that is known to work."""
    if settings.accel != "auto":
        return "kvm" if settings.accel == "kvm" else "tcg"
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "tcg"
    if flavour.model == "kvm" and not _nests():
        return "tcg"
    memory = settings.cache / "accel.json"
    key = _key(image)
    known = _remembered(memory)
    if key not in known:
        tell(f"trying whether KVM boots a stock kernel here (at most {TRIAL_S} s, once)")
        known[key] = _boots_under_kvm(image)
        tell("  it does" if known[key] else "  it does not: emulation (TCG) is used")
        memory.write_text(json.dumps(known, indent=1))
    return "kvm" if known[key] else "tcg"


def _nests() -> bool:
    """Tell whether KVM offers KVM to its guests."""
    for module in ("kvm_amd", "kvm_intel"):
        parameter = Path(f"/sys/module/{module}/parameters/nested")
        if parameter.exists() and parameter.read_text().strip() in ("1", "Y"):
            return True
    return False


def _remembered(file: Path) -> dict[str, bool]:
    try:
        known = json.loads(file.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _key(image: Image) -> str:
    """Name this host, its kernel, its QEMU and the kernel to be booted."""
    qemu = subprocess.run(
        ["qemu-system-x86_64", "--version"], capture_output=True, text=True, check=True, timeout=30
    ).stdout.splitlines()[0]
    model = next(
        (line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    host = "\n".join((*os.uname()[2:], model, qemu))
    kernel = hashlib.sha256(image.kernel.read_bytes()).hexdigest()
    return hashlib.sha256(f"{host}\n{kernel}".encode()).hexdigest()[:16]


def _boots_under_kvm(image: Image) -> bool:
    """Start the image's kernel under KVM and see whether it reaches user space in time."""
    with tempfile.TemporaryDirectory(prefix="kata-pin-lab-") as folder:
        console = Path(folder) / "console.log"
        child = subprocess.Popen(
            [
                *("qemu-system-x86_64", "-nodefaults", "-no-user-config", "-machine", "q35"),
                *("-accel", "kvm", "-cpu", "host", "-smp", "2", "-m", "512", "-display", "none"),
                *("-no-reboot", "-serial", f"file:{console}"),
                *("-kernel", str(image.kernel), "-initrd", str(image.initrd)),
                *("-append", "console=ttyS0 panic=-1"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        limit = time.monotonic() + TRIAL_S
        try:
            while time.monotonic() < limit:
                if console.exists() and _REACHED in console.read_bytes():
                    return True
                if child.poll() is not None:
                    return False
                time.sleep(0.2)
        finally:
            process.end_group(child)
    return False
