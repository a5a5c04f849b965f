"""RMSNorm."""
from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Semantics: x / sqrt(mean(x^2, last) + eps) * weight.

    x: [tokens, hidden], weight: [hidden], one dtype; the mean is taken in fp32 for 16-bit dtypes.
    """
    return F.rms_norm(x, (x.shape[-1],), weight, eps)
