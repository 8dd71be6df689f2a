"""What a new checkpoint of the kubelet changes: which pods have other CPUs than before."""

from __future__ import annotations

from kata_pin.model.node import KubeletState


def touched(before: KubeletState | None, now: KubeletState | None) -> tuple[frozenset[str], bool]:
    """Return the uids of the pods whose assignments differ, and whether all others may differ too.

    Others may where the policy or the default set is another: that is what every container has that
    is not in the checkpoint.
    """
    if before is None or now is None:
        one = before or now
        uids = one.entries.keys() | one.pod_entries.keys() if one is not None else frozenset()
        return frozenset(uids), before is not now
    pods = {
        uid
        for old, new in ((before.entries, now.entries), (before.pod_entries, now.pod_entries))
        for uid in old.keys() | new.keys()
        if old.get(uid) != new.get(uid)
    }
    return frozenset(pods), (before.policy, before.default) != (now.policy, now.default)
