"""Writing interrupts' masks: the double of /proc/irq answers as this kernel does."""

from __future__ import annotations

from collections.abc import Iterator
from errno import ENOENT, EOVERFLOW, ERANGE
from pathlib import Path

import pytest
from msgspec import Struct

from kata_pin.rights.broker.tunables import TunableWrite, TunableWritten
from kata_pin.rights.calls import DIRECT, Calls
from tests.support.irqtree import IrqTree, Line

pytestmark = pytest.mark.root


class Irqs(Struct):
    """A tree, and an interrupt in it whose mask may be written."""

    root: str
    calls: Calls
    number: str

    def read(self, name: str) -> str:
        return (Path(self.root) / "proc/irq" / name).read_text().strip()

    def write(self, kind: str, value: str, name: str = "") -> TunableWritten:
        (written,) = self.calls.write_tunables([TunableWrite(kind, name, value)], self.root)
        return written


def _movable() -> str:
    """Return an interrupt of this machine that takes the mask that it has."""
    kernel = Irqs("/", DIRECT, "")
    for folder in sorted(Path("/proc/irq").iterdir()):
        mask = folder / "smp_affinity_list"
        if (
            mask.exists()
            and not kernel.write("interrupt", mask.read_text().strip(), folder.name)[0]
        ):
            return folder.name
    pytest.skip("no interrupt of this machine can be moved")


@pytest.fixture(params=["double", "kernel"])
def irqs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Irqs]:
    if request.param == "kernel":
        yield Irqs("/", DIRECT, _movable())
        return
    tree = IrqTree(tmp_path / "tree", 4)
    tree.add(24, Line("PCI-MSIX-0000:00:02.0   1-edge      eth0", "0-1"))
    yield Irqs(str(tree.root), tree, "24")


def test_a_mask_is_read_back(irqs: Irqs) -> None:
    """What was written is what the file has then, in the kernel's form."""
    mask = irqs.read(f"{irqs.number}/smp_affinity_list")
    assert irqs.write("interrupt", mask, irqs.number) == TunableWritten(0, mask)
    default = irqs.read("default_smp_affinity")
    assert irqs.write("default-mask", default) == TunableWritten(0, default)


def test_refusals(irqs: Irqs) -> None:
    """CPUs beyond the kernel's, an interrupt that is not there, a mask that is too long."""
    mask = irqs.read(f"{irqs.number}/smp_affinity_list")
    assert irqs.write("interrupt", "8191", irqs.number) == TunableWritten(ERANGE, mask)
    assert irqs.write("interrupt", "0", "99999") == TunableWritten(ENOENT, "")
    default = irqs.read("default_smp_affinity")
    long = ",".join(["ffffffff"] * 41)
    assert irqs.write("default-mask", long) == TunableWritten(EOVERFLOW, default)
    assert irqs.read(f"{irqs.number}/smp_affinity_list") == mask
