"""RMSNorm."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Semantics: x / sqrt(mean(x^2, last) + eps) * weight.

    x: [..., hidden], weight: [hidden] of its dtype, or fp32: then all is computed in fp32 and y has x's dtype. The mean is taken in fp32
    for 16-bit dtypes.
    """
    if weight.dtype != x.dtype:
        return F.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


class RmsNorm:
    """`rms_norm` with its weight made ready.

    On the CPU torch makes rms_norm of eight small ops, a tenth of a decode step in calls alone. In fp32 it is done here with
    four: x * (weight * sqrt(hidden)) / hypot(|x|, sqrt(hidden * eps)).
    """

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> None:
        """`dtype`: of what is normalised, the weight's unless given."""
        self.weight, self._eps = weight, eps
        self.few_ops = weight.dtype == (dtype or weight.dtype) == torch.float32 and weight.device.type == "cpu"
        self._scaled = weight * weight.numel() ** 0.5
        self._floor = torch.tensor((weight.numel() * eps) ** 0.5, dtype=weight.dtype, device=weight.device)

    def normalised(self, x: Tensor) -> Tensor:
        """x / sqrt(mean(x^2, last) + eps), fp32: what the weight is multiplied with."""
        return F.rms_norm(x.float(), (x.shape[-1],), None, self._eps)

    def __call__(self, x: Tensor) -> Tensor:
        if not self.few_ops:
            return rms_norm(x, self.weight, self._eps)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * self._scaled).div_(torch.hypot(length, self._floor))
