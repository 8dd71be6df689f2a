"""A configuration file to a Config; every error names the file and the key.

A reload calls `load` again. The settings themselves are in tree.py, YAML in document.py.
"""

from __future__ import annotations

import os
import stat
from typing import Any, Final, NoReturn

from kata_pin.config.kinds import Raw
from kata_pin.config.table import BY_KEY, SECTIONS
from kata_pin.config.tree import Config
from kata_pin.errors import ConfigError, ParseError

DEFAULT_FILE: Final = "/etc/kata-pin/config.yaml"
"""Read when no other file is named; its absence means the defaults."""

MAX_BYTES: Final = 64 * 1024
"""Longest file accepted."""

VERSION: Final = "1"
"""The only version of the file's form so far."""


def load(file: str | None = None, *, default: str = DEFAULT_FILE) -> Config:
    """Read a file; None means the default one, which may be absent.

    Raises ConfigError, also for a named file that does not exist.
    """
    chosen = default if file is None else file
    try:
        text = read_text(chosen)
    except FileNotFoundError as error:
        if file is None:
            return Config()
        raise ConfigError("no such file", file=chosen) from error
    return from_text(text, chosen)


def read_text(file: str) -> str:
    """Return a regular file's text, at most MAX_BYTES of UTF-8.

    Raises ConfigError, and FileNotFoundError when there is none.
    """
    try:
        # O_NONBLOCK: opening a FIFO without a writer would hang.
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError("not a regular file", file=file)
            with open(descriptor, "rb", closefd=False) as opened:
                body = opened.read(MAX_BYTES + 1)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"cannot read it: {error.strerror}", file=file) from error
    if len(body) > MAX_BYTES:
        raise ConfigError(f"larger than {MAX_BYTES // 1024} KiB", file=file)
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 at byte {error.start}", file=file) from error


def from_text(text: str, file: str = "") -> Config:
    """Return the Config that a file's text means; raises ConfigError."""
    from kata_pin.config.document import parse  # noqa: PLC0415 - YAML, only where there is a file

    try:
        raw = parse(text)
    except ParseError as error:
        raise ConfigError(error.message, file=file) from error
    if raw == "":
        return Config()
    if not isinstance(raw, dict):
        raise ConfigError("expected settings, one `key: value` per line", file=file)
    version = raw.pop("version", None)
    if version is None:
        raise ConfigError("missing", file=file, key="version", hint="write `version: 1` first")
    if version != VERSION:
        raise ConfigError(f"expected {VERSION}, the only version known", file=file, key="version")
    values: dict[str, Any] = {}
    for name, value in raw.items():
        if name not in SECTIONS:
            values[name] = _read(name, value, file)
        elif isinstance(value, dict):
            section = {key: _read(f"{name}.{key}", one, file) for key, one in value.items()}
            values[name] = SECTIONS[name](**section)
        elif value != "":
            raise ConfigError("expected a section of settings", file=file, key=name)
    try:
        return Config(**values)
    except ConfigError as error:
        raise ConfigError(
            error.message.removeprefix(f"{error.key}: "), file=file, key=error.key, hint=error.hint
        ) from error


def _read(key: str, value: Raw, file: str) -> object:
    if key not in BY_KEY:
        _refuse_unknown(key, file)
    try:
        return BY_KEY[key].row.kind.read(value)
    except ParseError as error:
        raise ConfigError(error.message, file=file, key=key) from error


def _refuse_unknown(key: str, file: str) -> NoReturn:
    """Raise ConfigError that names the nearest setting, also one of another section."""
    from difflib import get_close_matches  # noqa: PLC0415 - on the way to an error only

    last = key.rpartition(".")[2]
    near = get_close_matches(key, BY_KEY, n=1, cutoff=0.7)
    elsewhere = [known for known in BY_KEY if known.rpartition(".")[2] == last]
    found = next(iter([*elsewhere, *near, *get_close_matches(key, SECTIONS, n=1)]), None)
    hint = f"did you mean {found}?" if found else "kata-pin config sample lists every setting"
    raise ConfigError("no such setting", file=file, key=key, hint=hint)
