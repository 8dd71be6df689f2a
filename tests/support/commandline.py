"""The command line in this process: `run(["show", "--json"])` returns its exit status.

Tests of the command line's text and JSON import it from here and nothing else of kata_pin.cli.
"""

from __future__ import annotations

from kata_pin.cli.main import run

__all__ = ["run"]
