"""Bases and adapters of random numbers, in memory without a file: to measure shapes whose weights nobody has to have."""
from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ..kernels.packed import PackedRows, PackedWeight
from ..kernels.quant import QUANT_TYPES, dequantize
from ..kernels.weights import Weight
from .adapter_read import ReadAdapter, Source
from .adapters.adapter import Adapter, AdapterWeights, LoraPair, target_counts
from .failures import OutOfMemory
from .memory import free_memory
from .models.facts import ModelFacts, module_shapes, tensor_shapes, validate
from .protocol import AdapterInfo
from .weights.files import FormatError, show

SHAPES = {
    "8b": ModelFacts("llama", 32, 4096, 32, 8, 128, 14336, 128256, 8192, 1e-5, 500000.0),
    "1b": ModelFacts("llama", 16, 2048, 32, 8, 64, 8192, 128256, 8192, 1e-5, 500000.0, tied=True),
    "135m": ModelFacts("llama", 30, 576, 9, 3, 64, 1536, 49152, 8192, 1e-5, 10000.0, tied=True),
}
"""those of Llama 3.1 8B, Llama 3.2 1B and SmolLM2 135M"""
SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")
"""what may be given for itself"""
PACKED_TYPES = tuple(name for name, kind in QUANT_TYPES.items() if kind.block_elements > 1 and kind.scale == torch.float16)
HEAD_TYPES = {"Q4_K": "Q6_K", "Q5_K": "Q6_K"}
"""of head and embedding in files of these types"""
SIZED_BLOCKS = 1 << 12
"""by which the size of packed numbers is known"""
ROOM_SHARE = 0.7
"""of the memory that is free, what weights may take"""


class WrongShape(ValueError):
    """The words are no shape of a base."""


def shape_facts(text: str) -> ModelFacts:
    """The facts of a shape: a name of SHAPES, sizes by SIZES (`layers=4,hidden=256,...`; what is left out as in 135m), or a name and then
    sizes that differ (`8b,layers=2`). Raises WrongShape."""
    first, *rest = [part.strip() for part in text.split(",")]
    facts, given = (SHAPES[first], rest) if first in SHAPES else (SHAPES["135m"], [first, *rest])
    sizes: dict[str, int] = {}
    for part in given:
        name, _, number = part.partition("=")
        if name not in SIZES or not number.isdecimal():
            raise WrongShape(f"shape {show(text)}: {show(part)} is no size; give {', '.join(SHAPES)}, or sizes as layers=4,hidden=256 "
                             f"out of {', '.join(SIZES)}")
        sizes[name] = int(number)
    try:
        return validate(replace(facts, **sizes), f"shape {text}")
    except FormatError as error:
        raise WrongShape(str(error).partition(";")[0] + "; choose other sizes") from error


def check_room(facts: ModelFacts, device: torch.device, dtype: torch.dtype, packed: str = "") -> None:
    """Raises OutOfMemory, with the numbers, for a base that `device` has no memory for; WrongShape where rows are no whole blocks."""
    shapes = tensor_shapes(facts)
    if packed:
        block = QUANT_TYPES[packed].block_elements
        if odd := next((name for name, shape in shapes.items() if len(shape) > 1 and shape[-1] % block), ""):
            raise WrongShape(f"rows of {odd} have {shapes[odd][-1]:,} numbers, {packed} packs {block} at a time; choose another type or "
                             "other sizes")
    need = math.ceil(sum(math.prod(shape) * (_packed_bytes(name, packed) if packed and len(shape) > 1 else dtype.itemsize)
                         for name, shape in shapes.items()))
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    if need > ROOM_SHARE * free:
        raise OutOfMemory(f"weights of this shape take {need:,} bytes, {free:,} are free on {device} and adapters, keys and values need "
                          "some of them; take a smaller shape or another dtype")


def random_weights(facts: ModelFacts, device: torch.device, dtype: torch.dtype, packed: str = "") -> dict[str, Weight]:
    """Weights by canonical name whose products keep the size of what they are multiplied with, so that logits stay finite.

    Matrices are `packed` as in GGUF files of this one of PACKED_TYPES where it is given, the head as such files have it.
    """
    return {name: random_packed(shape, _type_of(name, packed), device, dtype) if packed and len(shape) > 1 else
            random_tensor(shape, device, dtype) for name, shape in tensor_shapes(facts).items()}


def random_packed(shape: Sequence[int], type_name: str, device: torch.device, dtype: torch.dtype) -> PackedWeight:
    """A matrix of whole blocks of this one of PACKED_TYPES, the size of its numbers as in `random_weights`."""
    kind = QUANT_TYPES[type_name]
    data = torch.randint(256, (math.prod(shape) // kind.block_elements, kind.block_bytes), dtype=torch.uint8, device=device)
    _set_scales_(data, type_name, 1.0)
    size = float(dequantize(data[:SIZED_BLOCKS].reshape(-1), type_name).square().mean().sqrt())
    _set_scales_(data, type_name, shape[-1] ** -0.5 / size)
    return PackedWeight((PackedRows(type_name, data.view(shape[0], -1)),), dtype)


def _set_scales_(data: Tensor, type_name: str, scale: float) -> None:
    kind = QUANT_TYPES[type_name]
    for start in kind.scales:
        data[:, start:start + kind.scale.itemsize] = torch.tensor([scale], dtype=kind.scale, device=data.device).view(torch.uint8)


def _type_of(name: str, packed: str) -> str:
    """The embedding is the head where these are tied."""
    return HEAD_TYPES.get(packed, packed) if name in ("lm_head.weight", "embed_tokens.weight") else packed


def _packed_bytes(name: str, packed: str) -> float:
    """Of one number."""
    kind = QUANT_TYPES[_type_of(name, packed)]
    return kind.block_bytes / kind.block_elements


def random_tensor(shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """One of `random_weights`: a matrix, or what a norm multiplies with."""
    return _random(shape, shape[-1] ** -0.5, device, dtype) if len(shape) > 1 else _random(shape, 0.1, device, dtype).add_(1.0)


def random_adapter(facts: ModelFacts, name: str, rank: int, device: torch.device, dtype: torch.dtype) -> ReadAdapter:
    """A LoRA of one rank on every linear but the head, as if it had been read from a file; its numbers are drawn on `device`."""
    shapes = {module: shape for module, shape in module_shapes(facts).items() if module != "lm_head"}
    pairs = {}
    for module, (d_out, d_in) in sorted(shapes.items()):
        a, b = _random((rank, d_in), d_in ** -0.5, device, dtype), _random((d_out, rank), 0.02, device, dtype)
        pairs[module] = LoraPair(a.cpu(), b.cpu(), 1.0)
    weights = AdapterWeights(pairs)
    info = AdapterInfo(
        name=name, path="", format="random", digest=hashlib.sha256(f"{name} {rank}".encode()).hexdigest(), ranks=(rank,),
        effective_scales=(1.0,), matched=len(pairs), total=len(pairs), targets=target_counts(pairs), bytes=weights.nbytes, rslora=False,
        dtype=str(dtype).removeprefix("torch."), base_model="")
    return ReadAdapter(Adapter(info, weights), Source(Path(), Path(), (), ()), 0.0)


def adapter_bytes(facts: ModelFacts, rank: int, itemsize: int) -> int:
    """Of A and B of a `random_adapter`, at its true rank."""
    return rank * itemsize * sum(d_out + d_in for module, (d_out, d_in) in module_shapes(facts).items() if module != "lm_head")


def _random(shape: Sequence[int], size: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=device).normal_(0.0, size)
