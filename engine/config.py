"""What a loaded model may use of this machine: device, dtype, how its weights lie in memory, context, KV memory."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from msgspec.structs import replace

from ..kernels.packed_cpu import multiplies_packed
from ..kernels.rank_pages import PAGE_ROWS
from .base_parts import BaseFile
from .blocks import BLOCK_TOKENS, blocks_for
from .failures import OutOfMemory
from .memory import free_memory, total_memory
from .models.facts import ModelFacts
from .page_image import page_shapes
from .protocol import LoadModel
from .weights.memory import DENSE_SHARE, mostly_for_cpu, weight_bytes

DEFAULT_CONTEXT = 8192
FULL_CONTEXTS = 4
"""requests of full context that the KV memory is meant to hold"""
MEMORY_SHARE = 0.25
"""of the memory that is free beside the weights, what KV blocks may take"""
STEP_TOKENS = {"cpu": 128, "cuda": 2048}
"""tokens of one step: small enough that a long prompt does not stall the replies beside it"""
ALONE_TOKENS = 512
"""at most, of prompts alone where a CPU unpacks weights once a step: what that costs is shared by more of them"""
ALONE_WORK = ALONE_TOKENS * 150_000_000
"""tokens times numbers of the base, of such a step: with larger bases it would be cancelled late"""
UNPACKED_NOTE = ("dtype packed was asked for, but this CPU has no products of packed numbers: they are unpacked to fp32 at every step, "
                 "which is slow; choose dtype bf16 or fp32")
PAGE_SHARE = 0.25
"""of the memory of a CUDA device that is free beside weights and KV blocks, what pages of rank rows may take"""
SLOT_PAGES = 8
"""of each kind of linear for each slot: 128 rank rows"""
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
    packed: bool
    """matrices stay as they lie in the file"""
    recoded: bool
    """those are brought into the order of a CPU's own products"""
    notes: tuple[str, ...]
    """what a user should know of these choices"""
    max_running: int = 32
    alone_tokens: int = 0
    """of a step without replies; 0: as many as of any"""
    pages: int = 0
    """of rank rows, for each kind of fused linear; 0 where adapters are held whole"""

    @property
    def dtype_name(self) -> str:
        """What LoadModel calls it."""
        return "packed" if self.recoded else DTYPE_NAMES[self.dtype]


def make_config(command: LoadModel, base: BaseFile, make_room: Callable[[], None]) -> EngineConfig:
    """What `base` may use. `make_room` is called, once, if its weights do not fit into the memory that is free.

    Raises ValueError, with the numbers, for a device that is not there, slots or a context that cannot be, and for dtype packed with dense
    weights; OutOfMemory when the weights, or the keys and values of the context asked for, do not fit.
    """
    if command.dtype == "packed" and command.weights == "dense":
        raise ValueError("dtype packed was asked for with dense weights; choose weights auto, or dtype fp32 or bf16")
    device = pick_device(command.device)
    dtype = DTYPES[AUTO_DTYPE[device.type] if command.dtype in ("auto", "packed") else command.dtype]
    _check_numbers(command, base.facts)
    recoded = device.type == "cpu" and _multiplied_packed(command, base)
    if recoded or command.dtype == "packed":
        command = replace(command, weights="packed")
    packed, need, free, weights_note = _place_weights(command, base, device, dtype, recoded, make_room)
    slow_note = UNPACKED_NOTE if packed and not recoded and device.type == "cpu" and command.dtype == "packed" else ""
    context, blocks, context_note = _place_context(command, base, device, dtype, free - need)
    left = free - need - blocks * _block_bytes(base.facts, dtype)
    pages, page_note = _place_pages(command.slots, base.facts, dtype, left) if device.type == "cuda" else (0, "")
    return EngineConfig(device, dtype, context, blocks, STEP_TOKENS[device.type], command.slots, command.host_cache_bytes,
                        packed, recoded and packed, tuple(filter(None, (weights_note, slow_note, context_note, page_note))), pages=pages,
                        alone_tokens=alone_tokens(base.parameters) if recoded and packed else 0)


