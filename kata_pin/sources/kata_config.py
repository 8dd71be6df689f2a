"""Kata's configuration files of this node, read with their drop-ins.

They are read at start, on reload and by doctor; what the text means is in wire/kata/config.py. They
are often links (`configuration.toml` to the one for QEMU), so links are followed to the end before
the file's owner is checked.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from kata_pin.errors import ParseError, reason_of
from kata_pin.owned_file import FileRefused, read_owned
from kata_pin.wire.kata.config import KataConfig, parse_kata_config
from kata_pin.wire.toml_text import MAX_CHARACTERS

PATTERNS: Final = ("configuration*.toml", "*/configuration*.toml", "*/*/configuration*.toml")
"""Names below a folder: Kata's own, those in runtime-rs/, and kata-deploy's runtimes/<name>/."""

MAX_FILES: Final = 64


@dataclass(frozen=True, slots=True)
class KataConfigFile:
    """One file: its resolved path, its hypervisor tables, or why it cannot be read."""

    path: str
    configs: tuple[KataConfig, ...] = ()
    problem: str = ""


def read_kata_configs(folders: Iterable[str]) -> tuple[KataConfigFile, ...]:
    """Return every configuration in the folders (setting paths.kata_configs), each file once.

    A file that cannot be read or parsed is in the result with its problem; the others still count.
    """
    found = dict.fromkeys(
        os.path.realpath(path)
        for folder in folders
        for pattern in PATTERNS
        for path in sorted(glob.glob(os.path.join(glob.escape(folder), pattern)))
    )
    return tuple(_read(path) for path in list(found)[:MAX_FILES])


def _read(path: str) -> KataConfigFile:
    try:
        return KataConfigFile(path, parse_kata_config(_text(path), _drop_ins(path)))
    except (FileRefused, ParseError) as error:
        return KataConfigFile(path, problem=str(error))
    except OSError as error:
        return KataConfigFile(path, problem=reason_of(error))


def _drop_ins(path: str) -> Iterator[str]:
    """Yield the texts of config.d beside the file, in the order of their names."""
    folder = os.path.join(os.path.dirname(path), "config.d")
    for drop_in in sorted(glob.glob(os.path.join(glob.escape(folder), "*.toml")))[:MAX_FILES]:
        yield _text(os.path.realpath(drop_in))


def _text(path: str) -> str:
    return read_owned(path, MAX_CHARACTERS).decode("utf-8", "replace")
