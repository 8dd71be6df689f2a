"""One SQLite transaction: the registry's and the history's writes are made of them (DESIGN D15).

Nothing is kept. Out of scope: which file, and what its errors mean (database.py).
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Commit what the block writes, or nothing of it; a failed commit leaves nothing open.

    Inside another one it is a part of that: the outermost commits.
    """
    inside = db.in_transaction
    if inside:
        yield
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # SQLite itself rolls back after some errors, such as a full disk
            db.execute("ROLLBACK")
        raise
