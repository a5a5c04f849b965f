"""What the workbench needs of an engine, wherever it runs."""
from __future__ import annotations

from typing import Protocol

from ...engine.protocol import Command


class Backend(Protocol):
    """Commands go down through `send`; events come up into the inbox that the backend was made with."""

    def start(self) -> None:
        """Start the engine, after ending one that runs. Raises OSError when that is not possible."""

    def send(self, command: Command) -> None:
        """Queue a command; never waits."""

    def stop(self, timeout: float = 1.5) -> None:
        """End the engine within about `timeout` seconds."""
