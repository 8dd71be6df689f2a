"""`pools`, `alloc explain` and `policy` over a daemon's sockets and a real file of orders."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kata_pin.base.documents.pools import Pools
from kata_pin.base.documents.state import State
from kata_pin.base.errors import KataPinError
from kata_pin.cli.render.layout import Output
from kata_pin.options.allocation import render as render_pools
from kata_pin.options.allocation.command import choose_grant
from tests.support.commandline import run
from tests.unit.cli import documents as docs
from tests.unit.conftest import Serve, plain

STATE = docs.allotted()


def _serve(
    serve: Serve, tmp_path: Path, document: State = STATE, policy: str = "annotation"
) -> str:
    config = serve({"state": lambda _: deepcopy(document)})
    orders = tmp_path / "policies"
    config.write_text(
        f"version: 1\nruntime_dir: {tmp_path}\nalloc: {{policy: {policy}, orders: {orders}}}\n"
    )
    return str(config)


def _json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_pools(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The pools are drawn with a letter for each owner, and printed whole as JSON."""
    config = _serve(serve, tmp_path)
    assert run(["pools", "--config", config]) == 0
    out = capsys.readouterr().out
    assert "NUMA node 1  AA AA B- B-" in out
    assert "A    default/db-0" in out
    assert "exclusive among every container of the node" in out
    assert "taken         2,10  (2, x)" in out
    assert "NUMA node 0  +. .. xx h-" in out
    assert "mixer" in out
    assert "NRI plugin" in out
    assert run(["pools", "--json", "--config", config]) == 0
    assert _json(capsys)["allocation"] == plain(STATE.allocation)


def test_owners_share_letters_when_there_are_many() -> None:
    """The 27th owner is an A again, and every pCPU still has a sign."""
    grants = [
        docs.grant(f"p/{n}", "app", exclusive=str(n), cpu_class="exclusive") for n in range(27)
    ]
    pools = Pools(reserved="", housekeeping="", shared="27-31", exclusive="0-26", taken="")
    state = docs.state(cpus=32, kubelet=None)
    allocation = docs.allotted(grants=grants, pools=pools, refused=[], notes=[]).allocation
    lines = render_pools.pools(replace(state, allocation=allocation), Output(200))
    drawn = "".join(one.plain for one in lines if one.plain.startswith("NUMA node"))
    assert drawn.count("A") == 2 + 2  # and one in each `NUMA`
    assert drawn.count(".") == 5


@pytest.mark.parametrize(
    "name", ["postgres", "default/db-0/postgres", b"default/db-0/postgres".hex()[:20]]
)
def test_a_container_is_explained(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """By its name, its whole name, or the start of its id."""
    config = _serve(serve, tmp_path)
    assert run(["alloc", "explain", name, "--config", config]) == 0
    out = capsys.readouterr().out
    assert "exclusive  4-5,12-13" in out
    assert "- annotation cpu-policy.kata-pin.io says exclusive" in out
    assert run(["alloc", "explain", name, "--json", "--config", config]) == 0
    assert _json(capsys)["grant"]["cpu_class"] == "exclusive"


def test_cpus_that_wait_for_the_next_instance() -> None:
    """A container that has ended is shown as such, in the table and in its explanation."""
    state = docs.allotted()
    assert state.allocation is not None
    grants = tuple(
        replace(one, ended=True) if one.name == "postgres" else one
        for one in state.allocation.grants
    )
    shown = render_pools.pools(
        replace(state, allocation=replace(state.allocation, grants=grants)), Output()
    )
    (line,) = [one.plain for one in shown if "postgres" in one.plain]
    assert "exclusive, ended" in line


def test_which_container_is_not_clear() -> None:
    """Nobody, several, an allocator that is off or suspended: an error that says so."""
    for state, name, said in (
        (STATE, "nobody", "no container 'nobody'"),
        (
            docs.allotted(grants=[docs.grant("a", "app"), docs.grant("b", "app")]),
            "app",
            "matches 2",
        ),
        (docs.state(), "app", "CPU allocation is off"),
        (docs.allotted(suspended="the kubelet decides"), "app", "the kubelet decides"),
    ):
        with pytest.raises(KataPinError, match=said):
            choose_grant(state, name)


def test_orders(serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Set, listed, set anew and taken back; by full name also for pods that are not there yet."""
    config = _serve(serve, tmp_path)
    assert run(["policy", "get", "--config", config]) == 0
    assert capsys.readouterr().out == "no overrides\n"
    assert run(["policy", "set", "shop/late", "share", "--config", config]) == 0
    assert run(["policy", "set", "shop/late", "exclusive", "--config", config]) == 0
    capsys.readouterr()
    assert run(["policy", "get", "--json", "--config", config]) == 0
    assert _json(capsys)["overrides"] == {"shop/late": "exclusive"}
    assert "shop/late  exclusive" in (tmp_path / "policies").read_text()
    assert run(["policy", "unset", "shop/late", "--config", config]) == 0
    capsys.readouterr()
    assert run(["policy", "unset", "shop/late", "--config", config]) == 1
    assert "no override for shop/late" in capsys.readouterr().err


def test_a_pod_that_runs_is_found_by_less(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pod's short name or the start of its sandbox's id means its full name."""
    document = replace(STATE, sandboxes=(docs.database(),))
    config = _serve(serve, tmp_path, document)
    for name in ("db-0", docs.database().id[:8]):
        assert run(["policy", "set", name, "share", "--config", config]) == 0
        assert capsys.readouterr().out == "default/db-0: share\n"


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["set", "shop/web", "shared"], 2),
        (["set", "a/b/c", "share"], 1),
        (["set", "nobody", "share"], 1),
    ],
)
def test_wrong_orders(
    serve: Serve,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
) -> None:
    """An unknown class, an impossible name, or a pod that is not there writes nothing."""
    config = _serve(serve, tmp_path)
    assert run(["policy", *arguments, "--config", config]) == status
    assert not (tmp_path / "policies").exists()


@pytest.mark.parametrize("policy", ["none", "static"])
def test_orders_without_effect_are_told(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: str
) -> None:
    """Where the policy does not look at orders a warning says so."""
    config = _serve(serve, tmp_path, policy=policy)
    assert run(["policy", "set", "shop/web", "share", "--config", config]) == 0
    assert f"no effect while alloc.policy is {policy}" in capsys.readouterr().err
