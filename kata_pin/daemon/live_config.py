"""The configuration in force, for everything that must follow a reload."""

from __future__ import annotations

from dataclasses import dataclass

from kata_pin.config.tree import Config


@dataclass
class LiveConfig:
    """The configuration in force; read `now` at each use, since a reload replaces it."""

    now: Config
    _stopped: bool = False

    @property
    def acts(self) -> bool:
        """Whether pins may be set now."""
        return self.now.acts and not self._stopped

    def replace(self, config: Config) -> None:
        """Put another configuration in force."""
        self.now = config

    def stop_acting(self) -> None:
        """Set nothing more until the daemon is restarted: it is being uninstalled."""
        self._stopped = True
