"""Bundles: which config.json is read, and which rule refuses the others."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kata_pin.records.bundles import MAX_CONFIG_BYTES, BundleGone, BundleReader, BundleRefused


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "containers"
    path.mkdir()
    return path


def bundle_in(root: Path, content: bytes = b"{}") -> Path:
    path = root / "c1" / "userdata"
    path.mkdir(parents=True)
    (path / "config.json").write_bytes(content)
    return path


@pytest.mark.parametrize("spelling", ["{}", "{}/", "{}/./", "/{}//"])
def test_reads_below_a_root(root: Path, spelling: str) -> None:
    """A bundle below a root is read, however its path is spelled."""
    bundle = bundle_in(root, b'{"a":1}')
    assert BundleReader([str(root)]).read_config(spelling.format(bundle)) == b'{"a":1}'


def test_largest_config(root: Path) -> None:
    """A config.json of exactly the limit is read whole."""
    bundle = bundle_in(root, b"x" * MAX_CONFIG_BYTES)
    assert len(BundleReader([str(root)]).read_config(str(bundle))) == MAX_CONFIG_BYTES


def test_root_behind_a_link(root: Path, tmp_path: Path) -> None:
    """A root may itself be reached through a link, resolved once; both spellings are read."""
    link = tmp_path / "link"
    link.symlink_to(root)
    bundle = bundle_in(root)
    reader = BundleReader([str(link)])
    assert reader.read_config(str(bundle)) == b"{}"
    assert reader.read_config(str(link / bundle.relative_to(root))) == b"{}"
    link.unlink()
    link.symlink_to("/etc")
    assert reader.read_config(str(link / bundle.relative_to(root))) == b"{}"


def test_var_run_is_run() -> None:
    """A bundle below /var/run counts as below /run where the one links to the other."""
    if os.path.realpath("/var/run") != "/run":
        pytest.skip("/var/run is no link to /run here")
    with pytest.raises(BundleGone):
        BundleReader(["/run/containerd"]).read_config("/var/run/containerd/absent")


def link_above(bundle: Path) -> Path:
    link = bundle.parent.parent / "link"
    link.symlink_to(bundle.parent)
    return link / bundle.name


def link_out(bundle: Path) -> Path:
    link = bundle.parent.parent / "etc"
    link.symlink_to("/etc")
    return link


def link_config(bundle: Path) -> Path:
    (bundle / "config.json").unlink()
    (bundle / "config.json").symlink_to("/etc/passwd")
    return bundle


def fifo_config(bundle: Path) -> Path:
    (bundle / "config.json").unlink()
    os.mkfifo(bundle / "config.json")
    return bundle


def folder_config(bundle: Path) -> Path:
    (bundle / "config.json").unlink()
    (bundle / "config.json").mkdir()
    return bundle


def huge_config(bundle: Path) -> Path:
    os.truncate(bundle / "config.json", MAX_CONFIG_BYTES + 1)
    return bundle


def foreign_config(bundle: Path) -> Path:
    os.chown(bundle / "config.json", 65534, -1)
    return bundle


def file_as_folder(bundle: Path) -> Path:
    path = bundle.parent.parent / "file"
    path.touch()
    return path


def deeper(bundle: Path) -> Path:
    (bundle / "rootfs").mkdir()
    (bundle / "config.json").rename(bundle / "rootfs" / "config.json")
    return bundle / "rootfs"


@pytest.mark.parametrize(
    ("make", "rule"),
    [(link_above, "a symlink"), (link_out, "a symlink"), (link_config, "is a symlink"),
     (fifo_config, "not a regular file"), (folder_config, "not a regular file"),
     (huge_config, "larger than"), (file_as_folder, "a file in place of a folder"),
     (deeper, "not where a runtime keeps bundles"),
     pytest.param(foreign_config, "is owned by uid 65534", marks=pytest.mark.root)],
)  # fmt: skip
def test_refused_by_what_is_there(root: Path, make: Callable[[Path], Path], rule: str) -> None:
    """What lies below a root must be plain files and folders of root's."""
    bundle = make(bundle_in(root))
    with pytest.raises(BundleRefused, match=rule):
        BundleReader([str(root)]).read_config(str(bundle))


@pytest.mark.parametrize(
    ("bundle", "rule"),
    [("", "absolute"), ("c1", "absolute"), ("{root}/../other", "'..'"), ("{root}", "outside"),
     ("/etc", "outside"), ("{root}other/c1", "outside"), ("{root}/a\0b", "absolute"),
     ("{root}/" + "x" * 5000, "longer than"), ("{root}/\ud800", "not a valid path"),
     ("{root}/" + "x" * 300, "not where a runtime keeps bundles")],
    ids=["empty", "relative", "dots", "root-itself", "elsewhere", "same-prefix", "nul", "long",
         "surrogate", "long-name"],
)  # fmt: skip
def test_refused_by_its_path(root: Path, bundle: str, rule: str) -> None:
    """A path that cannot name a bundle is refused before anything is opened."""
    with pytest.raises(BundleRefused, match=rule):
        BundleReader([str(root)]).read_config(bundle.format(root=root))


@pytest.mark.parametrize("missing", ["c2", "c1/userdata"])
def test_gone(root: Path, missing: str) -> None:
    """A bundle that is not there, or holds no config.json any more, is gone."""
    (bundle_in(root) / "config.json").unlink()
    with pytest.raises(BundleGone):
        BundleReader([str(root)]).read_config(str(root / missing))


def test_root_that_appears_later(tmp_path: Path) -> None:
    """A root need not exist when the reader is made."""
    root = tmp_path / "later"
    reader = BundleReader([str(root)])
    with pytest.raises(BundleGone):
        reader.read_config(str(root / "c1" / "userdata"))
    bundle = bundle_in(root)
    assert reader.read_config(str(bundle)) == b"{}"


def test_keeps_no_descriptor(root: Path) -> None:
    """Reads and refusals leave no descriptor open."""
    reader = BundleReader([str(root)])
    good = bundle_in(root)
    bad = link_out(good)
    before = len(os.listdir("/proc/self/fd"))
    reader.read_config(str(good))
    with pytest.raises(BundleRefused):
        reader.read_config(str(bad))
    assert len(os.listdir("/proc/self/fd")) == before
