"""What containers can read about their placement: environment, and a file in a folder of theirs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from kata_pin.base.allocation import AllocState, AtCreation, Decision, Grant, Mount, Refusal
from kata_pin.base.config.alloc import Alloc
from kata_pin.base.cpuset import CpuSet
from kata_pin.base.values import CpuClass, RefusalKind
from kata_pin.options.allocation.placement_files import PlacementFiles, file_text
from tests.support.podspecs import container, pod
from tests.support.world import cpus, flat

HOST = flat(4)
BOTH = Alloc(placement_env=True, placement_file="/run/kata-pin")
GRANT = Grant(
    container(1000, pod("web", kata=False)), "x", CpuClass.EXCLUSIVE, exclusive=cpus("2-3")
)
NAME = GRANT.container_id
ENV = (
    ("KATA_PIN_CLASS", "exclusive"),
    ("KATA_PIN_CPUS", "2-3"),
    ("KATA_PIN_EXCLUSIVE_CPUS", "2-3"),
    ("KATA_PIN_SHARED_CPUS", ""),
    ("KATA_PIN_NUMA_NODES", "0"),
)


def decision(grant: Grant) -> Decision:
    return Decision(AllocState(cpus("0-3")).with_grant(grant), (grant,))


def announced(files: PlacementFiles, grant: Grant = GRANT) -> AtCreation:
    found = files.announced(decision(grant), grant.container_id, HOST)
    (changed,) = found.changed
    assert changed == found.state.grants[grant.container_id]
    return changed.creation


def test_environment_and_file(tmp_path: Path) -> None:
    """Beside what the grant has already; what an earlier instance had is replaced."""
    files = PlacementFiles(str(tmp_path), BOTH)
    had = AtCreation(
        rdt_class="gold",
        env=(("A", "b"), ("KATA_PIN_CPUS", "0")),
        mounts=(Mount("/a", "/b"), Mount("/run/kata-pin", "/old")),
    )
    folder = tmp_path / "placements" / NAME
    assert announced(files, replace(GRANT, creation=had)) == AtCreation(
        rdt_class="gold",
        env=(("A", "b"), *ENV),
        mounts=(Mount("/a", "/b"), Mount("/run/kata-pin", str(folder))),
    )
    assert (folder / "placement").read_text() == file_text(GRANT, HOST, None)
    assert (folder.stat().st_mode & 0o777, (folder / "placement").stat().st_mode & 0o777) == (
        0o755,
        0o444,
    )


def test_a_strict_umask(tmp_path: Path) -> None:
    """The unit's: whoever a container runs as can read it all the same."""
    before = os.umask(0o077)
    try:
        announced(PlacementFiles(str(tmp_path), BOTH))
    finally:
        os.umask(before)
    assert (tmp_path / "placements" / NAME).stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "placements").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(
    ("settings", "expected"),
    [(Alloc(), AtCreation()), (Alloc(placement_env=True), AtCreation(env=ENV))],
)
def test_only_what_is_set(tmp_path: Path, settings: Alloc, expected: AtCreation) -> None:
    """Nothing is written unless the file is wanted."""
    assert announced(PlacementFiles(str(tmp_path), settings)) == expected
    assert not list(tmp_path.iterdir())


def test_a_refused_container_gets_nothing(tmp_path: Path) -> None:
    """Nor does one without a grant."""
    files = PlacementFiles(str(tmp_path), BOTH)
    refused = Refusal(RefusalKind.NOT_ENOUGH_CPUS, "no", strict=True)
    one = replace(decision(GRANT), refused=refused)
    assert files.announced(one, NAME, HOST) is one
    assert files.announced(decision(GRANT), "unknown", HOST) == decision(GRANT)
    assert files.containers() == []


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No mount of something that is not there: the container is created, and the log says why."""
    (tmp_path / "placements").write_text("in the way")
    files = PlacementFiles(str(tmp_path), BOTH)
    for _ in range(2):
        assert announced(files) == AtCreation(env=ENV)
    assert caplog.text.count("placement of a container not written") == 1
    assert files.containers() == []


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """Who has it open reads the former text; nothing is written if nothing changed."""
    files = PlacementFiles(str(tmp_path), BOTH)
    announced(files)
    file = tmp_path / "placements" / NAME / "placement"
    (file.parent / ".placement.new").write_text("of a killed daemon")
    with file.open() as before:
        assert files.write(NAME, "CPUS=7\n")
        assert before.read() == file_text(GRANT, HOST, None)
    assert file.read_text() == "CPUS=7\n"
    number = file.stat().st_ino
    assert files.write(NAME, "CPUS=7\n")
    assert file.stat().st_ino == number
    assert os.listdir(file.parent) == ["placement"]
    assert files.containers() == [NAME]
    files.remove(NAME)
    assert files.containers() == []
    assert files.write(NAME, "CPUS=7\n")  # what was removed is written again


def test_the_text_for_a_vm_names_no_pcpu() -> None:
    """Guest CPUs, empty while they are unknown."""
    vm = replace(GRANT, request=container(1000, pod("vm")))
    assert file_text(vm, HOST, None) == "CLASS=exclusive\nCPU_COUNT=2\nGUEST_CPUS=\n"
    assert file_text(vm, HOST, CpuSet([1, 2])).endswith("GUEST_CPUS=1-2\n")
