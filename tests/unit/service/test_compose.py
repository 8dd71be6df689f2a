"""The parts as the configuration makes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from kata_pin.base.config.tree import Config
from kata_pin.records.containers import Registry
from kata_pin.service.options import compose


@pytest.mark.parametrize("key", ["path", "valid_hypervisor_paths"])
def test_vmm_paths_of_katas_configuration_are_accepted(tmp_path: Path, key: str) -> None:
    """Also those that Kata lets pods choose by annotation."""
    program = os.path.realpath("/proc/self/exe")
    value = f"'{program}'" if key == "path" else f"['{program}']"
    (tmp_path / "configuration.toml").write_text(f"[hypervisor.qemu]\n{key} = {value}\n")
    registry = Registry(str(tmp_path / "registry.db"), boot_id="b")
    for folders, accepted in ((), False), ((str(tmp_path),), True):
        paths = replace(Config().paths, kata_configs=folders)
        parts = compose(replace(Config(), paths=paths), registry)
        assert parts.finder.is_kata(os.getpid()) is accepted
    registry.close()
