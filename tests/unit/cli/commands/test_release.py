"""What `release` gives back, by whom, and what it says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kata_pin.base.documents.answers import Applied, AppliedSandbox
from kata_pin.base.documents.document import Note
from kata_pin.base.documents.pools import KeptCpuset
from kata_pin.base.values import NoteLevel
from tests.support.commandline import run
from tests.unit.conftest import Serve

KEPT = "these containers keep the CPUs that kata-pin gave them until their pods are recreated:"
NOTHING = Applied(kind="unpin", sandboxes=())
NOTE = Note("kept-narrow", "5 threads keep 6-7: kata-pin did not set it", NoteLevel.WARNING)
POD = AppliedSandbox("id", "shop/web", "released", "", 9, 1.0, (), (NOTE,))


@pytest.mark.parametrize(
    ("answer", "lines"),
    [
        ({}, ["restored all affinities (by the daemon)"]),
        (
            {"sandboxes": (POD,)},
            [
                "restored affinities (by the daemon), except:",
                "  shop/web: 5 threads keep 6-7: kata-pin did not set it",
            ],
        ),
        (
            {"cpusets_kept": (KeptCpuset("c", "shop/\x1b[2Jdb", "a\nb", "2-3"),)},
            [
                "restored all affinities (by the daemon)",
                KEPT,
                r"  shop/\x1b[2Jdb a\x0ab 2-3",
            ],
        ),
    ],
    ids=["all", "not all affinities", "not all cpusets, and names that are printed safely"],
)
def test_what_the_daemon_released(
    serve: Serve, capsys: pytest.CaptureFixture[str], answer: dict[str, Any], lines: list[str]
) -> None:
    """What is left is named: which threads of which pod keep what, and why."""
    config = serve({"release": lambda _: replace(NOTHING, **answer)})
    assert run(["release", "--config", str(config)]) == 0
    assert capsys.readouterr().out.splitlines() == lines


def test_a_release_with_a_failed_option_is_none(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """So `uninstall` keeps the service and its settings for another attempt."""
    failed = replace(NOTHING, options_failed=("option siren: it is broken",))
    config = serve({"release": lambda _: failed})
    assert run(["release", "--config", str(config)]) == 1
    assert "option siren: it is broken" in capsys.readouterr().err


def test_without_a_daemon_nobody_releases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`unpin` does, and `uninstall`."""
    config = tmp_path / "config.yaml"
    config.write_text(f"version: 1\nruntime_dir: {tmp_path}\n")
    assert run(["release", "--wait", "0s", "--config", str(config)]) == 1
    assert "without one: kata-pin unpin" in capsys.readouterr().err
