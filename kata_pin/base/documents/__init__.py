"""The report documents: what `--json` prints and what the daemon answers. The only schema.

A class is one JSON object. Plain values only: CPU sets are Linux cpu lists, ages and durations are
numbers. The comment at a field (`#:`) is its description in docs/json.md and docs/schema/, which
scripts/schema generates. A field with a closed list of values has their type, an enum of values.py
or a Literal, from which the schema lists them. service/protocol.py encodes and decodes the classes.
"""
