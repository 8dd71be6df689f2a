"""Settings: one table, one YAML file, one frozen Config.

    config = load("/etc/kata-pin/config.yaml")
    config.audit.affinity_s, config.paths.vc, config.placement

tree.py holds the settings, table.py lists and writes them, file.py reads a file.
"""

from __future__ import annotations

from kata_pin.config.file import DEFAULT_FILE, from_text, load
from kata_pin.config.tree import Config

__all__ = ["DEFAULT_FILE", "Config", "from_text", "load"]
