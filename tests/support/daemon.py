"""The real daemon on a private node: its directories, its configuration, its life.

    with private_node() as node:
        daemon = node.start()
        with node.pod("p1") as pod:
            pod.announce()
            pod.create("c1", cpus="1")

`kata-pin run` is a process of its own, ready when it says so over sd_notify(3). A node has a
bystander that looks like a VMM; its affinity is checked when the node ends. Processes are ended by
pid, also after a failure.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Self

from tests.support.hooks import HookRun, run_hook
from tests.support.katalike import ContainerSpec, KataDirs, KataSandbox
from tests.support.qemu import QEMU
from tests.support.vmmhost import SHIMS, Bystander, lookalike
from tests.support.waiting import SCALE, wait_for

PROGRAM = Path(sys.executable).with_name("kata-pin")
PERIOD_US = 100_000
NOTHING: Mapping[str, object] = MappingProxyType({})
QUIET = {"affinity_s": 3600, "deep_s": 86400}
"""Audit periods of a daemon that acts on events alone."""

PATIENT = ("--record-ms=10000", "--pin-ms=10000")
"""Budgets of a hook that waits for its pins, however loaded the machine is."""

PATIENT_QMP = {"greeting_ms": 1000, "session_ms": 5000}
"""The longest that settings allow: also on a loaded machine QEMU answers within them."""

Json = dict[str, Any]


class Refused(Exception):  # noqa: N818 - an answer
    """The daemon does not grant a request; the text is its reason."""


def asked(
    path: Path, verb: str, within_s: float = 10.0 * SCALE, arguments: Mapping[str, object] = NOTHING
) -> Json:
    """Return the document of a verb of a daemon's socket; raises Refused, or OSError."""
    request = json.dumps({"version": 1, "verb": verb, **arguments})
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(within_s)
        peer.connect(str(path))
        peer.sendall(f"{request}\n".encode())
        with peer.makefile("rb") as reply:
            answer: Json = json.loads(reply.readline() or b'{"ok": false, "error": ""}')
    if not answer["ok"]:
        raise Refused(f"{answer['error']} ({answer.get('hint', '')})")
    document: Json = answer["document"]
    return document


class Record(NamedTuple):
    """A container in the registry's file; `cpus` is a cpu list."""

    id: str
    sandbox_id: str
    state: str
    cpus: str | None
    name: str
    pod_name: str
    pod_namespace: str
    pod_uid: str
    handler: str
    source: str
    note: str

    @property
    def counts(self) -> bool:
        """Whether it may run."""
        return self.state in {"created", "running"}


