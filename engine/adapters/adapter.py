"""An adapter in memory: pairs of low-rank factors by module, and what is known of it."""
from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..protocol import AdapterInfo

if TYPE_CHECKING:
    from ..page_image import PageImage

VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
"""the matrices with a row for each token"""


@dataclass(frozen=True, slots=True)
class LoraPair:
    """y += user scale * scaling * ((x a^T) b^T + bias); a [r, d_in] and b [d_out, r] of one dtype, in RAM.

    With `magnitude` it is DoRA: the rows of W + user scale * scaling * b a are brought to the lengths `magnitude`
    (PEFT's DoraLinearLayer; section 4 of arXiv 2402.09353).
    """

    a: Tensor
    b: Tensor
    scaling: float
    bias: Tensor | None = None
    """[d_out], of lora_B"""
    magnitude: Tensor | None = None
    """[d_out]"""

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in (self.a, self.b, self.bias, self.magnitude) if tensor is not None)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Trained rows of an embedding-shaped matrix: `values[i]` [n, hidden] stands for row `ids[i]` [n] int64, ascending."""

    ids: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """All that an adapter changes, by canonical names (`layers.3.self_attn.q_proj`, `lm_head`).

    What replaces acts as a difference: base + user scale * (replacement - base), so scale 1 is what was trained and 0 is the base.
    """

    modules: Mapping[str, LoraPair]
    """LoRA on linears, sorted by name"""
    embedding: LoraPair | None = None
    """LoRA on embed_tokens: a [r, vocab], b [hidden, r]; a token's row gets its column of a"""
    replaced: Mapping[str, Tensor] = field(default_factory=dict)
    """canonical tensor name -> what stands in its place: norms (as the base has them in memory) and biases, embed_tokens.weight and
    lm_head.weight, these two perhaps with more rows than the base (added vocabulary)"""
    rows: Mapping[str, TokenRows] = field(default_factory=dict)
    """"embed_tokens.weight" / "lm_head.weight" -> trained rows of it (trainable_token_indices)"""
    tokenizer_json: Path | None = None
    """the tokenizer beside it; what it adds to the base's is known when both are there"""

    @property
    def pairs(self) -> tuple[LoraPair, ...]:
        return (*self.modules.values(), *([self.embedding] if self.embedding else []))

    @property
    def nbytes(self) -> int:
        """Bytes in RAM; a matrix that stands for both the embedding and a tied head counts once."""
        tensors = [*(tensor for pair in self.pairs for tensor in pair.tensors), *self.replaced.values()]
        tensors += [tensor for part in self.rows.values() for tensor in (part.ids, part.values)]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())

    def vocab_rows(self, vocab: int) -> int:
        """Rows that embedding and head have with this adapter on a base of `vocab` rows."""
        whole = [self.replaced[name].shape[0] for name in VOCABULARY if name in self.replaced]
        trained = [int(part.ids[-1]) + 1 for part in self.rows.values() if len(part.ids)]
        return max([max(whole, default=vocab), *trained])


@dataclass(frozen=True, slots=True)
class Adapter:
    info: AdapterInfo
    weights: AdapterWeights
    image: PageImage | None = None
    """its low-rank part as the device will hold it, where that was made already"""

    @property
    def host_bytes(self) -> int:
        """What it takes in RAM."""
        return self.info.bytes + (self.image.nbytes if self.image is not None else 0)

    @property
    def modules(self) -> Mapping[str, LoraPair]:
        return self.weights.modules


def content_digest(weights: AdapterWeights, invocation: tuple[int, ...]) -> str:
    """Hex sha256 of what the adapter does: its tensors, scalings and invocation. Names, paths and file layout do not count."""
    total = hashlib.sha256()
    pairs = dict(weights.modules) | ({"embed_tokens": weights.embedding} if weights.embedding else {})
    for name in sorted(pairs):
        pair = pairs[name]
        total.update(f"{name} {pair.scaling.hex()}\n".encode())
        for label, tensor in zip(("a", "b", "bias", "magnitude"), (pair.a, pair.b, pair.bias, pair.magnitude), strict=True):
            _update(total, label, tensor)
    for name in sorted(weights.replaced):
        _update(total, name, weights.replaced[name])
    for name in sorted(weights.rows):
        _update(total, f"{name} rows", weights.rows[name].ids)
        _update(total, name, weights.rows[name].values)
    total.update(repr(invocation).encode())
    return total.hexdigest()


def _update(total: hashlib._Hash, label: str, tensor: Tensor | None) -> None:
    if tensor is not None:
        total.update(f"{label} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.contiguous().flatten().view(torch.uint8).numpy())


def layer_norms(modules: Mapping[str, LoraPair], layers: int) -> tuple[float, ...]:
    """sqrt of the sum over a layer's modules of ||scaling B A||_F^2, by layer. lm_head belongs to no layer and is left out."""
    squares = [0.0] * layers
    for name, pair in modules.items():
        if not name.startswith("layers."):
            continue
        squares[int(name.split(".")[1])] += low_rank_square(pair)
    return tuple(sqrt(square) for square in squares)


def low_rank_square(pair: LoraPair) -> float:
    """||scaling B A||_F^2.

    The sum of the elements of (B^T B) * (A A^T); for a rank so large that these [r, r] take more memory than B A itself, of
    those of (B A)^2.
    """
    a, b = pair.a.float(), pair.b.float()
    small = pair.rank * pair.rank <= b.shape[0] * a.shape[1]
    elements = (b.T @ b).mul_(a @ a.T) if small else (b @ a).square_()
    return pair.scaling * pair.scaling * max(elements.sum(dtype=torch.float64).item(), 0.0)


def target_counts(modules: Mapping[str, LoraPair]) -> dict[str, int]:
    """Module kind (`q_proj`) -> how many layers have it."""
    return dict(Counter(name.rsplit(".", 1)[-1] for name in modules))
