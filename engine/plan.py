"""What a base will need in memory, from its header alone. `python -m lora_bench.engine.plan [PATH]` prints it as JSON.

Without a path it is about the default model, which may not be on this machine yet. No torch.
"""
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from .base_file import BaseFile, open_base
from .default_model import DEFAULT, cached_default_model
from .memory import free_memory
from .weights.memory import DENSE_SHARE, mostly_for_cpu, weight_bytes

NUMBER_FORMATS = {"fp32": 4, "bf16": 2, "fp16": 2}
"""number format of weights, keys and values in memory -> bytes of a number"""


def memory_plan(path: str | Path | None) -> dict[str, Any]:
    """What memory follows from, for every number format, context and way to keep the weights.

    `memory` has by number format the bytes of the weights, dense and packed as in the file, and of the keys and values of one
    token over all layers; by "packed" those of weights that a CPU multiplies packed, beside numbers of fp32. `cpu_dtype` is what auto takes
    on a CPU that has such products. Packed weights are chosen unasked when dense ones take more than `dense_share` of what is free.
    `download_bytes` is what must be fetched first. Raises FormatError or OSError as `open_base` does.
    """
    if path is None and (path := cached_default_model()) is None:
        return {"name": DEFAULT.file_name, "download_bytes": DEFAULT.wheel_bytes, "available_bytes": free_memory()}
    base = open_base(path)
    facts = base.facts
    return {
        "name": base.name, "format": base.format, "architecture": facts.architecture, "layers": facts.layers,
        "weight_types": base.weight_types, "file_bytes": base.file_bytes, "trained_context": facts.context,
        "parameters": base.parameters, "memory": {name: _memory(base, size) for name, size in NUMBER_FORMATS.items()}
        | {"packed": _memory(base, NUMBER_FORMATS["fp32"], for_cpu=True)},
        "cpu_dtype": "packed" if mostly_for_cpu(base.tensors.values()) else "fp32",
        "dense_share": DENSE_SHARE, "download_bytes": 0, "available_bytes": free_memory(),
    }


def _memory(base: BaseFile, itemsize: int, for_cpu: bool = False) -> dict[str, int]:
    entries = base.tensors.values()
    return {
        "dense_weights_bytes": weight_bytes(entries, itemsize, packed=for_cpu, for_cpu=for_cpu),
        "packed_weights_bytes": weight_bytes(entries, itemsize, packed=True, for_cpu=for_cpu),
        "kv_of_a_token_bytes": 2 * base.facts.layers * base.facts.kv_out * itemsize,
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
