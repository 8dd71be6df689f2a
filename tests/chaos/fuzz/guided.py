"""One target under atheris: inputs that reach new code are kept and damaged further.

    python -m tests.chaos.fuzz.guided TARGET INPUTS FOLDER

It ends at the first finding, with a status other than 0 and its input in FOLDER. The code under
test runs several times slower here, so the bound on time is that much wider.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import atheris

SLOWED: Final = 10
"""How much wider the bound on time is: instrumented code is 3 to 8 times slower."""

with atheris.instrument_imports(include=["kata_pin"]):
    from tests.chaos.fuzz.campaign import BOUND_S, once
    from tests.chaos.fuzz.mutator import ODD
    from tests.chaos.fuzz.targets import TARGETS


class BrokenRuleError(Exception):
    """An input broke a rule; libFuzzer writes it to a file."""


def main(name: str, inputs: str, folder: str) -> None:
    """Fuzz one target; ends the process."""
    target = TARGETS[name]
    corpus = Path(folder, "corpus")
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(target.seeds()):
        (corpus / f"seed{number}").write_bytes(data)
    words = Path(folder, "words")
    words.write_text("".join(f'"{_escaped(word)}"\n' for word in (*target.words, *ODD)))

    def checked(data: bytes) -> None:
        rule, _, _ = once(target, data, bound_s=BOUND_S * SLOWED)
        if rule:
            raise BrokenRuleError(rule)

    flags = [f"-runs={inputs}", "-max_len=65536", "-len_control=1000", "-timeout=20"]
    flags += ["-rss_limit_mb=512", f"-artifact_prefix={folder}/", f"-dict={words}"]
    flags += ["-verbosity=0", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *flags, str(corpus)], checked)
    atheris.Fuzz()


def _escaped(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word)


if __name__ == "__main__":
    main(*sys.argv[1:])
