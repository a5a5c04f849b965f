"""What a step of replies writes on a CPU, with the views of it that its calls take."""
from __future__ import annotations

import torch

from .facts import ModelFacts


class StepBuffers:
    """For steps of `count` rows. fp32 where sums go, bf16 where packed products read."""

    def __init__(self, count: int, facts: ModelFacts) -> None:
        heads, kv_heads, d = facts.heads, facts.kv_heads, facts.head_dim
        self.x, self.normed = torch.empty(count, facts.hidden), torch.empty(count, facts.hidden)
        self.sums = torch.empty(count, facts.hidden)
        self.packed = torch.empty(count, facts.hidden, dtype=torch.bfloat16)
        self.qkv = torch.empty(count, (heads + 2 * kv_heads) * d)
        by_head = self.qkv.view(count, -1, d)
        self.kv = by_head[:, heads:].transpose(0, 1)
        """[2 * kv_heads, count, d]"""
        self.kv_rows = self.kv.unbind(1)
        self.q = [row[:heads].view(1, kv_heads, heads // kv_heads, d) for row in by_head]
        self._turned = by_head[:, : heads + kv_heads]
        self._halves = self._turned.chunk(2, -1)
        self._swapped = torch.empty_like(self._turned)
        self._swapped_halves = self._swapped.chunk(2, -1)
        self.mixed = torch.empty(count, heads * d, dtype=torch.bfloat16)
        self.mixed_rows = list(self.mixed.view(count, 1, kv_heads, heads // kv_heads, d))
        self.gate_up = torch.empty(count, 2 * facts.intermediate)
        self._gate, self._up = self.gate_up.chunk(2, -1)
        self.gated = torch.empty(count, facts.intermediate, dtype=torch.bfloat16)
        self.views: dict[tuple[str, int, int], torch.Tensor] = {}
        """columns of the buffers that adapters act on, by linear, as they are first asked for"""

    def turn_(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate q and k in place (`kernels.rope.rope_`)."""
        self._swapped_halves[0].copy_(self._halves[1])
        self._swapped_halves[1].copy_(self._halves[0])
        self._turned.mul_(cos).addcmul_(self._swapped, sin)

    def gate_(self) -> None:
        """gated = silu(gate) * up"""
        torch.nn.functional.silu(self._gate, inplace=True)
        self.gated.copy_(self._gate.mul_(self._up))
