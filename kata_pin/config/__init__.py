"""Settings: one table, one YAML file, one frozen Config.

    config = load("/etc/kata-pin/config.yaml")
    config.audit.affinity_s, config.paths.vc, config.placement

tree.py holds the table; file.py reads a file; text.py writes samples.
"""

from __future__ import annotations

from kata_pin.config.file import DEFAULT_FILE, from_text, load
from kata_pin.config.metrics import Metrics
from kata_pin.config.tree import (
    Audit,
    Config,
    ContainerLeaves,
    History,
    Hook,
    Intruders,
    LogLevel,
    Mode,
    NewThreads,
    Nri,
    NriEnabled,
    Paths,
    Qmp,
)

__all__ = [
    "DEFAULT_FILE",
    "Audit",
    "Config",
    "ContainerLeaves",
    "History",
    "Hook",
    "Intruders",
    "LogLevel",
    "Metrics",
    "Mode",
    "NewThreads",
    "Nri",
    "NriEnabled",
    "Paths",
    "Qmp",
    "from_text",
    "load",
]
