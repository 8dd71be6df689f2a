"""Every mutant of tests/mutants fits the code as it is, and names tests that exist."""

from __future__ import annotations

import pytest

from tests.mutants.catalogue import ROOT, Mutant, Sources, StaleError, load


def test_every_patch_applies() -> None:
    """A patch whose function or text changed is rewritten for the new code, or deleted."""
    sources, stale = Sources(), []
    for mutant in load():
        try:
            sources.patch(mutant)
        except StaleError as error:
            stale.append(str(error))
    assert stale == []


def test_every_patch_names_tests_that_exist() -> None:
    missing = {
        f"{mutant.name}: {test}"
        for mutant in load()
        for test in mutant.tests
        if not (ROOT / test.partition("::")[0]).exists()
    }
    assert missing == set()
    assert all(mutant.tests for mutant in load())


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        ("union", "no such text", "x"),  # the text is gone
        ("no_such_function", "return", "x"),  # the function is gone
        ("CpuSet.parse", "return cls.from_bits(bits)", "return ("),  # it would not even be read
    ],
)
def test_a_stale_patch_is_noticed(function: str, old: str, new: str) -> None:
    with pytest.raises(StaleError, match=r"^m:"):
        Sources().patch(Mutant("m", function, old, new, ("tests",)))
