"""Drawing tokens for a batch. A row's draw depends on its logits, its settings, its seed and its position, and on nothing else."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row is drawn. Off: temperature 0 (greedy), top_k 0, top_p 1, min_p 0, repetition_penalty 1."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    position: int = 0
    seen: Tensor | None = None
    """[vocab] bool, true for the ids that the penalty acts on (prompt and reply); needed when it is on. May end before the columns do"""
    vocab: int = 0
    """ids from this on do not exist for the row and are never drawn; 0: all columns exist"""


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token id for every row; -1 where a number of its own ids is not finite.

    Semantics, in this order: repetition penalty, temperature, top-k, top-p, min-p, argmax(log p + Gumbel noise(seed, position)).
    logits: [rows, vocab], any float dtype, not changed.
    """
    logits = logits.float()
    logits = _penalised(logits, draws)
    vocabs = [draw.vocab for draw in draws]
    own = without_foreign(logits, vocabs, 0.0)
    finite = _finite(own)
    logits = without_foreign(logits, vocabs)
    tokens = _best(logits)
    hot = [row for row, draw in enumerate(draws) if draw.temperature > 0]
    if hot:
        tokens[torch.tensor(hot, device=logits.device)] = _draw(logits[hot], [draws[row] for row in hot])
    return torch.where(finite, tokens, -1).tolist()


def _finite(logits: Tensor) -> Tensor:
    """[rows] bool: whether all numbers of a row are."""
    if logits.device.type == "cpu":  # numpy takes a tenth of the time
        return torch.from_numpy(np.isfinite(logits.numpy()).all(-1))
    return torch.isfinite(torch.stack(torch.aminmax(logits, dim=-1))).all(0)  # both are NaN where a number is


def _best(logits: Tensor) -> Tensor:
    """[rows] int64: the first of the greatest."""
    return torch.from_numpy(logits.numpy().argmax(-1)) if logits.device.type == "cpu" else logits.argmax(-1)


def without_foreign(logits: Tensor, vocabs: Sequence[int], value: float = -torch.inf) -> Tensor:
    """`value` where a row [vocab] has columns beyond its own `vocabs` (0: none), as rows of larger vocabularies are beside it."""
    width = logits.shape[-1]
    if all(vocab in (0, width) for vocab in vocabs):
        return logits
    ends = torch.tensor([vocab or width for vocab in vocabs], device=logits.device)
    return logits.masked_fill(torch.arange(width, device=logits.device) >= ends[:, None], value)


def _penalised(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    if all(draw.repetition_penalty == 1.0 for draw in draws):
        return logits
    logits = logits.clone()
    for row, draw in enumerate(draws):
        if draw.repetition_penalty != 1.0 and draw.seen is not None:
            old = logits[row, : draw.seen.shape[0]]
            penalised = torch.where(old > 0, old / draw.repetition_penalty, old * draw.repetition_penalty)
            logits[row, : draw.seen.shape[0]] = torch.where(draw.seen, penalised, old)
    return logits


def _draw(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    scaled = logits.double()
    scaled = scaled - scaled.amax(-1, keepdim=True)  # before the division: near temperature 0 the best stays 0, the rest goes to -inf
    scaled = scaled / column([draw.temperature for draw in draws])
    if any(draw.top_k or draw.top_p < 1.0 for draw in draws):
        scaled = _top(scaled, draws, column([draw.top_p for draw in draws]))
    if any(draw.min_p > 0.0 for draw in draws):
        threshold = column([draw.min_p for draw in draws]).log()  # relative to the best token, which is at 0
        scaled = scaled.masked_fill(scaled < threshold, -torch.inf)
    noise = torch.stack([gumbel(draw.seed, draw.position, logits.shape[-1], logits.device) for draw in draws])
    return (scaled + noise).argmax(-1)


def _top(scaled: Tensor, draws: Sequence[Draw], top_p: Tensor) -> Tensor:
    """Keeps the top_k best, and of them the fewest whose probabilities reach top_p (the best always); equals are kept or cut together."""
    vocab = scaled.shape[-1]
    keep = [draw.top_k if 0 < draw.top_k < vocab else vocab for draw in draws]
    if (most := max((count for count in keep if count < vocab), default=0)) > 0:
        last = torch.tensor([min(count, most) - 1 for count in keep], device=scaled.device)[:, None]
        least = torch.topk(scaled, most, dim=-1).values.gather(1, last)
        bounded = torch.tensor([count < vocab for count in keep], device=scaled.device)[:, None]
        scaled = scaled.masked_fill(bounded & (scaled < least), -torch.inf)
    if all(draw.top_p >= 1.0 for draw in draws):
        return scaled
    kept = max(1, int((scaled > -torch.inf).sum(-1).max()))  # none of rows that are not finite
    ordered = torch.topk(scaled, kept, dim=-1).values
    probabilities = ordered.softmax(-1)
    within = (probabilities.cumsum(-1) - probabilities < top_p) | (top_p >= 1.0)
    within[:, 0] = True
    return scaled.masked_fill(scaled < ordered.masked_fill(~within, torch.inf).amin(-1, keepdim=True), -torch.inf)


def gumbel(seed: int, position: int, vocab: int, device: torch.device | str = "cpu") -> Tensor:
    """[vocab] float64 Gumbel noise, a pure function of (seed, position, token id): equal in any batch and on any device."""
    bits = _mix(torch.arange(vocab, dtype=torch.int64, device=device) * -7046029254386353131 + noise_key(seed, position))
    uniform = ((bits >> 12) & ((1 << 52) - 1)).double().add_(0.5).mul_(2.0**-52)
    return -torch.log(-torch.log(uniform))


def noise_key(seed: int, position: int) -> int:
    """What the noise of all tokens at `position` is made of, as a signed number of 64 bits."""
    key = _mix_int(_mix_int(seed & _MASK) ^ (position & _MASK))
    return key - (1 << 64) if key >> 63 else key


def noise_keys(seeds: np.ndarray, positions: Sequence[int]) -> np.ndarray:
    """[n] int64: `noise_key` of each pair of `mixed_seeds` [n] uint64 and positions."""
    x = (seeds ^ np.array(positions, np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).view(np.int64)


def mixed_seeds(seeds: Sequence[int]) -> np.ndarray:
    """[n] uint64: what `noise_keys` takes of them."""
    return np.array([_mix_int(seed & _MASK) for seed in seeds], np.uint64)


def _mix_int(x: int) -> int:
    """The finaliser of splitmix64 on one unsigned number."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64; shifts are made logical by masking the sign's copies off."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * -4658895280553007687
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * -7723592293110705685
    return x ^ ((x >> 31) & ((1 << 33) - 1))
