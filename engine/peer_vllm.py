"""vLLM's Triton LoRA ops."""
from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.triton_compat import tl, triton
from .peer_cell import SCALE, Pair, PeerCell
from .peer_files import PeerFiles, PeerImports


class Vllm:
    """The ops as vLLM's LoRA layers call them."""

    def __init__(self, files: PeerFiles) -> None:
        ops, imports = "vllm.lora.ops.triton_ops", PeerImports(files, _stand_ins())
        self._shrink = imports.take(f"{ops}.lora_shrink_op", "lora_shrink")
        self._expand = imports.take(f"{ops}.lora_expand_op", "lora_expand")
        self._meta = imports.take(f"{ops}.lora_kernel_metadata", "LoRAKernelMeta")
        self._known = [imports.take(f"{ops}.utils", name) for name in ("_LORA_A_PTR_DICT", "_LORA_B_PTR_DICT")]

    def prepared(self, cell: PeerCell, pairs: Sequence[Pair]) -> Callable[[int], Tensor]:
        for known in self._known:  # by address, where other matrices may lie now
            known.clear()
        rows, device = cell.x.shape[0], cell.x.device
        meta = self._meta.make(len(cell.ranks), rows, device=device)
        meta.prepare_tensors(torch.tensor(cell.of_row, dtype=torch.int32, device=device))
        step = meta.meta_args(rows, False)
        shrinks = [[a[:, index].unsqueeze(1).contiguous() for index in range(len(cell.slices))] for a, _ in pairs]
        expands = [[(b[:, start:end] * SCALE).unsqueeze(1).contiguous() for start, end in cell.slices] for _, b in pairs]

        def run(copy: int) -> Tensor:
            y = F.linear(cell.x, cell.weights[copy])
            shrunk = torch.empty(len(cell.slices), rows, cell.rank, dtype=torch.float32, device=device)
            self._shrink(cell.x, shrinks[copy], shrunk, *step, 1.0)
            self._expand(shrunk, expands[copy], y, *step, offset_start=0, add_inputs=True)
            return y

        return run


def _stand_ins() -> dict[str, dict[str, Any]]:
    def kept_as_it_is(**_: object) -> None:
        raise AttributeError("the op is called without torch's dispatcher")

    def on_device(data: Any, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        return torch.tensor(data, dtype=dtype).to(device)

    return {
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False, "VLLM_LORA_ENABLE_DUAL_STREAM": False, "VLLM_LORA_DISABLE_PDL": False,
                      "VLLM_TUNED_CONFIG_FOLDER": None},
        "vllm.logger": {"init_logger": _Logger},
        "vllm.platforms": {"current_platform": _Platform()},
        "vllm.triton_utils": {"triton": triton, "tl": tl},
        "vllm.utils.torch_utils": {"direct_register_custom_op": kept_as_it_is, "async_tensor_h2d": on_device}}


class _Logger(logging.Logger):
    def warning_once(self, *_: object) -> None:
        """Said by the engine that it belongs to, of its own settings."""

    info_once = warning_once


class _Platform:
    def is_cuda(self) -> bool:
        return torch.cuda.is_available()

    def is_device_capability(self, number: int) -> bool:
        major, minor = torch.cuda.get_device_capability()
        return 10 * major + minor == number

    def has_device_capability(self, number: int) -> bool:
        major, minor = torch.cuda.get_device_capability()
        return 10 * major + minor >= number
