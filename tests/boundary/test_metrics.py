"""A scrape shows what the rows of metrics declare, with every option and without."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.boundary.node import Node
from tests.boundary.test_caches import Caches
from tests.boundary.test_quiet import Quiet
from tests.support.report_docs import metric_rows
from tests.support.resctrl_tree import ResctrlCalls, ResctrlTree

ROWS = {row.name: row for rows in metric_rows().values() for row in rows}
NO_NRI = "kata_pin_nri_connected"
WATCH = {
    row.name for about, rows in metric_rows().items() for row in rows if "isolation.watch" in about
}


async def _scrape(node: Node) -> dict[str, Metric]:
    """Return the families by the names of their rows."""
    reader, writer = await asyncio.open_unix_connection(str(node.runtime_dir / "metrics.sock"))
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    text = (await reader.read()).decode().partition("\r\n\r\n")[2]
    writer.close()
    families = text_string_to_metric_families(text)
    return {one.name + "_total" * (one.type == "counter"): one for one in families}


def _values(families: dict[str, Metric], name: str, label: str) -> dict[str, float]:
    """Return the values of a family by a label."""
    return {sample.labels[label]: sample.value for sample in families[name].samples}


def _violations(families: dict[str, Metric]) -> dict[str, float]:
    return _values(families, "kata_pin_violations", "kind")


def _samples(family: Metric, row: Any) -> None:
    """Check that the samples of a family have the row's labels, and values that it lists."""
    for sample in family.samples:
        assert set(sample.labels) - {"le"} == set(row.labels), row.name
        for label, values in row.labels.items():
            assert not values or sample.labels[label] in {*values}, row.name


async def test_every_row_is_shown_with_every_option(tmp_path: Path) -> None:
    """With its type, its help, its labels and their values; nothing else is. NRI is off here."""
    quiet = Quiet(tmp_path)
    node, tree = quiet.node, ResctrlTree(quiet.node.host.folder, rmids=8)
    node.kernel.caches = ResctrlCalls(tree, {})
    node.change(
        quiet="full",
        resctrl={"enabled": True},
        memory="migrate",
        alloc={"policy": "annotation"},
        metrics={"sandboxes": 5},
    )
    async with node:
        vm = node.vm("p1")
        tree.inherit(vm.shim, *node.host.tids(vm.pid))
        await node.create(vm, "c1", "4-5", exclusive=True)
        await quiet.audit()
        families = await _scrape(node)
    assert set(families) == set(ROWS) - {NO_NRI}
    for name, family in families.items():
        assert (family.type, family.documentation) == (ROWS[name].kind, ROWS[name].help)
        assert family.samples or name == "kata_pin_errors_total", name
        _samples(family, ROWS[name])


async def test_what_a_reload_switches_off_is_not_shown(tmp_path: Path) -> None:
    """Its last numbers are nobody's; a pCPU that is watched is no violation before."""
    quiet = Quiet(tmp_path)
    quiet.node.change(memory="migrate")
    async with quiet.node as node:
        vm = await quiet.run()
        for tid in node.host.tids(vm.pid):
            node.host.write(f"proc/{vm.pid}/task/{tid}/schedstat", "0 0 0")
        await quiet.audit()
        on = await _scrape(node)
        assert _violations(on)["foreign"] == 0
        node.change(quiet="off", memory="report", isolation={"watch": False})
        await node.ask("reload")
        await quiet.until(lambda: not quiet.records)
        await quiet.audit()  # a scrape's answer is reused for a while
        off = await _scrape(node)
    gone = {name for name in on if name.startswith(("kata_pin_quiet", "kata_pin_memory"))}
    assert gone
    assert not off.keys() & (gone | WATCH)
    assert "foreign" not in _violations(off)


async def test_sandboxes_have_series_up_to_a_number(tmp_path: Path) -> None:
    """That is a setting; a pod's name cannot break the text."""
    hostile = {"io.kubernetes.cri.sandbox-name": 'a"} 1\nkata_pin_sandboxes 99\\'}
    async with Node(tmp_path, metrics={"sandboxes": 1}) as node:
        for name in ("p1", "p2"):
            await node.create(node.vm(name), name, "4", annotations=hostile)
        families = await _scrape(node)
    series = families["kata_pin_sandbox_threads"].samples
    assert len({sample.labels["sandbox"] for sample in series}) == 1
    assert [sample.value for sample in families["kata_pin_sandboxes"].samples] == [2]


async def test_groups_of_caches_by_state(tmp_path: Path) -> None:
    """One that could not be made is not complete."""
    async with Caches(tmp_path, rmids=2) as caches:
        await caches.joined(await caches.run())
        await caches.run("p2")
        await caches.audits()
        families = await _scrape(caches.node)
    groups = _values(families, "kata_pin_cache_groups", "state")
    assert groups == {"complete": 1, "incomplete": 1}


async def test_what_nobody_watches_is_not_0(tmp_path: Path) -> None:
    """Without the watch nobody knows whether others ran there: no series says that none did."""
    async with Node(tmp_path) as node:
        families = await _scrape(node)
        assert families.keys() >= WATCH
        assert "foreign" in str(families["kata_pin_violations"].samples)
    async with Node(tmp_path / "off", isolation={"watch": False}) as node:
        families = await _scrape(node)
        assert not families.keys() & WATCH
        assert "foreign" not in str(families["kata_pin_violations"].samples)
        assert "kata_pin_sandboxes" in families
        assert not {name for name in families if "alloc" in name or "quiet" in name}
