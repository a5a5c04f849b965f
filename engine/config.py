"""What a loaded model may use of this machine: device, dtype, context, KV memory, threads."""
from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from .blocks import BLOCK_TOKENS, blocks_for
from .models.facts import ModelFacts
from .protocol import LoadModel

DEFAULT_CONTEXT = 8192
FULL_CONTEXTS = 4
"""requests of full context that the KV memory is meant to hold"""
MEMORY_SHARE = 0.25
"""of the memory that is free now, what KV blocks may take"""
STEP_TOKENS = {"cpu": 128, "cuda": 2048}
"""tokens of one step: small enough that a long prompt does not stall the replies beside it"""
MAX_SLOTS = 256
"""the snapshot shows every one of them"""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
AUTO_DTYPE = {"cpu": "fp32", "cuda": "bf16"}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    device: torch.device
    dtype: torch.dtype
    context: int
    """tokens a request may hold"""
    blocks: int
    """KV blocks of all requests together"""
    step_tokens: int
    slots: int
    host_cache_bytes: int
    max_running: int = 32


def make_config(command: LoadModel, facts: ModelFacts) -> EngineConfig:
    """Raises ValueError, with the numbers, for a device that is not there, a context the model was not trained for, or no memory."""
    device = pick_device(command.device)
    dtype = DTYPES[AUTO_DTYPE[device.type] if command.dtype == "auto" else command.dtype]
    if not 1 <= command.slots <= MAX_SLOTS:
        raise ValueError(f"{command.slots} slots were asked for; choose 1 to {MAX_SLOTS}")
    if command.host_cache_bytes < 0:
        raise ValueError(f"a host cache of {command.host_cache_bytes} bytes was asked for; give 0 or more")
    if command.context < 0 or command.context > facts.context:
        raise ValueError(f"a context of {command.context} tokens was asked for; this model was trained for {facts.context}, "
                         "choose 1 to that many, or 0 for the default")
    context = command.context or min(facts.context, DEFAULT_CONTEXT)
    token_bytes = 2 * facts.layers * facts.kv_out * dtype.itemsize
    affordable = int(MEMORY_SHARE * _free_bytes(device)) // (token_bytes * BLOCK_TOKENS)
    if affordable < 1:
        raise ValueError(f"{_free_bytes(device):,} bytes of memory are free on {device}, too few for the keys and values of one request")
    blocks = min(FULL_CONTEXTS * blocks_for(context), affordable)
    return EngineConfig(
        device, dtype, min(context, blocks * BLOCK_TOKENS), blocks, STEP_TOKENS[device.type], command.slots, command.host_cache_bytes)


def pick_device(wanted: str) -> torch.device:
    """`auto` is CUDA where it works, else the CPU. Raises ValueError when CUDA is asked for and not there."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, but this PyTorch finds no CUDA device; use device cpu, or see lora-bench doctor")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
