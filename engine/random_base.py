"""Bases and adapters of random numbers, in memory without a file: to measure shapes whose weights nobody has to have."""
from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

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


def check_room(facts: ModelFacts, device: torch.device, dtype: torch.dtype) -> None:
    """Raises OutOfMemory, with the numbers, for a base that `device` has no memory for."""
    need = dtype.itemsize * sum(map(math.prod, tensor_shapes(facts).values()))
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    if need > ROOM_SHARE * free:
        raise OutOfMemory(f"weights of this shape take {need:,} bytes, {free:,} are free on {device} and adapters, keys and values need "
                          "some of them; take a smaller shape or another dtype")


def random_weights(facts: ModelFacts, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights by canonical name whose products keep the size of what they are multiplied with, so that logits stay finite."""
    return {name: random_tensor(shape, device, dtype) for name, shape in tensor_shapes(facts).items()}


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
