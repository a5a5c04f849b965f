"""What a measurement was made on, and how fast memory is copied there."""
from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from .doctor import examine

COPIED_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
"""far more than caches hold"""
COPIES = 9


def machine(device: torch.device) -> dict[str, Any]:
    """Plain data: what `doctor` says of machine and versions, and the settings that a measurement on `device` depends on."""
    found = examine()
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else found["cpu"]["model"],
        "kind": device.type,
        "versions": {"lora-bench": found["lora_bench"], "python": found["python"].split()[0], **found["packages"],
                     "cuda": torch.version.cuda, "driver": found["gpu"]["driver"]},
        "system": found["system"],
        "cpu": found["cpu"],
        "memory": found["memory"],
        "flags": {"threads": torch.get_num_threads(), "float32_matmul_precision": torch.get_float32_matmul_precision(),
                  "bf16_reduced_precision_reduction": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction},
    }


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of copies from memory to memory: the median of a few."""
    source = torch.empty(COPIED_BYTES[device.type], dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source).fill_(0)
    seconds = []
    for _ in range(COPIES):
        finish(device)
        began = time.perf_counter()
        target.copy_(source)
        finish(device)
        seconds.append(time.perf_counter() - began)
    return 2 * source.nbytes / statistics.median(seconds)


def finish(device: torch.device) -> None:
    """Wait for what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
