"""README's samples are what the program prints; run this file to write them."""

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from kata_pin.base.documents.state import Thread
from kata_pin.cli.render import show
from kata_pin.cli.render.layout import NO_LIMIT, Output
from kata_pin.options.pictures import command
from tests.unit.cli import documents as docs

README = Path(__file__).parents[3] / "README.md"
HEAD = "    $ kata-pin show web\n"
APP = b"app".hex()
SHARED = "shared CPUs (overhead: auto)"


def _thread(tid: int, role: str, source: str, **fields: object) -> Thread:
    facts = {"source": source, "reason": SHARED, "paired": False, "cpu_ticks": 3, **fields}
    return docs.thread(tid, role, "1", **facts)


def sample() -> list[str]:
    """Return what both print of a sandbox with an exclusive container and one that shares.

    Of `draw` without the lines about the node, which `show` has.
    """
    fields: dict[str, Any] = {"source": "hook:poststart", "recorded_s": 1.8}
    guest = docs.links(
        (0, "1", 0, "proven", ""), (1, "0", 1, "proven", APP), first=18687,
        containers=[docs.confined("app", "1"), docs.confined("log", "0", owned=False)],
    )  # fmt: skip
    sandbox = docs.sandbox(
        "shop/web",
        "0-1",
        _thread(18687, "vcpu", "debugfs", vcpu=0, cpu_ticks=61,
                reason="unpaired vCPU: shared CPUs (overhead: auto)"),
        _thread(18688, "vcpu", "debugfs", vcpu=1, desired="0", expected="0", affinity="0",
                last_cpu=0, cpu_ticks=204, unmoved_s=41.0,
                reason="paired with exclusive CPUs of container app"),
        _thread(18682, "emulator", "order", cpu_ticks=12),
        _thread(18683, "emulator", "order"),
        _thread(18684, "iothread", "qmp", iothread="iothread-93faf1dd31a4eabb"),
        _thread(18689, "kvm", "flags"),
        _thread(18681, "shim", "process", desired=None, expected=None, affinity="0-1",
                state="unmanaged", reason="not pinned by kata-pin"),
        id="9c1f" * 16,
        checked_s=0.2,
        duration_ms=1.8,
        exclusive="0",
        shared="1",
        mask_origin="union of the containers' cpusets",
        vmm=docs.vmm(pid=18682, exe="/usr/bin/qemu-system-x86_64", boot_vcpus=2, max_vcpus=8,
                     confirmed_by="its parent, the sandbox's shim"),
        containers=[
            docs.container("pause", None, kind="sandbox", provenance="none",
                           reason="not exclusive: it is the pod sandbox", **fields),
            docs.container("app", "0", "0", provenance="inferred",
                           reason="CPU quota equals 1 CPU", **fields),
            docs.container("log", "1", provenance="none",
                           reason="not exclusive: pod is not Guaranteed", **fields),
        ],
        guest=guest,
    )  # fmt: skip
    state = docs.state(sandbox, cpus=2, kubelet=None)
    state = replace(state, daemon=replace(docs.RUNNING, uptime_s=93784.0))
    shown = [line.plain for line in show.single(state, Output(NO_LIMIT))]
    drawn = [line.plain for line in command.picture_lines(state, Output(100))]
    return [*shown, "", "$ kata-pin draw", *drawn[drawn.index("") + 1 :]]


def written() -> str:
    """Return README with the sample as the program prints it."""
    before, head, rest = README.read_text().partition(HEAD)
    assert head, "README has no samples"
    lines = rest.splitlines(keepends=True)
    end = next(n for n, line in enumerate(lines) if line.strip() and not line.startswith("    "))
    block = "".join(f"    {line}".rstrip() + "\n" for line in sample())
    return f"{before}{head}{block}\n{''.join(lines[end:])}"


def test_the_sample_is_what_the_program_prints() -> None:
    """Column heads, words and layout are those of today."""
    assert README.read_text() == written()


if __name__ == "__main__":
    README.write_text(written())
