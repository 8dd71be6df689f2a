"""Each source's last report of a container's cpuset, in a table of the registry's file.

Written in the transaction of the record that reports it, so that a restart forgets no live value.
The record's own cpuset is the one that wins (precedence.py). An ended container has no rows.

A message whose bundle could not be read reports no cpuset, nor does Kata's state about a container
without `cpus`. The kubelet's file and cgroups are read in each pass, and are not kept here.
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
        """Make the table, again if it cannot be used: live sources repeat their reports."""
        self._db = db
        with db.transaction():
            if not self._usable():
                log.warning("registry: reported cpusets cannot be read and are dropped")
                db.run("DROP TABLE told")
            db.run(_SCHEMA)

    def _usable(self) -> bool:
        there = tuple(row[1] for row in self._db.rows("PRAGMA table_info(told)"))
        if there != _COLUMNS:
            return not there
        try:
            for row in self._db.rows("SELECT source, cpus, recorded_ns FROM told"):
                _row(*row)
        except StateError:
            return False
        return True

    def take(self, container: Container, merged: Container) -> Container:
        """Keep what a record reports; return the record to write, with the cpuset that wins.

        `container` is the record as it came, `merged` with what was known before.
        """
        if not container.state.counts:
            self._db.run("DELETE FROM told WHERE container_id = ?", (container.id,))
            return merged
        reported = {one.source: one for one in self.of(container.id)}
        new = _reported(container)
        if new is not None:
            old = reported.get(new.source)
            if old is None or old.cpus != new.cpus or container.source == UPDATED:
                reported[new.source] = new
                self._write(container.id, new)
        winner = believed(reported.values())
        return merged if winner is None else replace(merged, cpus=winner.cpus)

    def of(self, container_id: str) -> tuple[ReportedCpuset, ...]:
        """Return what sources reported of one container."""
        rows = self._db.rows(
            "SELECT source, cpus, recorded_ns FROM told WHERE container_id = ? ORDER BY source",
            (container_id,),
        )
        return tuple(_row(*row) for row in rows)

    def with_reports(
        self, sandbox_id: str, containers: Iterable[Container]
    ) -> tuple[Container, ...]:
        """Return the containers of a sandbox with what sources reported of each."""
        rows = self._db.rows(
            "SELECT container_id, told.source, told.cpus, told.recorded_ns"
            " FROM told JOIN containers ON id = container_id WHERE sandbox_id = ?"
            " ORDER BY container_id, told.source",
            (sandbox_id,),
        )
        reported: dict[str, tuple[ReportedCpuset, ...]] = {}
        for container_id, *row in rows:
            reported[container_id] = (*reported.get(container_id, ()), _row(*row))
        return tuple(replace(one, reported=reported.get(one.id, ())) for one in containers)

    def trim(self) -> None:
        """Drop reports of containers that have no record any more."""
        self._db.run("DELETE FROM told WHERE container_id NOT IN (SELECT id FROM containers)")

    def _write(self, container_id: str, one: ReportedCpuset) -> None:
        cpus = None if one.cpus is None else str(one.cpus)
        self._db.run(
            "INSERT OR REPLACE INTO told VALUES (?, ?, ?, ?)",
            (container_id, one.source.value, cpus, one.recorded_ns),
        )


def _reported(container: Container) -> ReportedCpuset | None:
    """Return what a record reports of its container's cpuset, None for nothing."""
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
