"""Which version the stale pool of engines keeps: older than the newest on purpose, for cross-policy sampling."""

from __future__ import annotations


class StalePool:
    """Keeps its version until `refresh` updates have passed since that one's, then takes the newest. 0: always the newest."""

    def __init__(self, refresh: int) -> None:
        self._refresh = refresh
        self._update = 0
        self.version = 0  # 0: none yet

    def written(self, version: int, update: int) -> None:
        """`version`, the state after `update`, is the newest now. Other weights of the same update are taken at once: the
        warm start publishes them, and its first are random."""
        if not self.version or not 0 < update - self._update < self._refresh:
            self.version, self._update = version, update
