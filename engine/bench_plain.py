"""A decoder's decode step in plain torch, as a compact program would write it: what the engine's step is measured against."""
from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .device_capture import nothing_freed
from .models.acting import Norm
from .models.decoder import Decoder
from .models.facts import ModelFacts

SAME = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "context", "rms_eps", "rope_theta", "tied",
        "architecture", "rope_scaling", "rope_freq_factors")
"""the facts in which bases differ that it can compute"""


def plain_obstacle(decoder: Decoder) -> str:
    """Why there is no plain step of this base, "" when there is one."""
    facts = decoder.facts
    if facts != ModelFacts(**{name: getattr(facts, name) for name in SAME}):
        return f"the plain step is written for decoders like llama; this is a {facts.architecture} model with more to it"
    matrices = [decoder.head.weight, *(linear.weight for layer in decoder.layers for linear in layer.linears)]
    return "" if all(isinstance(matrix, Tensor) for matrix in matrices) else "the weights are packed, torch has no product with them"


class PlainStep:
    """One token for each of `rows` requests, all of `context` tokens, the new one included; greedy, without adapters.

    Matrices and norms are the decoder's own. On a CUDA device the step is one CUDA graph.
    """

    def __init__(self, decoder: Decoder, rows: int, context: int) -> None:
        self._decoder, self._rows = decoder, rows
        facts, device = decoder.facts, decoder.device
        self.ids = torch.randint(facts.vocab, (rows,), device=device)
        shape = (facts.layers, 2, rows, facts.kv_heads, context, facts.head_dim)
        self.cache = torch.empty(shape, dtype=decoder.dtype, device=device).normal_()
        """what was stored of the tokens before"""
        self.logits = torch.full((rows, facts.vocab), float("nan"), dtype=decoder.dtype, device=device)
        self._last = torch.tensor([context - 1], device=device)
        cos, sin = decoder.rope.tables[0]
        self._turn = cos[context - 1].to(decoder.dtype), sin[context - 1].to(decoder.dtype)
        self._run = self._captured() if device.type == "cuda" else self._step

    @torch.inference_mode()
    def run(self) -> float:
        """Compute the step and bring its tokens to the host. Returns milliseconds by the clock of the host."""
        began = time.perf_counter()
        self._run()
        self.ids.tolist()
        return (time.perf_counter() - began) * 1e3

    def measure(self, steps: int, seconds: float) -> list[float]:
        """Milliseconds of `run`, at most `steps` times and not after so many `seconds`; one before does not count."""
        self.run()
        began, found = time.perf_counter(), [self.run()]
        while len(found) < steps and time.perf_counter() - began < seconds:
            found.append(self.run())
        return found

    def _step(self) -> None:
        decoder, facts = self._decoder, self._decoder.facts
        x = F.embedding(self.ids, decoder.embedding)
        for layer, cache in zip(decoder.layers, self.cache, strict=True):
            qkv = F.linear(self._normed(x, layer.before_attention), layer.qkv.weight).view(self._rows, -1, 1, facts.head_dim)
            q, k, v = qkv.split((facts.heads, facts.kv_heads, facts.kv_heads), 1)
            cache[0].index_copy_(2, self._last, self._turned(k))
            cache[1].index_copy_(2, self._last, v)
            mixed = F.scaled_dot_product_attention(self._turned(q), cache[0], cache[1], enable_gqa=True)
            x = x + F.linear(mixed.reshape(self._rows, -1), layer.o.weight)
            gate, up = F.linear(self._normed(x, layer.before_mlp), layer.gate_up.weight).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down.weight)
        torch.mm(self._normed(x, decoder.norm), decoder.head.weight.t(), out=self.logits)
        self.ids.copy_(self.logits.argmax(-1))

    def _normed(self, x: Tensor, place: Norm | None) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), place.rms.weight.to(x.dtype), self._decoder.facts.rms_eps)

    def _turned(self, x: Tensor) -> Tensor:
        cos, sin = self._turn
        return x * cos + torch.roll(x, x.shape[-1] // 2, -1) * sin

    @torch.inference_mode()
    def _captured(self) -> Callable[[], None]:
        beside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            self._step()
            self._step()
        torch.cuda.synchronize()
        with nothing_freed(), torch.cuda.graph(graph, stream=beside):
            self._step()
        return graph.replay
