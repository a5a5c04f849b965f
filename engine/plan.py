"""What a base will need in memory, from its header alone. `python -m lora_bench.engine.plan [PATH]` prints it as JSON.

Without a path it is about the default model, which may not be on this machine yet. No torch.
"""
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import psutil

from .base_file import open_base
from .default_model import DEFAULT, cached_default_model


def memory_plan(path: str | Path | None) -> dict[str, Any]:
    """Counts from which memory follows for any number format and context.

    `elements` of the weights; `kv_elements` of the keys and values of one token over all layers. `download_bytes` is
    what must be fetched first. Raises FormatError or OSError as `open_base` does.
    """
    if path is None and (path := cached_default_model()) is None:
        return {"name": DEFAULT.file_name, "download_bytes": DEFAULT.wheel_bytes, "available_bytes": psutil.virtual_memory().available}
    base = open_base(path)
    facts = base.facts
    return {
        "name": base.name, "format": base.format, "architecture": facts.architecture, "layers": facts.layers,
        "weight_types": base.weight_types, "file_bytes": base.file_bytes, "trained_context": facts.context,
        "elements": base.parameters, "kv_elements": 2 * facts.layers * facts.kv_out,
        "download_bytes": 0, "available_bytes": psutil.virtual_memory().available,
    }


def main() -> int:
    try:
        print(json.dumps(memory_plan(sys.argv[1] if len(sys.argv) > 1 else None)))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
