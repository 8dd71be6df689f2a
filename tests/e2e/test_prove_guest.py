"""`prove --guest` beside real VMs on a kernel that counts: of two guests one rests, one never does.

Each has one vCPU and boots Linux. The counts are KVM's of this machine: exits by its tracepoints,
halts and halt polling by its files in debugfs.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from tests.e2e import linuxguest
from tests.e2e.linuxguest import BUSY, hooks, linux
from tests.e2e.node import Node
from tests.support.daemon import Node as PrivateNode
from tests.support.minikata import minikata_node

pytestmark = [pytest.mark.usefixtures("kvm"), pytest.mark.timeout(1800)]

CPUS: Final = {"rests": 4, "busy": 5}
"""The exclusive pCPU of each pod."""

Json = dict[str, Any]


@pytest.fixture
def pods(node: Node, pinner: PrivateNode) -> Iterator[dict[str, str]]:
    """Both pods, each with its only vCPU on its exclusive pCPU: sandbox ids by name."""
    if not (linuxguest.GUEST / "initrd.img").exists():
        pytest.skip(f"no guest in {linuxguest.GUEST}")
    folder = Path(tempfile.mkdtemp(prefix="mk"))
    settings = linux(node, default_vcpus=1, default_maxvcpus=1, default_memory=256)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        kata = stack.enter_context(minikata_node(folder, pinner.dirs, **settings))
        found = {name: pinner.id_of(name) for name in CPUS}
        for name, pod in found.items():
            cpu: Json = {"cpus": str(CPUS[name]), "quota": 100_000, "period": 100_000}
            made = hooks(pinner.runtime_dir)
            stack.enter_context(kata.container(pod, pod, hooks=made)).start()
            work = BUSY if name == "busy" else {}
            container = kata.container(f"{pod}-c", pod, hooks=made, annotations=work, **cpu)
            stack.enter_context(container).start()
        node.wait(lambda: _placed(pinner) == CPUS, "each vCPU on its pCPU", seconds=60)
        yield found


def _placed(pinner: PrivateNode) -> dict[str, int]:
    """Return where each pod's vCPU may run, if on one pCPU alone."""
    return {
        name: int(thread["affinity"])
        for name, sandbox in pinner.sandboxes().items()
        for thread in sandbox["threads"]
        if thread["role"] == "vcpu" and thread["affinity"].isdigit()
    }


def test_halts_and_exits_of_guests_that_rest_and_do_not(
    pinner: PrivateNode, pods: dict[str, str]
) -> None:
    """The guest that rests halts, and its vCPU sleeps; the busy one leaves only for other reasons.

    KVM's counters are read outside of the window in which exits are recorded.
    """
    done = pinner.cli("prove", "--for", "5s", "--guest", "--json")
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    assert document["method"] == "perf", document["refused"]
    guests: dict[str, Json] = {one["sandbox"]: one for one in document["guests"]}
    assert [guest["problems"] for guest in guests.values()] == [[], []]
    rests, busy = (guests[pods[name]] for name in CPUS)
    (idle_vcpu,), (busy_vcpu,) = rests["vcpus"], busy["vcpus"]

    polling = rests["halt_polling"]
    assert 0 < idle_vcpu["halts"] <= polling["halts"], rests
    assert polling["slept_ms"] > 0, rests
    assert idle_vcpu["exits"] is not None

    assert (busy_vcpu["halts"], busy["halt_polling"]["halts"]) == (0, 0), busy
    assert busy["halt_polling"]["slept_ms"] == 0, busy
    assert busy_vcpu["exits"] >= sum(one["times"] for one in busy_vcpu["reasons"]) > 0
    assert {one["reason"] for one in busy_vcpu["reasons"]} - {""}, busy
    assert busy_vcpu["ran_ms"] > idle_vcpu["ran_ms"]
