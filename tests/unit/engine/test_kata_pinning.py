"""What says whether Kata pins a sandbox's vCPUs: its state, then annotations, then its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from kata_pin.base.cpuset import CpuSet
from kata_pin.base.sandbox import Container, GuestTopology, Vmm
from kata_pin.base.values import ContainerKind, ContainerState
from kata_pin.engine.sandbox_cache import KataPinningReader
from kata_pin.linux.files import HostRoot
from kata_pin.peers.kata import read_kata_configs
from kata_pin.peers.oci import KATA_CONFIG, KATA_PINNING
from kata_pin.placement.drift import KataPinningMode
from kata_pin.records.bundles import BundleReader
from kata_pin.vmm.state_files import KataPaths
from tests.support import world

GO_KEY, RS_KEY = KATA_PINNING
QEMU = "/opt/kata/bin/qemu-system-x86_64"


class Place:
    """Kata's folders, a bundle and configuration files, below one private folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.vc, self.kata, self.conf = root / "vc", root / "kata", root / "conf"
        for folder in (self.vc / "sbs/s1", self.kata / "s1", self.conf, root / "b/s1"):
            folder.mkdir(parents=True)
        vmm = world.sandbox().vmm
        assert vmm is not None
        self.vmm: Vmm = replace(vmm, exe=QEMU)
        self.pause = Container(
            id="s1", sandbox_id="s1", kind=ContainerKind.SANDBOX, state=ContainerState.RUNNING,
            bundle=str(root / "b/s1"),
        )  # fmt: skip

    def go(self, *, on: bool) -> None:
        """Write what the Go runtime keeps."""
        document = {"State": "running", "Config": {"EnableVCPUsPinning": on}, "x": "y" * on}
        (self.vc / "sbs/s1/persist.json").write_text(json.dumps(document))

    def annotate(self, annotations: Mapping[str, str]) -> None:
        """Write the bundle's config.json."""
        (self.root / "b/s1/config.json").write_text(json.dumps({"annotations": annotations}))

    def configure(self, name: str, *, on: bool, path: str = QEMU) -> Path:
        """Write one of Kata's configuration files."""
        file = self.conf / f"configuration-{name}.toml"
        flag = str(on).lower()
        text = f"[hypervisor.qemu]\npath='{path}'\n[runtime]\nenable_vcpus_pinning={flag}\n"
        file.write_text(text)
        return file

    def reader(self) -> KataPinningReader:
        """Return a reader, as a daemon that starts now makes it."""
        paths = KataPaths(vc=str(self.vc), kata=str(self.kata))
        bundles = BundleReader([str(self.root / "b")])
        return KataPinningReader(HostRoot(), paths, bundles, read_kata_configs([str(self.conf)]))

    def said(self, reader: KataPinningReader | None = None) -> tuple[bool, str]:
        """Return whether pinning is on, and what says so."""
        found = (reader or self.reader()).of("s1", (self.pause,), self.vmm)
        return found.mode is not KataPinningMode.OFF, found.evidence


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Return a place where nothing says anything."""
    return Place(tmp_path)


def test_nothing_says_anything(place: Place) -> None:
    """Without evidence Kata does not pin: that is its default."""
    assert place.said() == (False, "")


@pytest.mark.parametrize("on", [True, False])
def test_katas_state_is_believed_before_all(place: Place, on: bool) -> None:
    """It is what Kata made of annotation and file."""
    place.go(on=on)
    place.annotate({GO_KEY: str(not on).lower()})
    place.configure("qemu", on=not on)
    assert place.said() == (on, "persist.json")


def test_an_orphan_is_left_to_nobody(place: Place) -> None:
    """Its shim did the pinning, and has exited: with Kata 3.21 just because of it."""
    place.go(on=True)
    place.vmm = replace(place.vmm, orphan=True)
    assert place.said() == (False, "")


def test_the_state_of_runtime_rs(place: Place) -> None:
    """The same flag, elsewhere."""
    cgroup = {"path": "/x", "enable_vcpus_pinning": True}
    document = {"resource": {"cgroup_state": cgroup}, "hypervisor": {"hypervisor_type": "qemu"}}
    (place.kata / "s1/state.json").write_text(json.dumps(document))
    assert place.said() == (True, "state.json")


@pytest.mark.parametrize("key", KATA_PINNING)
@pytest.mark.parametrize("on", [True, False])
def test_an_annotation_is_believed_before_the_file(place: Place, key: str, on: bool) -> None:
    """Both runtimes' keys, where Kata keeps nothing that could be read."""
    place.annotate({key: str(on).lower()})
    place.configure("qemu", on=not on)
    assert place.said() == (on, f"annotation {key} in config.json")


def test_an_annotation_that_is_no_flag_says_nothing(place: Place) -> None:
    """Kata refuses such a sandbox; the file is asked."""
    place.annotate({GO_KEY: "yes please"})
    assert place.said() == (False, "")


def test_the_pods_annotations_count_where_no_bundle_can_be_read(place: Place) -> None:
    """What the runtime did not hand on to Kata is not in config.json, and does not count."""
    reader = place.reader()
    reader.take_annotations("s1", {RS_KEY: "true", "other": "x"})
    assert place.said(reader) == (True, f"annotation {RS_KEY} in the pod")
    reader.forget("s1")
    assert place.said(reader) == (False, "")
    reader.take_annotations("s1", {RS_KEY: "true"})
    place.annotate({})
    assert place.said(reader) == (False, "")


def test_a_configuration_counts_for_the_vmm_that_it_allows(place: Place) -> None:
    """Another hypervisor's does not; several that disagree say nothing, those that agree do."""
    other = place.configure("clh", on=True, path="/opt/kata/bin/cloud-hypervisor")
    assert place.said() == (False, "")
    qemu = place.configure("qemu", on=True)
    assert place.said() == (True, str(qemu))
    place.configure("snp", on=False)
    on, evidence = place.said()
    assert (on, "disagree" in evidence) == (False, True)
    place.annotate({KATA_CONFIG: str(other)})
    assert place.said() == (True, str(other))


def test_a_jailed_vmm_is_the_one_of_kata_configuration(place: Place) -> None:
    """In its jail Firecracker shows no path of the host."""
    path = place.configure("fc", on=True, path="/opt/kata/bin/firecracker")
    place.vmm = replace(place.vmm, exe="/firecracker")
    assert place.said() == (True, str(path))
    place.vmm = replace(place.vmm, exe="/srv/firecracker")
    assert place.said() == (False, "")


def test_a_state_that_is_being_written_says_what_it_said_before(place: Place) -> None:
    """Kata rewrites persist.json in place: half of it is no reason to pin against Kata."""
    reader = place.reader()
    place.go(on=True)
    assert place.said(reader) == (True, "persist.json")
    (place.vc / "sbs/s1/persist.json").write_text('{"State": "running", "Con')
    assert place.said(reader) == (True, "persist.json")
    (place.vc / "sbs/s1/persist.json").unlink()
    assert place.said(reader) == (False, "")


def test_numa_mode_is_known_by_the_guests_memory(place: Place) -> None:
    """Where Kata bound the guest's memory to host nodes, it pins by node and always."""
    place.go(on=True)
    guest = replace(place.vmm.guest, host_nodes={0: CpuSet.parse("0")})
    assert isinstance(guest, GuestTopology)
    found = place.reader().of("s1", (place.pause,), replace(place.vmm, guest=guest))
    assert found.mode is KataPinningMode.NUMA
    assert place.reader().of("s1", (place.pause,), place.vmm).mode is KataPinningMode.COUNT
