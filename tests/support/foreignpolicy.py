"""A policy of another package, as an installed one: `make_package` writes it into a folder.

It gives what `static` gives, and beside that whatever a decision may carry. Its limits follow the
administrator's override (`policy set`), so that they can be changed while a container runs.
"""

from __future__ import annotations

from pathlib import Path

NAME = "generous"

_MODULE = """
from msgspec.structs import replace

from kata_pin.base.allocation import AtCreation, Device, Limits, Mount
from kata_pin.options.allocation.policies import BUILTIN

MIB = 1 << 20
KMSG = Device("/dev/kmsg", "c", 1, 11, mode=0o440, access="r")
WRONG = Device("/dev/kmsg", "c", 1, 5)
NOTES = (("hints.example.com/node", "0"),)


class Generous:
    name = "generous"

    def __init__(self, topology, settings):
        self._static = BUILTIN["static"](topology, settings)
        self._hints = settings.mount_sources[0]
        self.start, self.release = self._static.start, self._static.release
        self.reconcile, self.decline = self._static.reconcile, self._static.decline
        self.candidates = self._static.candidates

    def allocate(self, state, request):
        return self._with_more(state, self._static.allocate(state, request), request)

    def change(self, state, request):
        return self._with_more(state, self._static.change(state, request), request)

    def _with_more(self, before, decision, request):
        grant = decision.state.grants[request.container_id]
        chosen = request.pod.ordered is not None
        limits = Limits(
            shares=2048 if chosen else 512,
            quota_us=70_000 if chosen else 50_000,
            period_us=50_000,
            memory=(96 if chosen else 64) * MIB,
        )
        creation = AtCreation(
            hugepages=(("2MB", 4 * MIB),) if "huge" in request.pod.name else (),
            env=(("HINT", "a b"),),
            mounts=(Mount("/hints", self._hints),),
            devices=(KMSG,) if "dev" in request.pod.name else (),
            annotations=NOTES if "dev" in request.pod.name else (),
        )
        if "wrong" in request.pod.name:
            creation = replace(creation, devices=(WRONG,))
        if request.pod.kata and "big" not in request.pod.name:
            limits = Limits(shares=limits.shares)
        more = replace(grant, limits=limits, creation=creation)
        if more == grant:
            return decision
        changed = [one for one in decision.changed if one.container_id != request.container_id]
        return replace(
            decision, state=decision.state.with_grant(more), changed=(*changed, more)
        )
"""


def make_package(folder: Path) -> Path:
    """Write the package into a folder of Python's path, readable for everybody; return it."""
    info = folder / "generous-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "generous_policy.py").write_text(_MODULE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: generous\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[kata_pin.policies]\n{NAME} = generous_policy:Generous\n"
    )
    folder.chmod(0o755)
    return folder
