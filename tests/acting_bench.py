"""Adapters that act on a tiny decoder, in one batch, without files, slots of a pool or requests; and the same by PEFT."""
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor

from lora_bench.engine.active import Span
from lora_bench.engine.adapters.adapter import Adapter, AdapterWeights
from lora_bench.engine.adapters.load import load_adapter
from lora_bench.engine.adapters.open import open_adapter
from lora_bench.engine.batch import Chunk, step_inputs
from lora_bench.engine.blocks import BLOCK_TOKENS, BlockTable, blocks_for
from lora_bench.engine.dora_rows import BaseSquares
from lora_bench.engine.mix import ActiveUse, TokenMix
from lora_bench.engine.models.acting import active_lora
from lora_bench.engine.models.decoder import Decoder
from lora_bench.engine.models.facts import ModelFacts, module_shapes
from lora_bench.engine.protocol import AdapterInfo
from lora_bench.engine.routing import RoutingCache
from lora_bench.engine.slot_content import build_content
from lora_bench.engine.slots import Slot, fused_modules

Use = tuple[str, float] | tuple[str, float, int]
"""adapter, scale, first token that it acts on"""


class ActingBench:
    """A decoder with adapters in slots of their own."""

    def __init__(self, decoder: Decoder, adapters: Mapping[str, AdapterWeights]) -> None:
        self.decoder, facts = decoder, decoder.facts
        shapes, squares = module_shapes(facts), BaseSquares()
        sizes = {place: [shapes[module][0] for module in modules] for place, modules in fused_modules(facts).items()}
        self._routings = RoutingCache(facts.layers, sizes, decoder.device)
        self.slots = {}
        for index, (name, weights) in enumerate(adapters.items()):
            self.slots[name] = Slot(index)
            self.slots[name].fill(name, build_content(Adapter(_info(name), weights), decoder, squares))

    def logits(self, batch: Sequence[tuple[Sequence[int], Sequence[Use]]], pieces: int = 1) -> list[Tensor]:
        """Logits [tokens, rows of the head] of every token of every (ids, mix), all in the same `pieces` steps."""
        caches = self.decoder.kv_cache(sum(blocks_for(len(ids)) for ids, _ in batch), BLOCK_TOKENS)
        tables, first = [], 0
        for ids, _ in batch:
            tables.append(BlockTable(tuple(range(first, first + blocks_for(len(ids))))))
            first += blocks_for(len(ids))
        found: list[list[Tensor]] = [[] for _ in batch]
        for piece in range(pieces):
            here = [(i, len(ids) * piece // pieces, len(ids) * (piece + 1) // pieces) for i, (ids, _) in enumerate(batch)]
            here = [(i, start, end) for i, start, end in here if end > start]
            chunks = [Chunk(batch[i][0][start:end], start, tables[i], True, True) for i, start, end in here]
            spans = [Span(_mix(batch[i][1]), start, end - start) for i, start, end in here]
            names = {use[0] for i, _, end in here for use in batch[i][1] if use[1] and (use[2] if len(use) == 3 else 0) < end}
            routing = self._routings.get([slot for name, slot in self.slots.items() if name in names]) if names else None
            lora = active_lora(routing, spans, spans) if routing else None
            out = self.decoder.forward(step_inputs(chunks, self.decoder.device), caches, lora, lambda op: None)
            for (i, _, _), rows in zip(here, out.split([end - start for _, start, end in here]), strict=True):
                found[i].append(rows)
        return [torch.cat(parts) for parts in found]


def _mix(uses: Sequence[Use]) -> TokenMix:
    return TokenMix((), tuple(ActiveUse(use[0], use[1], use[2] if len(use) == 3 else 0) for use in uses if use[1]))


def _info(name: str) -> AdapterInfo:
    return AdapterInfo(name=name, path="", format="", digest="", ranks=(), effective_scales=(), matched=0, total=0, targets={}, bytes=0,
                       rslora=False, dtype="", base_model="")


def weights_of(model: PeftModel, name: str, facts: ModelFacts, folder: Path, **options: object) -> AdapterWeights:
    """The adapter `name` of a PEFT model as it is read from what PEFT saves with `options`."""
    model.save_pretrained(folder, selected_adapters=[name], **options)
    return load_adapter(open_adapter(folder / name), facts, name).weights


def change_all(model: PeftModel, name: str) -> PeftModel:
    """With all that the adapter `name` may train moved away from what it was."""
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            own = f".{name}." in f"{parameter_name}."
            if own and "magnitude" in parameter_name:
                parameter.mul_(torch.rand_like(parameter) + 0.5)
            elif own and "lora_" in parameter_name:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
            elif own:
                parameter.add_(torch.randn_like(parameter) * 0.15)
    return model.eval()


def peft_logits(model: PeftModel, ids: Sequence[int], mix: Sequence[tuple[str, float]]) -> Tensor:
    """[tokens, rows of the head] by PEFT with the adapters of `mix` active in that order, each at its scale."""
    with torch.no_grad():
        if not mix:
            with model.disable_adapter():
                return model(input_ids=torch.tensor([list(ids)])).logits[0]
        model.base_model.set_adapter([name for name, _ in mix])
        for module in model.modules():
            if hasattr(module, "set_scale"):
                for name, scale in mix:
                    module.set_scale(name, scale)
        return model(input_ids=torch.tensor([list(ids)])).logits[0]


def base_tensors(model: PeftModel) -> dict[str, Tensor]:
    """The weights below the adapters of a PEFT model, by canonical names."""
    found = {}
    for name, tensor in model.base_model.model.state_dict().items():
        if re.search(r"lora_|modules_to_save|trainable_tokens|rotary", name):
            continue
        clean = re.sub(r"\.(base_layer|original_module|token_adapter)\b", "", name)
        found[clean.removeprefix("model.")] = tensor.clone()
    return found
