"""Records a plugin's connection to the real containerd; see README.md.

PYTHONPATH=. .venv/bin/python tests/data/nri/record.py
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path

from kata_pin.peers.nri.messages import Event, Snapshot
from kata_pin.peers.nri.plugin import NriPlugin
from tests.support.containerd import Containerd, private_containerd
from tests.support.katalike import KataDirs

HERE = Path(__file__).parent


class Silent:
    """A listener that is only told."""

    def __init__(self) -> None:
        self.synchronized = asyncio.Event()

    async def rebuild(self, snapshot: Snapshot, stamp_ns: int) -> None:
        """Take note that it came."""
        self.synchronized.set()

    def receive(self, event: Event, stamp_ns: int) -> int:
        """Do nothing."""
        return 0

    async def placed(self, event: Event, ticket: int) -> None:
        """Wait for nothing."""


class Relay:
    """Stands between plugin and runtime and writes down what each says."""

    def __init__(self, runtime: Path) -> None:
        self._runtime = str(runtime)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay one connection."""
        reader2, writer2 = await asyncio.open_unix_connection(self._runtime)
        await asyncio.gather(
            self._copy(reader, writer2, HERE / "from-plugin.bin"),
            self._copy(reader2, writer, HERE / "from-containerd.bin"),
        )

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: Path
    ) -> None:
        path.write_bytes(b"")
        while data := await reader.read(65536):
            with path.open("ab") as file:
                file.write(data)
            writer.write(data)
        writer.close()


async def _record(containerd: Containerd) -> None:
    cri = containerd.cri

    def earlier() -> None:
        pod = cri.run_pod("earlier")
        cri.start(cri.create(pod, "app", pod_name="earlier", cpuset_cpus="0-1", cpu_shares=512))
        cri.create(pod, "waiting", pod_name="earlier")

    def later() -> None:
        pod = cri.run_pod("later", annotations={"note": "x"})
        app = cri.create(pod, "app", pod_name="later", cpuset_cpus="1", cpu_quota=100000)
        cri.start(app)
        cri.update(app, cpuset_cpus="0")
        cri.stop(app)
        cri.remove(app)
        cri.stop_pod(pod)
        cri.remove_pod(pod)

    await asyncio.to_thread(earlier)
    listener = Silent()
    relay = Relay(containerd.nri_socket)
    path = f"{containerd.shared}/relay.sock"
    async with await asyncio.start_unix_server(relay.serve, path) as server:
        plugin = NriPlugin(listener, socket_path=path, name="kata-pin", index="95", wanted=True)
        task = asyncio.create_task(plugin.run())
        await asyncio.wait_for(listener.synchronized.wait(), 10)
        await asyncio.to_thread(later)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        server.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="cd") as name:
        folder = Path(name)
        with private_containerd(folder, KataDirs.below(folder / "kata")) as made:
            asyncio.run(_record(made))
