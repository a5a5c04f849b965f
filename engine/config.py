"""What a loaded model may use of this machine: device, dtype, context, KV memory, threads."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from .base_parts import BaseFile
from .blocks import BLOCK_TOKENS, blocks_for
from .failures import OutOfMemory
from .models.facts import ModelFacts
from .protocol import LoadModel

DEFAULT_CONTEXT = 8192
FULL_CONTEXTS = 4
"""requests of full context that the KV memory is meant to hold"""
MEMORY_SHARE = 0.25
"""of the memory that is free beside the weights, what KV blocks may take"""
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


def make_config(command: LoadModel, base: BaseFile, make_room: Callable[[], None]) -> EngineConfig:
    """What `base` may use. `make_room` is called, once, if its weights do not fit into the memory that is free.

    Raises ValueError, with the numbers, for a device that is not there, slots or a context that cannot be; OutOfMemory when the
    weights, or the keys and values of the context asked for, do not fit.
    """
    device = pick_device(command.device)
    dtype = DTYPES[AUTO_DTYPE[device.type] if command.dtype == "auto" else command.dtype]
    facts = base.facts
    _check_numbers(command, facts)
    need = base.parameters * dtype.itemsize
    if need > _free_bytes(device):
        make_room()
    if need > (free := _free_bytes(device)):
        raise OutOfMemory(f"{base.path}: its weights take {need:,} bytes as {DTYPE_NAMES[dtype]}, {free:,} bytes of memory are free on {device}; "
                          "close other programs, choose dtype bf16, or take a smaller model")
    wanted = command.context or min(facts.context, DEFAULT_CONTEXT)
    block_bytes = 2 * facts.layers * facts.kv_out * dtype.itemsize * BLOCK_TOKENS
    blocks = min(FULL_CONTEXTS * blocks_for(wanted), int(MEMORY_SHARE * (free - need)) // block_bytes)
    context = min(wanted, blocks * BLOCK_TOKENS)
    if blocks < 1 or context < command.context:
        raise OutOfMemory(f"{base.path}: {free - need:,} bytes of memory are free on {device} beside the weights, too few for the keys and values of "
                          f"{wanted} tokens, {block_bytes * blocks_for(wanted):,} bytes of at most {MEMORY_SHARE:.0%} of it; "
                          "choose a smaller context, close other programs, or choose dtype bf16")
    return EngineConfig(device, dtype, context, blocks, STEP_TOKENS[device.type], command.slots, command.host_cache_bytes)


def short_context_note(command: LoadModel, config: EngineConfig, facts: ModelFacts) -> str:
    """What to say when memory is too short for the usual context; "" when it is not."""
    usual = min(facts.context, DEFAULT_CONTEXT)
    if command.context or config.context == usual:
        return ""
    return f"the context is {config.context} tokens instead of {usual}: no more fit into {MEMORY_SHARE:.0%} of the memory that is free"


def _check_numbers(command: LoadModel, facts: ModelFacts) -> None:
    if not 1 <= command.slots <= MAX_SLOTS:
        raise ValueError(f"{command.slots} slots were asked for; choose 1 to {MAX_SLOTS}")
    if command.host_cache_bytes < 0:
        raise ValueError(f"a host cache of {command.host_cache_bytes} bytes was asked for; give 0 or more")
    if command.context < 0 or command.context > facts.context:
        raise ValueError(f"a context of {command.context} tokens was asked for; this model was trained for {facts.context}, "
                         "choose 1 to that many, or 0 for the default")


def pick_device(wanted: str) -> torch.device:
    """`auto` is CUDA where it works, else the CPU. Raises ValueError when CUDA is asked for and not there."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, but this PyTorch finds no CUDA device; use device cpu, or see lora-bench doctor")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def _free_bytes(device: torch.device) -> int:
    """What may still be taken, blocks that torch keeps for later on CUDA included."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
