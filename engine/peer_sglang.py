"""SGLang's LoRA ops: those of its triton_v2 backend."""
from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .peer_cell import SCALE, Pair, PeerCell
from .peer_files import PeerFiles, PeerImports


class Sglang:
    """The backend with the plans that it ships for the device."""

    def __init__(self, files: PeerFiles) -> None:
        imports = PeerImports(files, _stand_ins())
        self._runner = imports.take("sglang.srt.lora.dense.runner", "DenseLoraRunner")
        self._linear = imports.take("sglang.srt.lora.dense.plan", "DenseLoraKind").LINEAR
        self._workspace = imports.take("sglang.srt.lora.workspace", "LoraWorkspace")
        self._phase = imports.take("sglang.srt.lora.utils", "Phase")
        small = imports.take("sglang.kernels.ops.lora.common.routing", "_SMALL_ROUTE_MAX_PAIRS")
        sys.modules["sglang.kernels.ops.lora.common.routing"]._LARGE_ROUTE_MIN_PAIRS = small + 1  # between them it would compile CUDA code

    def prepared(self, cell: PeerCell, pairs: Sequence[Pair]) -> Callable[[int], Tensor]:
        rows, device, offsets = cell.x.shape[0], cell.x.device, (0, *cell.ends)
        runner = self._runner(self._workspace(), max_loras=len(cell.ranks), device=device)
        runner.begin_batch(
            token_slots=torch.tensor(cell.of_row, dtype=torch.int32, device=device),
            lora_ranks=torch.tensor(cell.ranks, dtype=torch.int32, device=device),
            scalings=torch.full((len(cell.ranks),), SCALE, device=device), num_tokens=rows,
            phase=self._phase.PREFILL if cell.prompt else self._phase.DECODE, graph_mode=device.type == "cuda")
        end_to_end = [self._end_to_end(cell, a) for a, _ in pairs]
        plan = runner.plan_for(self._linear, cell.rank, cell.d_in, cell.ends[-1], num_tokens=rows)

        def run(copy: int) -> Tensor:
            if copy == 0:  # once a step
                runner.reset_routes()
            return runner.apply(cell.x, lambda: F.linear(cell.x, cell.weights[copy]), plan, a=end_to_end[copy], b=pairs[copy][1],
                                offsets=offsets)

        return run

    def _end_to_end(self, cell: PeerCell, a: Tensor) -> Tensor:
        """[adapters, slices * rank, d_in]: an adapter's slices one behind the other at its own rank."""
        out = torch.zeros(len(cell.ranks), len(cell.slices) * cell.rank, cell.d_in, dtype=a.dtype, device=a.device)
        for adapter, rank in enumerate(cell.ranks):
            out[adapter, : len(cell.slices) * rank] = a[adapter, :, :rank].flatten(0, 1)
        return out


def _stand_ins() -> dict[str, dict[str, Any]]:
    return {"sglang.srt.environ": {"envs": _Unset()}, "sglang.kernels.jit.utils": {"is_arch_support_pdl": lambda: False},
            "sglang.kernels.ops.lora.moe.virtual_experts": {"_align_block_size_jit": None}}


class _Unset:
    """Settings of which none is made."""

    def __getattr__(self, name: str) -> _Unset:
        return self

    def get(self) -> None:
        return None
