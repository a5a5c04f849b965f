"""How far what one mix expects of the next token is from what another expects."""
from __future__ import annotations

import torch
from torch import Tensor


def log_shares(logits: Tensor, vocab: int) -> Tensor:
    """Natural logarithms [n, vocab], float64, of the shares of the first `vocab` tokens among themselves; logits [n, vocab or more].

    float64, because between two mixes that hardly differ KL is the small difference of large sums, in which fp32 leaves noise of 1e-7
    that would look like an adapter at work.
    """
    return torch.log_softmax(logits[:, :vocab].double(), -1)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) [n], nats, of two results of `log_shares`."""
    return (p.exp() * (p - q)).sum(-1).clamp_min(0)