class Node:
    """Kata's directories, kata-pin's runtime directory and its configuration, all private.

    Processes are not: whoever else plays sandboxes on this machine is seen by the daemon too. So
    sandbox ids are this node's own (`id_of`), and only its own sandboxes are looked at.
    """

    def __init__(self, root: Path, settings: Mapping[str, Any]) -> None:
        self.root = root
        self.dirs = KataDirs.below(root)
        self.runtime_dir = root / "kp"
        self.config = root / "config.yaml"
        self.settings: Json = {}
        self.daemon: Daemon | None = None
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notify.bind(str(root / "notify"))
        (root / "notify").chmod(0o777)  # as systemd's: the daemon is not root
        root.chmod(0o755)
        self.configure(**settings)

    def configure(self, **settings: Any) -> None:
        """Write the configuration: the defaults of tests, and what differs from them."""
        self.settings = {
            "version": 1,
            "runtime_dir": str(self.runtime_dir),
            "log_level": "debug",
            "user": "nobody",
            "nri": {"enabled": "no"},
            "hypervisors": [QEMU],
            "shims": [*SHIMS],
            "audit": dict(QUIET),
            "qmp": dict(PATIENT_QMP),
            "paths": {
                "cdi": str(self.root / "cdi"),
                "vc": str(self.dirs.vc),
                "kata": str(self.dirs.kata),
                "bundle_roots": [str(self.dirs.bundles)],
                "debugfs": str(self.root / "debug"),
                "kubelet_state": str(self.root / "cpu_manager_state"),
                "kata_configs": [],
            },
            **settings,
        }
        self.config.write_text(json.dumps(self.settings))

    # ---- the daemon ----------------------------------------------------------------------

    def start(self, prefix: Sequence[str] = (), *, ready: bool = True) -> Daemon:
        """Start `kata-pin run`, behind a prefix such as `unshare`; wait until it is ready."""
        with (self.root / "daemon.log").open("ab") as log:
            process = subprocess.Popen(
                [*prefix, str(PROGRAM), "--config", str(self.config), "run"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": os.environ["PATH"], "NOTIFY_SOCKET": str(self.root / "notify")},
            )
        self.daemon = Daemon(self, process)
        if ready:
            self.daemon.wait_ready()
        return self.daemon

    def cli(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of kata-pin with this node's configuration."""
        return subprocess.run(
            [str(PROGRAM), "--config", str(self.config), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=30 * SCALE,
        )

    @property
    def log(self) -> str:
        """What the daemons of this node have said."""
        return (self.root / "daemon.log").read_text(errors="replace")

    # ---- asking it -----------------------------------------------------------------------

    def ask(self, verb: str, **arguments: object) -> Json:
        """Return the document of a verb of the control socket; raises Refused, or OSError."""
        return asked(self.runtime_dir / "control.sock", verb, arguments=arguments)

    def id_of(self, name: str) -> str:
        """Return the id of this node's sandbox of that name."""
        return f"{self.root.name}-{name}"

    def sandboxes(self) -> dict[str, Json]:
        """Return what the state document says of each of this node's sandboxes, by name."""
        return self.by_name(self.ask("state"))

    def by_name(self, state: Json) -> dict[str, Json]:
        """Return this node's sandboxes of a state document, by name."""
        prefix = self.id_of("")
        own = [one for one in state["sandboxes"] if one["id"].startswith(prefix)]
        return {one["id"].removeprefix(prefix): one for one in own}

    def wait_state(self, name: str, state: str) -> Json:
        """Wait until a sandbox is shown in a state; return what is shown."""

        def shown() -> Json | None:
            one = self.sandboxes().get(name)
            return one if one is not None and one["state"] == state else None

        try:
            return wait_for(shown, f"{name} shown as {state}")
        except TimeoutError as error:
            error.add_note(json.dumps(self.sandboxes().get(name), indent=1)[:4000])
            raise

    def registered(self) -> dict[str, Record]:
        """Return every container in the registry's file, read beside the daemon."""
        path = self.runtime_dir / "registry.db"
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        order = "ORDER BY sandbox_id, first_ns, id"
        try:
            with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as file:
                of_boot = file.execute("SELECT value FROM meta WHERE key = 'boot_id'").fetchone()
                columns = ", ".join(Record._fields)
                rows = file.execute(f"SELECT {columns} FROM containers {order}").fetchall()
        except sqlite3.OperationalError:  # no file, or none with tables yet
            return {}
        return {row[0]: Record(*row) for row in rows} if of_boot == (boot_id,) else {}

    def spooled(self) -> list[Path]:
        """Return the messages that wait in the spool."""
        return sorted((self.runtime_dir / "spool").glob("*.msg"))

    # ---- pods ----------------------------------------------------------------------------

    def pod(self, name: str, **options: Any) -> Pod:
        """Return a sandbox to be started, with the hooks that Kata would run."""
        return Pod(self, KataSandbox(self.dirs, self.id_of(name), **options))

    def bundle(self, container_id: str, config: Mapping[str, Any]) -> Path:
        """Write a container's bundle."""
        bundle = self.dirs.bundles / container_id
        bundle.mkdir(exist_ok=True)
        (bundle / "config.json").write_text(json.dumps(config))
        return bundle

    def hook(
        self, phase: str, container_id: str, pid: int, *arguments: str, state_id: str = ""
    ) -> HookRun:
        """Run the hook program as Kata's Go runtime does, with PATIENT or other arguments."""
        state = {
            "ociVersion": "",
            "id": state_id or container_id,
            "status": "",
            "pid": pid,
            "bundle": str(self.dirs.bundles / container_id),
        }
        words = arguments or PATIENT
        return run_hook(self.runtime_dir, phase, *words, state=json.dumps(state).encode())

    def end(self) -> None:
        """End the daemon, whatever became of it."""
        if self.daemon is not None:
            self.daemon.kill()
        self.notify.close()


class Daemon:
    """One running `kata-pin run`."""

    def __init__(self, node: Node, process: subprocess.Popen[bytes]) -> None:
        self._node = node
        self.process = process

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def wait_ready(self, timeout_s: float = 20.0) -> None:
        """Wait until it has told the service manager that it serves; fail if it ends first."""
        deadline = time.monotonic() + timeout_s * SCALE
        self._node.notify.settimeout(0.1)
        while time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                if self._node.notify.recv(4096).startswith(b"READY=1"):
                    return
            if self.process.poll() is not None:
                break
        raise RuntimeError(f"the daemon is not ready ({self.process.poll()}): {self._node.log}")

    def terminate(self) -> int:
        """Ask it to end; return its exit status."""
        self.process.terminate()
        return self.process.wait(10 * SCALE)

    def kill(self) -> None:
        """End it with SIGKILL: it cannot tidy up."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10 * SCALE)

    def reload(self) -> None:
        """Send SIGHUP and wait until it has told the service manager that it is done."""
        self._drain()
        self.process.send_signal(signal.SIGHUP)
        self.wait_ready()

    @contextlib.contextmanager
    def hung(self) -> Iterator[None]:
        """Stop it for a while: it neither runs nor ends."""
        self.process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.pid}/stat")
        wait_for(lambda: stat.read_text().rpartition(") ")[2][0] == "T", "the daemon to stop")
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def _drain(self) -> None:
        self._node.notify.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._node.notify.recv(4096)


class Pod:
    """A sandbox of a node and the hooks that Kata's Go runtime runs for it."""

    def __init__(self, node: Node, kata: KataSandbox) -> None:
        self.node = node
        self.kata = kata
        self.id = kata.id

    def __enter__(self) -> Self:
        self.kata.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kata.stop()

    def announce(self, *arguments: str) -> HookRun:
        """Run the sandbox container's createRuntime; Kata lets go of qmp.sock meanwhile."""
        self.write_bundle(self.id, kind="sandbox")
        self.kata.shim.let_go()
        try:
            return self.node.hook("createRuntime", self.id, self.kata.pid, *arguments)
        finally:
            self.kata.shim.hold()

    def create(
        self, container_id: str, cpus: str | None, *arguments: str, exclusive: bool = False
    ) -> HookRun:
        """Create a container: Kata keeps it, then its createRuntime runs."""
        self.write_bundle(container_id, cpus, exclusive=exclusive)
        self.persist(container_id, cpus, exclusive=exclusive)
        return self.node.hook("createRuntime", container_id, self.kata.pid, *arguments)

    def started(self, container_id: str) -> HookRun:
        """Run a container's poststart: the state names the sandbox and a thread of the shim."""
        return self._of_shim("poststart", container_id)

    def stop(self, container_id: str, *arguments: str) -> HookRun:
        """Delete a container: Kata forgets it, then its poststop runs."""
        self.kata.write_persist([c for c in self.kata.containers if c.id != container_id])
        return self._of_shim("poststop", container_id, *arguments)

    def persist(self, container_id: str, cpus: str | None, *, exclusive: bool = False) -> None:
        """Write a container into persist.json, or what it has now."""
        quota = _quota(cpus) if cpus and exclusive else None
        others = [one for one in self.kata.containers if one.id != container_id]
        self.kata.write_persist([*others, ContainerSpec(container_id, cpus=cpus, quota=quota)])

    def write_bundle(
        self,
        container_id: str,
        cpus: str | None = None,
        *,
        kind: str = "container",
        exclusive: bool = False,
    ) -> Path:
        """Write the bundle that containerd makes."""
        cpu: Json = {"cpus": cpus} if cpus else {}
        if cpus:
            cpu |= {"quota": _quota(cpus), "period": PERIOD_US} if exclusive else {"shares": 102}
        annotations = {
            "io.kubernetes.cri.container-type": kind,
            "io.kubernetes.cri.sandbox-id": self.id,
            "io.kubernetes.cri.sandbox-name": f"pod-{self.id}",
            "io.kubernetes.cri.sandbox-namespace": "shop",
        }
        qos = "pod" if exclusive else "burstable/pod"
        return self.node.bundle(
            container_id,
            {
                "ociVersion": "1.0.2",
                "annotations": annotations,
                "linux": {
                    "cgroupsPath": f"/kubepods/{qos}{self.id}/{container_id}",
                    "resources": {"cpu": cpu},
                },
            },
        )

    # ---- what the kernel says ------------------------------------------------------------

    def misplaced(self, rest: set[int], pairs: Mapping[int, int] | None = None) -> list[str]:
        """Return a line for each thread of QEMU that is elsewhere; `pairs` is pCPU by vCPU."""
        vcpus = self.kata.vcpus() if pairs else {}
        wanted = {tid: {pairs[n]} for n, tid in vcpus.items() if pairs and n in pairs}
        lines = []
        for tid in self.kata.tids():
            with contextlib.suppress(ProcessLookupError):
                affinity = os.sched_getaffinity(tid)
                if affinity != wanted.get(tid, rest):
                    lines.append(f"thread {tid} on {affinity}, not {wanted.get(tid, rest)}")
        return lines

    def wait_placed(
        self, rest: set[int], pairs: Mapping[int, int] | None = None, *, within_s: float = 10.0
    ) -> None:
        """Wait until every thread of QEMU is where it should be, as the kernel tells."""
        try:
            wait_for(lambda: not self.misplaced(rest, pairs), "pins to stand", within_s)
        except TimeoutError as error:
            error.add_note("\n".join([*self.misplaced(rest, pairs), self.node.log[-4000:]]))
            raise

    def _of_shim(self, phase: str, container_id: str, *arguments: str) -> HookRun:
        shim = self.kata.shim.pid
        return self.node.hook(phase, container_id, shim, *arguments, state_id=self.id)


@contextlib.contextmanager
def private_node(where: Path | None = None, **settings: Any) -> Iterator[Node]:
    """Make a node, end its daemon and remove it; its bystander must not have been touched."""
    root = Path(tempfile.mkdtemp(prefix="kp", dir=where))
    node = Node(root, settings)
    try:
        with lookalike("-name", f"sandbox-{node.id_of('p1')}", "-smp", "2") as process:
            bystander = Bystander(process.pid)
            yield node
            bystander.check()
    finally:
        node.end()
        shutil.rmtree(root)


def assert_unprivileged(pid: int) -> None:
    """Assert that the deciding process is no root, has no capability, and can gain none."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    assert "0" not in status["Uid"]
    assert "0" not in status["Gid"]
    for kind in ("CapEff", "CapPrm", "CapInh", "CapAmb"):
        assert int(status[kind][0], 16) == 0
    assert status["NoNewPrivs"] == ["1"]


def move_elsewhere(tid: int, cpus: set[int]) -> None:
    """Set a thread's affinity as another writer would."""
    os.sched_setaffinity(tid, cpus)


def is_away(node: Node) -> bool:
    """Whether no daemon answers."""
    try:
        node.ask("ping")
    except (OSError, Refused):
        return True
    return False


def _quota(cpus: str) -> int:
    return PERIOD_US * len(cpus.split(","))
