"""Adapters as llama.cpp's converter writes them, of every architecture, on both forms of the base: logits of every token against PEFT."""
from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from acting_bench import ActingBench, change_all, peft_logits
from conftest import TINY_TOKENS, tiny_tokenizer
from peft import LoraConfig, PeftModel, get_peft_model
from peft_random_config import FUSED, SPLIT
from tiny_models import CONFIGS, VOCAB, make_model, save_folder, save_gguf
from torch import Tensor

from lora_bench.engine.adapters.errors import AdapterError
from lora_bench.engine.adapters.load import load_adapter
from lora_bench.engine.adapters.open import open_adapter
from lora_bench.engine.base_file import open_base
from lora_bench.engine.models.decoder import Decoder
from lora_bench.engine.weights.load import load_weights

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's advice on configs that are random on purpose
ALPHA, RANK = 5.0, 4
PERMUTED = ("llama", "mistral", "granite", "smollm3")
"""whose q and k the converter permutes for llama.cpp's rope; it does so with the B of their adapters"""


def convert(model: PeftModel, name: str, path: Path, architecture: str = "") -> Path:
    """The LoRA of `model` by the rules of convert_lora_to_gguf.py: GGUF's names, B of q and k permuted, A of the embedding transposed."""
    config = model.config
    architecture = architecture or {"mistral": "llama"}.get(name, name)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads} if name in PERMUTED else {}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, ALPHA)
    for module, layer in model.base_model.model.named_modules():
        for kind in ("lora_A", "lora_embedding_A"):
            if "it" in getattr(layer, kind, {}):
                a, b = (getattr(layer, kind.replace("_A", part))["it"] for part in ("_A", "_B"))
                _add(writer, f"{names.get_name(module)}.weight", *(getattr(part, "weight", part).detach() for part in (a, b)),
                     heads.get(module.rpartition(".")[2]), "embedding" in kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, a: Tensor, b: Tensor, heads: int | None, embedding: bool) -> None:
    if heads:
        b = b.reshape(heads, 2, -1, b.shape[1]).swapaxes(1, 2).reshape(b.shape)
    writer.add_tensor(f"{name}.lora_a", (a.T if embedding else a).contiguous().numpy())
    writer.add_tensor(f"{name}.lora_b", b.contiguous().numpy())


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ("ministral", "granitemoehybrid")])
def test_a_converted_adapter_acts_as_the_one_that_it_was(seed: int, tmp_path: Path, name: str) -> None:
    model = make_model(name)
    tied = model.config.tie_word_embeddings
    targets = [*(FUSED if name == "phi3" else SPLIT), "embed_tokens", *([] if tied else ["lm_head"])]
    files = save_folder(model, tmp_path / "base", tiny_tokenizer()), save_gguf(model, name, tmp_path / "base.gguf", TINY_TOKENS)
    adapted: Any = get_peft_model(copy.deepcopy(model), LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets), "it")
    adapted = change_all(adapted, "it")
    path = convert(adapted, name, tmp_path / "it.gguf")
    ids = [random.randrange(5, VOCAB) for _ in range(8 if name == "mistral" else 21)]  # files of the architecture llama say no window
    for base in map(open_base, files):
        adapter = load_adapter(open_adapter(path), base.facts, "it")
        assert adapter.info.matched == adapter.info.total == len(adapter.modules) + 1
        bench = ActingBench(Decoder(base.facts, load_weights(base, torch.device("cpu"), torch.float32), 96), {"it": adapter.weights})
        for got, scale in zip(bench.logits([(ids, [("it", scale)]) for scale in (1.0, -0.5)]), (1.0, -0.5), strict=True):
            torch.testing.assert_close(got, peft_logits(adapted, ids, [("it", scale)]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["mistral", "ministral"])
@pytest.mark.parametrize("architecture", ["llama", "mistral3"])
def test_mistral_by_either_name_of_its_converters(seed: int, tmp_path: Path, name: str, architecture: str) -> None:
    model = make_model(name)
    base = open_base(save_folder(model, tmp_path / "base", tiny_tokenizer()))
    adapted: Any = change_all(get_peft_model(copy.deepcopy(model), LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=SPLIT), "it"), "it")
    adapter = load_adapter(open_adapter(convert(adapted, "mistral", tmp_path / "it.gguf", architecture)), base.facts, "it")
    bench = ActingBench(Decoder(base.facts, load_weights(base, torch.device("cpu"), torch.float32), 96), {"it": adapter.weights})
    ids = [random.randrange(5, VOCAB) for _ in range(21)]
    (got,) = bench.logits([(ids, [("it", 1.0)])])
    torch.testing.assert_close(got, peft_logits(adapted, ids, [("it", 1.0)]), rtol=1e-4, atol=1e-4)
    with pytest.raises(AdapterError, match="the base is llama or mistral3; load the base that it was trained on"):
        load_adapter(open_adapter(convert(adapted, "mistral", tmp_path / "other.gguf", "granite")), base.facts, "it")
