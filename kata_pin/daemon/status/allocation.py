"""The state document's part about our own allocator, as plain JSON values (docs/json.md).

Pure over what the allocator holds at the moment. CPU sets are Linux cpu lists.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from kata_pin.daemon.allocation.allocator import Allocator
from kata_pin.daemon.allocation.ledger import Ledger, cpuset_for
from kata_pin.daemon.allocation.notices import Refused
from kata_pin.daemon.allocation.push import Pusher
from kata_pin.daemon.allocation.restore import KeptCpuset
from kata_pin.daemon.status.documents import Json
from kata_pin.model.alloc import AllocState, Grant
from kata_pin.policy.alloc.allotment import sandbox_of
from kata_pin.wire.nri.replies import Cpuset


def allocation_document(
    allocator: Allocator, problems: Sequence[str] = (), pusher: Pusher | None = None
) -> Json | None:
    """Return the allocator's part, None where the configuration wants none.

    `pusher` is None without a daemon: then nothing is known of what was sent to runtimes.
    """
    if not allocator.on:
        return None
    state, ledger = allocator.state, allocator.ledger
    pending = ledger.pending(allocator.effective)
    return {
        "policy": allocator.policy_name,
        "aside": allocator.aside,
        "guarantee": allocator.guarantee.value,
        "pools": {
            "reserved": str(state.reserved),
            "housekeeping": str(state.housekeeping),
            "shared": str(state.shared),
            "exclusive": str(state.exclusive),
        },
        "held_back": str(allocator.held_back),
        "grants": [_grant(one, state, pending, ledger) for one in state.grants.values()],
        "push": None if pusher is None else _push(pusher, ledger),
        "refusals": allocator.news.refusals.total(),
        "refused": [_refused(one) for one in allocator.news.refused],
        "problems": list(problems),
        "notes": [
            {"code": note.code, "text": note.text, "level": note.level.value}
            for note in allocator.notes
        ],
    }


def _grant(grant: Grant, state: AllocState, pending: Mapping[str, Cpuset], ledger: Ledger) -> Json:
    request, pod = grant.request, grant.request.pod
    own = cpuset_for(grant, state) if ledger.knows(grant.container_id) else Cpuset()
    waits = pending.get(grant.container_id)
    return {
        "id": grant.container_id,
        "kind": grant.kind.value,
        "name": request.name,
        "pod": pod.title,
        "pod_uid": pod.pod_uid,
        "sandbox": sandbox_of(pod),
        "kata": pod.kata,
        "class": grant.cpu_class.value,
        "policy": grant.policy,
        "cpus": str(grant.cpus),
        "exclusive": str(grant.exclusive),
        "shared": None if grant.shared is None else str(grant.shared),
        "mems": str(grant.mems),
        "millis": request.cpu_millis,
        "ordered": None if pod.ordered is None else pod.ordered.value,
        "written": str(own.cpus),
        "pending": None if waits is None else str(waits.cpus),
        "reasons": list(grant.reasons),
    }


def kept_documents(kept: Iterable[KeptCpuset]) -> list[Json]:
    """Return the containers that still have a cpuset of kata-pin's, as plain JSON values."""
    return [{"id": one.id, "pod": one.pod, "name": one.name, "cpus": str(one.cpus)} for one in kept]


def _push(pusher: Pusher, ledger: Ledger) -> Json:
    channel = pusher.channel
    return {
        "way": channel.name,
        "reason": channel.problem,
        "problem": pusher.problem,
        "failures": [{"id": one, "message": why} for one, why in ledger.problems.items()],
    }


def _refused(one: Refused) -> Json:
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(one.at)),
        "id": one.container_id,
        "container": one.title,
        "kind": one.refusal.kind.value,
        "message": one.refusal.message,
        "strict": one.refusal.strict,
    }
