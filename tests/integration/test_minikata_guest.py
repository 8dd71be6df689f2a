"""The Linux guest of minikata: how it is built, and that it boots as minikata's guest."""

from __future__ import annotations

import lzma
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.guest import build
from tests.support import ocirun
from tests.support.katalike import KataDirs
from tests.support.minikata import minikata_node

BUILT = Path.home() / ".cache/kata-pin/guest"

RELEASE = "6.1.0-test"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """An unpacked Debian: a kernel, busybox, three modules of which one is compressed."""
    for name in ("boot", "bin", f"lib/modules/{RELEASE}/kernel/net"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / f"boot/vmlinuz-{RELEASE}").write_bytes(b"kernel")
    (tmp_path / "bin/busybox").write_bytes(b"busybox")
    kernel = tmp_path / f"lib/modules/{RELEASE}/kernel"
    (kernel / "virtio_pci.ko").write_bytes(b"\0depends=virtio,virtio-ring\0a")
    (kernel / "virtio.ko").write_bytes(b"\0depends=\0b")
    (kernel / "net/virtio-ring.ko.xz").write_bytes(lzma.compress(b"\0depends=virtio\0c"))
    return tmp_path


def test_modules_are_listed_in_loading_order(tree: Path) -> None:
    """What a module needs comes before it, once; what the kernel has built in is left out."""
    found = build.modules(tree, RELEASE, ("virtio_pci", "built_in"))
    assert [name for name, _ in found] == ["virtio", "virtio_ring", "virtio_pci"]
    assert found[1][1] == b"\0depends=virtio\0c"


def test_build_is_kept(tree: Path, tmp_path: Path) -> None:
    """The same tree and sources give one folder, which is built once."""
    out = build.build(tree, tmp_path / "out")
    made = (out / "initrd.img").stat().st_mtime_ns
    assert (out / "vmlinuz").read_bytes() == b"kernel"
    assert b"minikata-guest: ready" in (out / "initrd.img").read_bytes()
    assert b"Kata's agent protocol" in (out / "initrd.img").read_bytes()
    assert (build.build(tree, out) / "initrd.img").stat().st_mtime_ns == made


@pytest.mark.root
def test_python_is_whole(tmp_path: Path) -> None:
    """The agent's Python starts with nothing but what is put into the ramdisk, and serves."""
    for name, mode, data in build.python(Path("/")):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if mode == build.FOLDER:
            target.mkdir(exist_ok=True)
        else:
            target.write_bytes(data)
            target.chmod(0o755)
    (tmp_path / "lib").mkdir()
    for name, path in build.libraries(Path("/"), [Path("/", build.PYTHON).resolve()]).items():
        shutil.copyfile(path, tmp_path / "lib" / name)
    shutil.copyfile(build.HERE / "agent.py", tmp_path / "agent.py")
    code = "import agent; print(len(agent.Message(agent.text(1, 'x')).text(1)))"
    program = f"import sys; sys.path.insert(0, '/'); {code}"
    done = subprocess.run(
        ["chroot", str(tmp_path), "/usr/bin/python3", "-IS", "-c", program],
        check=False, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="mk"))
    yield path
    shutil.rmtree(path)


@pytest.mark.slow
@pytest.mark.qemu
@pytest.mark.root
@pytest.mark.timeout(300)
def test_guest_boots_as_minikatas(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod's creation returns once Linux runs in the VM; needs a guest built before."""
    monkeypatch.setattr(ocirun, "SCALE", 6)  # emulated, and others load this machine too
    guests = sorted(BUILT.glob("*/initrd.img"), key=lambda path: path.stat().st_mtime)
    if not guests:
        pytest.skip(f"no guest in {BUILT}: {sys.executable} tests/e2e/guest/build.py")
    built = guests[-1].parent
    linux = {"kernel": str(built / "vmlinuz"), "initrd": str(built / "initrd.img")}
    with (
        minikata_node(
            folder, KataDirs.below(folder), guest="linux", accel="tcg", scale=4, **linux
        ) as kata,
        kata.container("p1", "p1", annotations={"minikata.guest": "linux"}) as pod,
    ):
        pod.start()
        assert pod.status == "running"
