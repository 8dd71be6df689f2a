"""The metrics document: the daemon's metrics as Prometheus reads them."""

from __future__ import annotations

from dataclasses import dataclass

from kata_pin.model.reports import VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsDocument:
    """Printed by `metrics`."""

    version: int = VERSION  #: version of the document
    kind: str = "metrics"  #: kind of the document
    address: str  #: where they were read: `unix:` and a path, or a URL
    text: str  #: the metrics in Prometheus' text format