def alone_tokens(parameters: int) -> int:
    """Of prompts in a step without replies, over packed weights on a CPU."""
    return max(STEP_TOKENS["cpu"], min(ALONE_TOKENS, ALONE_WORK // parameters // BLOCK_TOKENS * BLOCK_TOKENS))


def _multiplied_packed(command: LoadModel, base: BaseFile) -> bool:
    """Whether a CPU multiplies packed numbers as they are."""
    unasked = command.dtype == "auto" and command.weights != "dense" and mostly_for_cpu(base.tensors.values())
    return (unasked or command.dtype == "packed") and multiplies_packed()


def _place_weights(
    command: LoadModel, base: BaseFile, device: torch.device, dtype: torch.dtype, recoded: bool, make_room: Callable[[], None],
) -> tuple[bool, int, int, str]:
    """Whether they are packed, the bytes that they take, those that are free, and what to say of it."""
    dense, packed = (weight_bytes(base.tensors.values(), dtype.itemsize, kept, recoded) for kept in (False, True))
    as_numbers = f"{dense:,} bytes as {DTYPE_NAMES[dtype]}"
    sizes = as_numbers if packed == dense else f"{as_numbers}, {packed:,} packed as in the file"
    advice = "close other programs, choose dtype bf16, or take a smaller model"
    if command.weights == "dense" and packed < dense:
        advice = "choose weights packed, or " + advice
    if (least := dense if command.weights == "dense" else packed) > (total := _total_bytes(device)):
        raise OutOfMemory(f"{base.path}: its weights take {sizes}, and {device} has {total:,} bytes of memory in all; {advice}")
    share = DENSE_SHARE if command.weights == "auto" and packed < dense else 1.0
    if (packed if command.weights == "packed" else dense) > share * _free_bytes(device):
        make_room()
    free = _free_bytes(device)
    if least > free:
        raise OutOfMemory(f"{base.path}: its weights take {sizes}, {free:,} bytes of memory are free on {device}; {advice}")
    if command.weights == "packed" and packed == dense:
        return False, dense, free, "packed weights were asked for, but no matrix of this file is smaller so than as " + DTYPE_NAMES[dtype]
    if command.weights == "auto" and dense > share * free:
        return True, packed, free, (f"the weights stay packed as in the file, {packed:,} bytes: {as_numbers} are more than "
                                    f"{DENSE_SHARE:.0%} of the {free:,} bytes of memory that are free on {device}")
    return command.weights == "packed", packed if command.weights == "packed" else dense, free, ""


def _place_context(command: LoadModel, base: BaseFile, device: torch.device, dtype: torch.dtype, left: int) -> tuple[int, int, str]:
    """Tokens of a request and KV blocks in `left` bytes beside the weights, and what to say when they are fewer than usual."""
    facts = base.facts
    usual = min(facts.context, DEFAULT_CONTEXT)
    wanted = command.context or usual
    block_bytes = _block_bytes(facts, dtype)
    blocks = min(FULL_CONTEXTS * blocks_for(wanted), int(MEMORY_SHARE * left) // block_bytes)
    context = min(wanted, blocks * BLOCK_TOKENS)
    if blocks < 1 or context < command.context:
        raise OutOfMemory(f"{base.path}: {left:,} bytes of memory are free on {device} beside the weights, too few for the keys and values "
                          f"of {wanted} tokens, {block_bytes * blocks_for(wanted):,} bytes of at most {MEMORY_SHARE:.0%} of it; choose a "
                          "smaller context, close other programs, or choose dtype bf16")
    if command.context or context == usual:
        return context, blocks, ""
    return context, blocks, (f"the context is {context} tokens instead of {usual}: "
                             f"no more fit into {MEMORY_SHARE:.0%} of the memory that is free")


def _place_pages(slots: int, facts: ModelFacts, dtype: torch.dtype, left: int) -> tuple[int, str]:
    """Pages of each kind of linear in `left` bytes beside weights and KV blocks, and what to say when they are fewer than usual."""
    one = dtype.itemsize * sum(shape.numbers for shape in page_shapes(facts).values())
    usual, most = slots * SLOT_PAGES, int(PAGE_SHARE * left) // one
    if most >= usual:
        return usual, ""
    if most < 1:
        return 0, (f"adapters are held whole and steps that use them run without graphs: a page of rank rows takes {one:,} bytes, more "
                   f"than {PAGE_SHARE:.0%} of the memory that is free")
    return most, (f"there are {most} pages of {PAGE_ROWS} rank rows for adapters instead of {usual}: "
                  f"no more fit into {PAGE_SHARE:.0%} of the memory that is free")


def _block_bytes(facts: ModelFacts, dtype: torch.dtype) -> int:
    return 2 * facts.layers * facts.kv_out * dtype.itemsize * BLOCK_TOKENS


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
        return free_memory()
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _total_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else total_memory()
