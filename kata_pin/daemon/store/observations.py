"""What each source last told of a container's cpuset, in a table of the registry's file.

One row for a container and source, written in the transaction of the record that tells it, so that
a restart of the daemon forgets no live value. The value that is believed (precedence.py) is
the record's. A container that is over has no rows: they are bounded by what lives.

A record tells a cpuset if the source says something of the container's CPUs: a message whose bundle
could not be read says nothing, nor does Kata's state about a container without `cpus`.

Lifetime: as long as its Registry. Out of scope: the kubelet and cgroups, read anew in each pass.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from kata_pin.daemon.store.container_rows import speaks
from kata_pin.daemon.store.database import Database
from kata_pin.errors import ParseError, StateError
from kata_pin.model.cpuset import CpuSet
from kata_pin.model.sandbox import Container, CpusetSource, ReportedCpuset
from kata_pin.policy.placement.precedence import believed

log = logging.getLogger(__name__)

UPDATED: Final = "nri:PostUpdateContainer"
"""The source of a record that is an update itself, so as new as its stamp though it repeats."""

_COLUMNS: Final = ("container_id", "source", "cpus", "recorded_ns")
_SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS told (container_id TEXT NOT NULL, source TEXT NOT NULL, cpus TEXT,"
    " recorded_ns INTEGER NOT NULL, PRIMARY KEY (container_id, source)) WITHOUT ROWID"
)


class Observations:
    """Reads and writes the table; methods raise StateError when the file cannot be used."""

    def __init__(self, db: Database) -> None:
        """A table that cannot be used is made anew: live sources tell their values again."""
        self._db = db
        with db.transaction():
            if not self._usable():
                log.warning("registry: what sources told cannot be read; begun anew")
                db.run("DROP TABLE told")
            db.run(_SCHEMA)

    def _usable(self) -> bool:
        there = tuple(row[1] for row in self._db.rows("PRAGMA table_info(told)"))
        if not there:
            return True
        if there != _COLUMNS:
            return False
        try:
            for row in self._db.rows("SELECT source, cpus, recorded_ns FROM told"):
                _row(*row)
        except StateError:
            return False
        return True

    def take(self, container: Container, merged: Container) -> Container:
        """Keep what a record tells; return the record to write, with the cpuset that is believed.

        `container` is the record as it came, `merged` with what was known before.
        """
        if not container.state.counts:
            self._db.run("DELETE FROM told WHERE container_id = ?", (container.id,))
            return merged
        told = {one.source: one for one in self.of(container.id)}
        new = _told(container)
        if new is not None:
            old = told.get(new.source)
            if old is None or old.cpus != new.cpus or container.source == UPDATED:
                told[new.source] = new
                self._write(container.id, new)
        winner = believed(told.values())
        return merged if winner is None else replace(merged, cpus=winner.cpus)

    def of(self, container_id: str) -> tuple[ReportedCpuset, ...]:
        """Return what sources told of one container."""
        rows = self._db.rows(
            "SELECT source, cpus, recorded_ns FROM told WHERE container_id = ? ORDER BY source",
            (container_id,),
        )
        return tuple(_row(*row) for row in rows)

    def with_told(self, sandbox_id: str, containers: Iterable[Container]) -> tuple[Container, ...]:
        """Return the containers of a sandbox with what sources told of each."""
        rows = self._db.rows(
            "SELECT container_id, told.source, told.cpus, told.recorded_ns"
            " FROM told JOIN containers ON id = container_id WHERE sandbox_id = ?"
            " ORDER BY container_id, told.source",
            (sandbox_id,),
        )
        told: dict[str, tuple[ReportedCpuset, ...]] = {}
        for container_id, *row in rows:
            told[container_id] = (*told.get(container_id, ()), _row(*row))
        return tuple(replace(one, reported=told.get(one.id, ())) for one in containers)

    def trim(self) -> None:
        """Drop what was told of containers that have no record any more."""
        self._db.run("DELETE FROM told WHERE container_id NOT IN (SELECT id FROM containers)")

    def _write(self, container_id: str, told: ReportedCpuset) -> None:
        cpus = None if told.cpus is None else str(told.cpus)
        self._db.run(
            "INSERT OR REPLACE INTO told VALUES (?, ?, ?, ?)",
            (container_id, told.source.value, cpus, told.recorded_ns),
        )


def _told(container: Container) -> ReportedCpuset | None:
    """Return what a record tells of its container's cpuset, None for nothing."""
    if not speaks(container):
        return None
    source = _source(container.source)
    if source is CpusetSource.KATA and container.cpus is None:
        return None
    return ReportedCpuset(source, container.cpus, container.recorded_ns)


def _source(record: str) -> CpusetSource:
    if record.startswith("nri:"):
        return CpusetSource.NRI
    return CpusetSource.KATA if record == CpusetSource.KATA else CpusetSource.BUNDLE


def _row(source: str, cpus: str | None, recorded_ns: int) -> ReportedCpuset:
    try:
        return ReportedCpuset(
            CpusetSource(source), None if cpus is None else CpuSet.parse(cpus), recorded_ns
        )
    except (ParseError, ValueError) as error:
        raise StateError(f"registry row of source {source}: {error}") from error
