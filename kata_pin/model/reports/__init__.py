"""The report documents: what `--json` prints and what the daemon answers. The only schema.

One module per document; a class is one JSON object. Plain values only: CPU sets are Linux cpu
lists, ages and durations are numbers. The comment at a field (`#:`) is its description in
docs/json.md and docs/schema/, which scripts/schema generates; a description that starts with
"One of" lists every value. wire/reports.py encodes and decodes the classes.
"""

from typing import Final

VERSION: Final = 2
"""Version of every document. Within a version fields are only added."""
