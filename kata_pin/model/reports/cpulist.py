"""The type of a CPU set in a document."""

from typing import Annotated

Cpus = Annotated[str, "cpus"]
"""A Linux cpu list such as `0-3,8`; empty: no CPU."""
