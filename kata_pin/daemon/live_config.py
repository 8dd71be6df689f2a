"""The configuration in force, for everything that must follow a reload."""

from __future__ import annotations

from kata_pin.config.tree import Config


class LiveConfig:
    """Gives the configuration in force; `replace` is the reload's."""

    def __init__(self, config: Config) -> None:
        self.now = config
        """Read it at each use: a reload replaces it."""
        self._stopped = False

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
