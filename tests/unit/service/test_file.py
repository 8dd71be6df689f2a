"""Configuration files: which one is read, and what is refused before a setting is looked at."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from kata_pin.base.config.tree import Config
from kata_pin.base.errors import ConfigError
from kata_pin.base.values import Mode
from kata_pin.service import configuration
from kata_pin.service.configuration import MAX_BYTES, from_text, load


def test_absent_default_file_means_defaults(tmp_path: Path) -> None:
    """Without a named file the default one is read, and its absence means the defaults."""
    default = tmp_path / "k.yaml"
    assert load(default=str(default)) == Config()
    default.write_text("version: 1\nmode: observe\n", encoding="utf-8-sig")
    assert load(default=str(default)).mode is Mode.OBSERVE


def test_absent_named_file_is_an_error() -> None:
    """A file that was named must exist."""
    with pytest.raises(ConfigError, match=r"/nonexistent/k\.yaml: no such file"):
        load("/nonexistent/k.yaml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param(
            "version: 1\nmode: act\nmode: act", "line 3: duplicate key: 'mode'", id="twice"
        ),
        pytest.param("version: 1\nqmp: {name: 1, name: 2}", "line 2: duplicate key", id="in"),
        pytest.param("a: &x [y]\nb: *x", "line 1: anchors and aliases", id="anchor"),
        pytest.param("a: *x", "line 1: anchors and aliases", id="alias"),
        pytest.param("<<: {mode: act}\nversion: 1", "<<: no such setting", id="merge key"),
        pytest.param("a: !!int 3", "line 1: tags are not accepted", id="tag"),
        pytest.param("a: !!python/object/apply:os.system [x]", "line 1: tags", id="python tag"),
        pytest.param("[" * 5000, "nested deeper than 8", id="deep list"),
        pytest.param("{a: " * 5000, "nested deeper than 8", id="deep mapping"),
        pytest.param("? [a]\n: b", "line 1: a key must be a word", id="list as key"),
        pytest.param("a: b\n---\nc: d", "line 2: only one document", id="documents"),
        pytest.param("a: [", "node content", id="not YAML"),
        pytest.param("a:\n\tb: c", "line 2:", id="tab"),
        pytest.param("a: \x07", "not YAML: unacceptable character", id="control character"),
        pytest.param("- a", "expected settings", id="list"),
        pytest.param("word", "expected settings", id="word"),
        pytest.param("mode: act", "version: missing", id="no version"),
        pytest.param("version: 2", "version: expected 1", id="other version"),
        pytest.param("version: 1.0", "version: expected 1", id="version as a float"),
    ],
)
@pytest.mark.parametrize("loader", [configuration.LOADER, yaml.SafeLoader])
def test_documents_that_are_refused(
    text: str, words: str, loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not the accepted part of YAML is refused with file and line, by both parsers."""
    monkeypatch.setattr(configuration, "LOADER", loader)
    with pytest.raises(ConfigError) as caught:
        from_text(text, "k.yaml")
    assert str(caught.value).startswith("k.yaml: ")
    assert words in str(caught.value)


def test_large_file_is_refused(tmp_path: Path) -> None:
    """One byte above the bound is refused, the bound itself is read."""
    file = tmp_path / "k.yaml"
    file.write_text("version: 1\n#" + "x" * (MAX_BYTES - 12))
    assert load(str(file)) == Config()
    file.write_text("version: 1\n#" + "x" * (MAX_BYTES - 11))
    with pytest.raises(ConfigError, match="larger than 64 KiB"):
        load(str(file))


def test_files_that_are_no_files(tmp_path: Path) -> None:
    """A folder, a FIFO without a writer, and a device are refused without a wait."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (tmp_path, fifo, Path("/dev/zero")):
        with pytest.raises(ConfigError, match=f"{path}: (not a regular file|cannot read it)"):
            load(str(path))


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    """A file that is not UTF-8 is refused with the place."""
    file = tmp_path / "k.yaml"
    file.write_bytes(b"version: 1\ngroup: \xff\n")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 18"):
        load(str(file))
