"""Errors that pass: of opening a bundle's file, of a full file system, of a damaged checkpoint."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kata_pin.base.sandbox import Container
from kata_pin.records.containers import Registry
from kata_pin.service.protocol import ask
from tests.bench.figures import MS, BenchError, Row, count_row
from tests.bench.node import BenchNode
from tests.bench.service import service
from tests.bench.standins import StandIns, program, write_state
from tests.chaos import traffic
from tests.chaos.fuzz.mutator import Mutator
from tests.chaos.fuzz.targets import TARGETS
from tests.support.fuse import FaultyFiles
from tests.support.katalike import ContainerSpec
from tests.support.waiting import wait_for

PASSING: Final = tuple(
    getattr(errno, name) for name in ("EMFILE", "ENFILE", "ENOMEM", "EIO", "EINTR", "EAGAIN")
)
BATCH: Final = 20
AUDITS: Final = {"affinity_s": 1, "deep_s": 3}
DISK_KIB: Final = 8192


def records(hooks: int, _only: tuple[str, ...]) -> Iterator[Row]:
    """Yield what became of containers whose config.json could not be opened at first."""
    numbers = itertools.count()
    wrong, spooled = [], 0
    with BenchNode() as node, contextlib.closing(StandIns(node)) as stand_ins:
        (sandbox,) = stand_ins.grow(1)
        folder = node.dirs.bundles / "faulty"
        settings = {"hypervisors": [str(program(node))], "nri": {"enabled": "no"}, "audit": AUDITS}
        with FaultyFiles(folder) as files, service(node, **settings):
            for _ in range(max(1, hooks // BATCH)):
                ids = [f"{sandbox}-r{next(numbers):06d}" for _ in range(BATCH)]
                specs = [ContainerSpec(one, cpus=str(node.last_cpu), shares=1024) for one in ids]
                pid = stand_ins.pids[0]
                for number, one in enumerate(ids):
                    # Of a container of another bundle folder the config is what a runtime wrote.
                    made = node.container(sandbox, one.removeprefix(f"{sandbox}-"), cpus="0")
                    files.write(f"{one}/config.json", (made.bundle / "config.json").read_bytes())
                    error = PASSING[number % len(PASSING)]
                    files.refuse(f"{one}/config.json", error, times=1 + number % 2)
                    body = made.state(pid).replace(
                        str(made.bundle).encode(), str(folder / one).encode()
                    )
                    spooled += b"spooled" in traffic.hook(node, "createRuntime", body).stderr
                    files.refuse(f"{one}/config.json", error, times=0)
                # Kata writes its state after the hooks, and never reports who was refused what.
                write_state(node, sandbox, pid, [ContainerSpec(sandbox), *specs])
                _spool_empty(node)
                wrong += list(_misplaced(node, sandbox, ids))
                for one in ids:
                    files.remove(one)
    yield count_row("records: containers recorded wrong", len(wrong), hooks, "; ".join(wrong[:2]))
    yield Row("records: hooks that spooled", spooled, "", hooks)


def _misplaced(node: BenchNode, sandbox: str, ids: list[str]) -> Iterator[str]:
    """Yield the containers that have not come to be recorded as they are, within some audits."""
    missing = list(ids)
    deadline = time.monotonic() + 4 * AUDITS["deep_s"]
    registered: dict[str, Container] = {}
    while missing and time.monotonic() < deadline:
        registered = _registered(node)
        missing = [
            one
            for one in ids
            if one not in registered
            or registered[one].sandbox_id != sandbox
            or registered[one].cpus is None
        ]
        time.sleep(0.1)
    for one in missing:
        found = registered.get(one)
        yield f"{one} is {'absent' if found is None else f'in {found.sandbox_id}: {found.note}'}"


def disk(sandboxes: int, _only: tuple[str, ...]) -> Iterator[Row]:
    """Yield whether everything that came while the disk was full is adopted once it is not."""
    with BenchNode() as node, contextlib.closing(StandIns(node)) as stand_ins:
        settings = {"hypervisors": [str(program(node))], "nri": {"enabled": "no"}, "audit": AUDITS}
        with _tmpfs(node.runtime_dir), service(node, **settings) as daemon:
            filler = node.runtime_dir / "filler"
            _fill(filler)
            ids = stand_ins.grow(sandboxes)
            lost = 0
            for one, pid in zip(ids, stand_ins.pids, strict=True):
                container = node.container(one, "c1", cpus=str(node.last_cpu))
                said = traffic.hook(node, "createRuntime", container.state(pid)).stderr
                lost += b"neither recorded" in said
            time.sleep(2 * AUDITS["deep_s"] + 1)  # audits try, and fail
            start = time.monotonic()
            ask(str(node.runtime_dir / "control.sock"), "ping", {}, 5.0)
            filler.unlink()
            wanted = {f"{one}-c1" for one in ids} | set(ids)
            with contextlib.suppress(TimeoutError):
                wait_for(lambda: wanted <= _registered(node).keys(), "all to be adopted", 30)
            took = time.monotonic() - start
            absent = wanted - _registered(node).keys()
            log = daemon.log
    detail = f"{lost} hooks could leave nothing; all there after {took:.1f} s"
    yield count_row("disk: containers not adopted", len(absent), len(wanted), detail)
    yield count_row("disk: tracebacks and bare errnos logged", _bare(log), len(wanted), "")


@contextlib.contextmanager
def _tmpfs(at: Path) -> Iterator[None]:
    at.mkdir(parents=True)
    options = f"size={DISK_KIB}k,mode=0750"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(at)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def checkpoint(files: int, _only: tuple[str, ...]) -> Iterator[Row]:
    """Yield whether the daemon starts, and stays, whatever the kubelet's file holds."""
    target = TARGETS["checkpoint"]
    surrogate = (
        b'{"policyName":"static","defaultCpuSet":"0","entries":{"\\ud800":{"c":"1"}},"checksum":1}'
    )
    inputs = itertools.islice(Mutator(target.seeds(), target.words, 7), files)
    failed: list[str] = []
    slowest = 0.0
    with BenchNode() as node:
        state = node.root / "cpu_manager_state"
        paths: dict[str, Any] = {
            "vc": str(node.dirs.vc), "kata": str(node.dirs.kata), "kata_configs": [],
            "bundle_roots": [str(node.dirs.bundles)], "kubelet_state": str(state),
        }  # fmt: skip
        state.write_bytes(surrogate)
        settings = {"paths": paths, "nri": {"enabled": "no"}, "audit": AUDITS}
        with service(node, **settings) as daemon:
            for number, data in enumerate(inputs):
                state.with_suffix(".new").write_bytes(data)
                state.with_suffix(".new").rename(state)
                start = time.monotonic()
                if number % 10 == 0:
                    os.kill(daemon.pid, signal.SIGHUP)
                try:
                    ask(str(node.runtime_dir / "control.sock"), "state", {}, 5.0)
                except Exception as error:  # whatever it is, the daemon did not answer
                    failed.append(f"{error}: {data[:80]!r}")
                    if not traffic.runs(daemon.pid):
                        break
                slowest = max(slowest, time.monotonic() - start)
            log = daemon.log
    yield count_row("checkpoint: states not answered", len(failed), files, "; ".join(failed[:1]))
    yield Row("checkpoint: slowest answer", slowest * MS, "ms", files)
    yield count_row("checkpoint: tracebacks and bare errnos logged", _bare(log), files, "")


def _bare(log: str) -> int:
    return sum("Traceback" in line or "[Errno" in line for line in log.splitlines())


def _spool_empty(node: BenchNode) -> None:
    spool = node.runtime_dir / "spool"
    wait_for(lambda: not list(spool.glob("*.msg")), "the spool to be taken in", 30)


def _registered(node: BenchNode) -> dict[str, Container]:
    """Return every container of the registry's file, read beside the daemon."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    try:
        copy = Registry.copy_of(str(node.runtime_dir / "registry.db"), boot_id=boot_id)
    except OSError as error:
        raise BenchError(f"no registry: {error}") from error
    try:
        return {one.id: one for each in copy.sandboxes() for one in copy.containers(each)}
    finally:
        copy.close()
