"""What an API server says of its own load (/metrics), and the difference between two moments."""

from __future__ import annotations

import dataclasses
import re
import time
from collections import Counter
from dataclasses import dataclass
from typing import Final

_LINE: Final = re.compile(r"^(\w+)\{(.*)\} (\S+)$")
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')
_CPU: Final = "process_cpu_seconds_total "
_REQUESTS: Final = "apiserver_request_total"
_TOOK: Final = "apiserver_request_duration_seconds_bucket"
_SENT: Final = "apiserver_request_body_size_bytes_sum"
_LONG: Final = frozenset({"WATCH", "CONNECT"})


@dataclass(frozen=True)
class Load:
    """Counters at one moment, or between two: CPU seconds, requests by resource and status, how
    many of a resource took at most so long, and the bytes of requests by resource."""

    at: float
    cpu_s: float
    requests: Counter[tuple[str, str]]
    took: Counter[tuple[str, float]]
    sent: Counter[str]

    @classmethod
    def of(cls, text: str) -> Load:
        """Read a page of metrics."""
        load = cls(time.monotonic(), 0.0, Counter(), Counter(), Counter())
        cpu_s = 0.0
        for line in text.splitlines():
            if line.startswith(_CPU):
                cpu_s = float(line.removeprefix(_CPU))
            found = _LINE.match(line) if line.startswith((_REQUESTS, _TOOK, _SENT)) else None
            if found is None:
                continue
            labels = dict(_LABEL.findall(found[2]))
            resource = labels.get("resource") or "other"
            if labels.get("verb") in _LONG:
                continue
            if found[1] == _REQUESTS:
                load.requests[resource, labels.get("code", "")] += int(float(found[3]))
            elif found[1] == _TOOK:
                load.took[resource, float(labels["le"])] += int(float(found[3]))
            elif found[1] == _SENT:
                load.sent[resource.partition(".")[0]] += int(float(found[3]))
        return dataclasses.replace(load, cpu_s=cpu_s)

    def since(self, before: Load) -> Load:
        """Return what happened in between; `at` is how long that was."""
        return Load(
            self.at - before.at, self.cpu_s - before.cpu_s,
            self.requests - before.requests, self.took - before.took, self.sent - before.sent,
        )  # fmt: skip

    def count(self, *resources: str, status: str = "") -> int:
        """Return how many requests there were, of all resources if none is named."""
        return sum(
            number
            for (resource, code), number in self.requests.items()
            if (not resources or resource in resources) and (not status or code == status)
        )

    def within(self, resource: str, share: float) -> float:
        """Return the bound of the bucket, in seconds, that has such a share of the requests."""
        every = self.took[resource, float("inf")]
        bounds = sorted(bound for one, bound in self.took if one == resource)
        return next((one for one in bounds if self.took[resource, one] >= share * every), 0.0)

    def said(self, *resources: str) -> str:
        """Return a line of all of it, with the latencies of some resources."""
        words = [f"{self.at:.0f} s, CPU {self.cpu_s:.1f} s, {self.count()} requests"]
        for one in resources:
            if self.count(one):
                half, most = self.within(one, 0.5), self.within(one, 0.99)
                words.append(f"{one} {self.count(one)} (half <= {half:g} s, 99 % <= {most:g} s)")
        return "; ".join(words)
