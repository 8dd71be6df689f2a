"""The demo's story: a shared pod, then one that buys an exclusive CPU, and what follows.

Each step says what a node would do, does it, and has the kernel prove what kata-pin made of it: the
affinity of every thread of QEMU, told apart by QEMU itself. What should be is written here by hand.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback

from tests.demo.proof import Proof
from tests.demo.stage import Stage, elapsed
from tests.support import qemu
from tests.support.qemu import Accelerator


def main() -> int:
    """Play it; return 0 when everything was as claimed, and nothing is left behind.

    With --hold the story stops when both pods run, and the stage is kept for the user's commands.
    """
    online = sorted(os.sched_getaffinity(0))
    if len(online) < 2:
        print("the demo needs two CPUs")
        return 1
    started = time.monotonic()
    stage = Stage(Accelerator.TCG if "--tcg" in sys.argv[1:] else qemu.accelerator())
    bystander = subprocess.Popen(["sleep", "infinity"])
    proof = Proof(stage, bystander.pid)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the stage is tidied up
    try:
        _play(stage, proof, online[-2], online[-1], hold="--hold" in sys.argv[1:])
    except Exception:
        traceback.print_exc()
        log = stage.root / "daemon.log"
        print(log.read_text() if log.exists() else "no log of the daemon")
        proof.failed("the story could not be played to its end")
    finally:
        bystander.kill()
        bystander.wait()
        for left in stage.close():
            proof.failed(f"left behind: {left}")
    return proof.summary(elapsed(started))


def _play(stage: Stage, proof: Proof, a: int, b: int, *, hold: bool) -> None:
    _tell(f"pCPU {a} and pCPU {b} are the stage; accelerator: {stage.accelerator}.")
    if not stage.debugfs:
        _tell("debugfs cannot be mounted here: vCPUs are named by KVM's descriptors instead.")
    kvm = stage.accelerator is Accelerator.KVM
    if not kvm:
        _tell("No KVM: QMP in its window names vCPUs, later ones only the order of creation would.")

    _step("The daemon starts on a private runtime directory.")
    stage.start_daemon()

    _step(f"Pod shop/db, shared: the kubelet's shared pool is {a},{b}.")
    db = stage.sandbox("db")
    server = stage.container(db, "server", f"{a},{b}", exclusive=False)
    proof.threads(db, vcpus={}, others={a, b})

    _step(f"Pod shop/web: container app buys pCPU {a}, its sidecar log is shared.")
    web = stage.sandbox("web")
    stage.container(web, "app", f"{a}", exclusive=True)
    log = stage.container(web, "log", f"{b}", exclusive=False)
    proof.threads(web, vcpus={1: {a}}, others={b})

    _step(f"The kubelet takes {a} out of the shared pool: server may use {b} only. No hook runs.")
    stage.update(db, server, f"{b}")
    proof.threads(db, vcpus={}, others={b}, timed=True)
    if hold:
        _step("Both pods are kept for your commands.")
        stage.hold()
        return
    stage.show("show")
    stage.show("show", "web")
    stage.show("show", "--cpus")

    _step("A vCPU is hotplugged into web, as Kata does when a container needs it.")
    web.shim.plug(1)
    plugged = max(web.vcpus())
    # Under TCG nothing names it: such a thread may use the whole sandbox mask, and show says so.
    vcpus = {1: {a}} if kvm else {1: {a}, plugged: {a, b}}
    proof.threads(web, vcpus=vcpus, others={b}, timed=True)

    _step("An administrator moves a paired vCPU by hand; the audit puts it back.")
    os.sched_setaffinity(web.vcpus()[1], {b})
    proof.threads(web, vcpus=vcpus, others={b}, timed=True)

    _step("The daemon is killed. Meanwhile log stops: its hook leaves a message in the spool.")
    stage.kill_daemon()
    log.stop()
    proof.that(stage.spooled >= 1, "the hook's message waits in the spool")
    proof.threads(web, vcpus=vcpus, others={b}, claimed=False)
    stage.run("check", expect=3)
    proof.that(True, "kata-pin check, without a daemon, says that web is not where it should be")

    _step(f"The daemon is back: without log, all of web belongs on {a}.")
    stage.start_daemon()
    proof.threads(web, vcpus={1: {a}}, others={a}, timed=True)
    proof.eventually(lambda: stage.spooled == 0, "the spool is empty")
    proof.eventually(
        lambda: stage.run("check", "--for", "0s", expect=None).startswith("ok: "),
        "kata-pin check finds no drift",
    )

    _step("kata-pin unpin gives everything back.")
    stage.show("unpin")
    everything = os.sched_getaffinity(1)
    proof.threads(web, vcpus={}, others=everything, claimed=False)
    proof.threads(db, vcpus={}, others=everything, claimed=False)


def _step(text: str) -> None:
    print(f"\n== {text}", flush=True)


def _tell(text: str) -> None:
    print(text, flush=True)
