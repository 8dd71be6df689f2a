"""Finding Kata's configuration files: links, drop-ins, broken ones."""

from __future__ import annotations

from pathlib import Path

from kata_pin.peers.kata import read_kata_configs


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_links_and_folders(tmp_path: Path) -> None:
    """A file and the link to it count once; runtime-rs' folder is searched; order is kept."""
    first, second = tmp_path / "etc", tmp_path / "opt"
    write(second / "configuration-qemu.toml", '[hypervisor.qemu]\npath="/q"\n')
    (second / "configuration.toml").symlink_to("configuration-qemu.toml")
    write(second / "runtime-rs" / "configuration.toml", '[hypervisor.qemu]\npath="/r"\n')
    write(first / "configuration.toml", '[hypervisor.clh]\npath="/c"\n')
    write(first / "other.toml", "broken")
    found = read_kata_configs([str(first), str(second), str(tmp_path / "absent")])
    assert [file.configs[0].path for file in found] == ["/c", "/q", "/r"]
    assert [file.problem for file in found] == ["", "", ""]


def test_drop_ins(tmp_path: Path) -> None:
    """All of config.d beside the file applies, in the order of names, whatever their endings."""
    write(tmp_path / "configuration.toml", "[hypervisor.qemu]\n[runtime]\n")
    write(tmp_path / "config.d" / "30.txt", "[runtime]\nenable_vcpus_pinning=true\n")
    write(tmp_path / "config.d" / "20.toml", "[runtime]\nenable_vcpus_pinning=false\n")
    (file,) = read_kata_configs([str(tmp_path)])
    assert file.configs[0].vcpu_pinning


def test_a_broken_file_does_not_hide_the_others(tmp_path: Path) -> None:
    """Its problem is reported, and the rest is read."""
    write(tmp_path / "configuration-a.toml", "broken")
    write(tmp_path / "configuration-b.toml", "[hypervisor.qemu]\n")
    (tmp_path / "configuration-c.toml").mkdir()
    broken, good, folder = read_kata_configs([str(tmp_path)])
    assert "not TOML" in broken.problem
    assert (good.configs[0].hypervisor, good.problem) == ("qemu", "")
    assert "not a regular file" in folder.problem
