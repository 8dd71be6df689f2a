"""Debian's headless Chromium on one page at a time, asked by its DevTools protocol over two pipes.

Nothing else is needed: requests and answers are JSON that ends with a zero byte, on descriptors 3
and 4 of the browser (--remote-debugging-pipe).
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import struct
import subprocess
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = "chromium-headless-shell"
ANSWER_S = 30.0


class Browser:
    """A browser with one tab."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._read = b""
        self._number = 0
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.requests: list[str] = []
        self.call("Page.enable")
        self.call("Network.enable")

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Return what a method answers."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("method") == "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def show(
        self, file: Path, *, dark: bool = False, width: int = 1400, media: str = "screen"
    ) -> None:
        """Open a file in one of the two themes and wait until it is drawn."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        self.requests.clear()
        self.call("Page.navigate", url=file.as_uri())
        end = time.monotonic() + ANSWER_S
        while self.evaluate("document.readyState") != "complete":
            assert time.monotonic() < end, f"{file} is not loaded"

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, part: Mapping[str, float] | None = None) -> bytes:
        """Return the whole page, or a rectangle of it, as a PNG file."""
        whole = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {**(part or whole), "scale": 1}
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(answer["data"])

    def _message(self) -> dict[str, Any]:
        end = time.monotonic() + ANSWER_S
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._back], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            chunk = os.read(self._back, 1 << 20)
            assert chunk, "the browser has ended"
            self._read += chunk
        line, _, self._read = self._read.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Run a browser whose profile is in a folder."""
    program = shutil.which(PROGRAM)
    assert program is not None, f"{PROGRAM} is missing: scripts/setup installs it"
    from_us, to = os.pipe()
    back, to_us = os.pipe()
    # The shell gives the pipes their numbers, whatever numbers they have here.
    script = f'exec {program} "$@" 3<&{from_us} 4>&{to_us}'
    options = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--hide-scrollbars", "--remote-debugging-pipe", f"--user-data-dir={folder}"),
    ]
    process = subprocess.Popen(
        ["/bin/bash", "-c", script, "chromium", *options],
        pass_fds=(from_us, to_us),
        env=os.environ | {"HOME": str(folder), "TMPDIR": str(folder)},
        stderr=subprocess.DEVNULL,
    )
    os.close(from_us)
    os.close(to_us)
    try:
        yield Browser(to, back)
    finally:
        os.close(to)
        os.close(back)
        process.kill()
        process.wait()


def pixels(png: bytes) -> tuple[int, int, list[tuple[int, int, int]]]:
    """Return width, height and colours, row by row, of an 8-bit PNG with or without alpha."""
    width, height = struct.unpack(">II", png[16:24])
    step = {2: 3, 6: 4}[png[25]]
    data, place = b"", 8
    while place < len(png):
        (size,) = struct.unpack(">I", png[place : place + 4])
        if png[place + 4 : place + 8] == b"IDAT":
            data += png[place + 8 : place + 8 + size]
        place += size + 12
    raw = zlib.decompress(data)
    stride = width * step
    above = bytearray(stride)
    found = []
    for start in range(0, len(raw), stride + 1):
        line = bytearray(raw[start + 1 : start + 1 + stride])
        _unfilter(raw[start], line, above, step)
        above = line
        found += [(line[n], line[n + 1], line[n + 2]) for n in range(0, stride, step)]
    return width, height, found


def _unfilter(kind: int, line: bytearray, above: bytearray, step: int) -> None:
    """Undo a row's filter (PNG specification, 9.2)."""
    for n in range(len(line) if kind else 0):
        left = line[n - step] if n >= step else 0
        up = above[n]
        corner = above[n - step] if n >= step else 0
        guess = left + up - corner
        paeth = min((left, up, corner), key=lambda one: abs(guess - one))
        line[n] = (line[n] + (0, left, up, (left + up) // 2, paeth)[kind]) & 255
