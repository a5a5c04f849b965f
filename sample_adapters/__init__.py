"""Small adapters for the embedded default model, one folder each. Data: this package imports nothing of the others."""
from __future__ import annotations

from importlib import resources
from pathlib import Path


def sample_adapters() -> list[tuple[str, Path]]:
    """(name, folder) of every adapter shipped here, by name."""
    root = Path(str(resources.files(__name__)))
    return sorted((folder.name, folder) for folder in root.iterdir() if (folder / "adapter_config.json").is_file())
