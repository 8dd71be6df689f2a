"""A wall clock that is far off: in 2298 Python cannot tell the time any more."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.support import waiting
from tests.support.daemon import private_node

pytestmark = [
    pytest.mark.qemu,
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]

SOURCE = Path(waiting.__file__).with_name("aheadclock.c")
YEARS_272 = 272 * 365 * 86400


def test_the_daemon_lives_in_2298(tmp_path: Path) -> None:
    """It starts, records, pins, audits and answers."""
    library = tmp_path / "ahead.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, SOURCE], check=True, timeout=60)
    tmp_path.chmod(0o755)
    with private_node(audit={"affinity_s": 0.1, "deep_s": 0.3}) as node:
        daemon = node.start(["env", f"LD_PRELOAD={library}", f"CLOCK_AHEAD_S={YEARS_272}"])
        with node.pod("p1") as pod:
            pod.announce()
            assert pod.create("c1", "0").stderr == ""
            pod.wait_placed({0})
            time.sleep(1)
            assert daemon.process.poll() is None
            assert node.ask("state")["time"].startswith("2262-")
            assert node.ask("history", name="", since_s=None, limit=10)["changes"]
            assert "Traceback" not in node.log
