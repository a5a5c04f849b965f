"""PEFT models with adapters at scales of the user's.

PEFT scales low-rank deltas alone, the rest is written here as the difference it makes.
"""
from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

_OWN = re.compile(r"lora_|trainable_tokens|rotary")


def scale_adapter(model: PeftModel, name: str, scale: float, base: Any) -> None:
    """The adapter `name` of `model`, loaded on a copy of `base`, at `scale`.

    What replaces stands for base + scale * (replacement - base).
    """
    for module in model.modules():
        if hasattr(module, "set_scale") and name in module.scaling:
            module.set_scale(name, scale)
    if scale == 1:
        return
    before = {key: tensor.detach() for key, tensor in base.state_dict().items()}
    done: set[int] = set()
    with torch.no_grad():
        for key, tensor in model.base_model.model.state_dict().items():
            if _OWN.search(key) or "original_module" in key or tensor.data_ptr() in done:
                continue
            done.add(tensor.data_ptr())
            other = f"modules_to_save.{name}."
            if "modules_to_save" in key and other not in key:
                continue
            clean = re.sub(r"\.(base_layer|token_adapter)\b", "", key.replace(other, ""))
            _blend(tensor, before[clean], scale)
        for path, module in model.named_modules():
            if hasattr(module, "trainable_tokens_delta") and name in module.trainable_tokens_delta and module.tied_adapter is None:
                original = before["lm_head.weight" if "lm_head" in path else "model.embed_tokens.weight"]
                for row, token in zip(module.trainable_tokens_delta[name], module.token_indices[name], strict=True):
                    if token < original.shape[0]:
                        row.copy_(original[token] + scale * (row - original[token]))


def _blend(tensor: Tensor, before: Tensor, scale: float) -> None:
    rows = tensor[: before.shape[0]]
    rows.copy_(before + scale * (rows - before))


def summed(base: Any, merged: Sequence[Any]) -> Any:
    """A copy of `base` in fp64 with the sum of what the merged models change of it; embedding and head apart.

    Biases that the base lacks cannot be.
    """
    result = copy.deepcopy(base).double()
    if result.config.tie_word_embeddings:
        result.lm_head.weight = torch.nn.Parameter(result.lm_head.weight.detach().clone())
        result.config.tie_word_embeddings = False
    before = {key: tensor.clone() for key, tensor in result.state_dict().items()}
    with torch.no_grad():
        for key, tensor in result.state_dict().items():
            for model in merged:
                tensor += model.state_dict()[key].double() - before[key]
    return result
