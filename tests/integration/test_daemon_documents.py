"""What the commands print as JSON from a running daemon fits docs/schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import Node, private_node
from tests.support.json_schema import violations

pytestmark = [pytest.mark.qemu, pytest.mark.root]

POD = "p1"
SCHEMA = Path(__file__).parents[2] / "docs" / "schema"


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """One daemon with one pinned pod, and history of it."""
    with private_node() as one:
        one.start()
        with one.pod(POD) as pod:
            pod.announce()
            pod.create("c1", "1", exclusive=True)
            pod.create("c2", "0")
            one.wait_state(POD, "ok")
            yield one


@pytest.mark.parametrize(
    ("command", "kind", "filled"),
    [
        pytest.param(["show"], "state", "sandboxes", id="show"),
        pytest.param(["show", POD], "state", "sandboxes", id="show SANDBOX"),
        pytest.param(["map"], "map", "sandboxes", id="map"),
        pytest.param(["map", POD], "map", "sandboxes", id="map SANDBOX"),
        pytest.param(["history"], "history", "changes", id="history"),
        pytest.param(["pools"], "pools", "daemon", id="pools"),
        pytest.param(["explain", POD], "explain", "lines", id="explain"),
        pytest.param(["pin", POD], "pin", "sandboxes", id="pin"),
    ],
)
def test_documents_of_a_daemon_fit_their_schema(
    node: Node, command: list[str], kind: str, filled: str
) -> None:
    """The daemon answered, with something to show, and in the words of the schema only."""
    done = node.cli("--json", *(node.id_of(POD) if one == POD else one for one in command))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document[filled]
    assert document.get("daemon", {"running": True})["running"]
    schema = json.loads((SCHEMA / f"{kind}.json").read_text())
    assert list(violations(document, schema, schema)) == []
