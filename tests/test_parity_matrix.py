"""Every architecture with every kind of adapter that PEFT makes: files of both, logits of every token; some kinds on GGUF files too."""
from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from acting_bench import ActingBench, change_all, peft_logits, weights_of
from conftest import TINY_TOKENS, tiny_tokenizer
from peft import LoraConfig, get_peft_model
from tiny_models import CONFIGS, VOCAB, make_model, save_folder, save_gguf

from lora_bench.engine.base_file import open_base
from lora_bench.engine.models.decoder import Decoder
from lora_bench.engine.weights.load import load_weights

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's advice on configs that are random on purpose
SPLIT = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LINEARS = {
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "granitemoehybrid": ["q_proj", "k_proj", "v_proj", "o_proj", "input_linear", "output_linear"],
}
"""of the architectures that have not those of SPLIT"""
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": "some"},
    "rslora": {"target_modules": "all-linear", "use_rslora": True},
    "patterns": {"target_modules": "all", "rank_pattern": {"o_proj": 2, r"layers\.1\..*down_proj": 5}, "alpha_pattern": {"down_proj": 1.5}},
    "dora": {"target_modules": "all", "use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "o_proj"]},
    "dora embedding": {"target_modules": ["embed_tokens", "o_proj"], "use_dora": True},
    "head": {"target_modules": ["lm_head", "o_proj"]},
    "lora bias": {"target_modules": "all", "lora_bias": True},
    "biases": {"target_modules": ["o_proj"], "bias": "all"},
    "saved": {"target_modules": "some",
              "modules_to_save": ["embed_tokens", "lm_head", "norm", "post_attention_layernorm", "q_norm", "k_norm"]},
    "trained tokens": {"target_modules": "some", "trainable_token_indices": {"embed_tokens": [7, 30]}},
}


ON_GGUF = ("patterns", "dora", "saved")
"""kinds that reach every linear, the order of q's and k's rows, the norms and the vocabulary"""
Base = tuple[str, Any, dict[str, Decoder]]


@pytest.fixture(scope="module", params=list(CONFIGS))
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Base:
    """An architecture, the model, and its files opened: "folder" and, where there are such files, "GGUF"."""
    name = request.param
    model = make_model(name)
    if not model.config.tie_word_embeddings:
        model.lm_head.weight.data.normal_(0, 0.3)
    place = tmp_path_factory.mktemp(name)
    files = {"folder": save_folder(model, place / "base", tiny_tokenizer())}
    if name != "ministral":
        files["GGUF"] = save_gguf(model, name, place / "base.gguf", TINY_TOKENS)
    opened = {form: open_base(path) for form, path in files.items()}
    cpu = torch.device("cpu")
    return name, model, {form: Decoder(file.facts, load_weights(file, cpu, torch.float32), 96) for form, file in opened.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_an_architecture_and_a_kind(seed: int, tmp_path: Path, base: Base, kind: str) -> None:
    name, model, decoders = base
    settings = dict(KINDS[kind])
    linears = LINEARS.get(name, SPLIT)
    if isinstance(settings["target_modules"], str) and settings["target_modules"] != "all-linear":
        settings["target_modules"] = linears if settings["target_modules"] == "all" else linears[:1] + linears[-1:]
    if "modules_to_save" in settings:  # PEFT refuses a list with a name that no module has
        there = [path for path, _ in model.named_modules()]
        settings["modules_to_save"] = [saved for saved in settings["modules_to_save"] if any(path.endswith(saved) for path in there)]
    config = LoraConfig(r=3, lora_alpha=4, init_lora_weights=False, **settings)
    adapted = change_all(get_peft_model(copy.deepcopy(model), config, adapter_name="it"), "it")
    if kind == "biases":
        for path, parameter in adapted.named_parameters():
            parameter.data += torch.randn_like(parameter) * 0.1 * path.endswith("bias")
    for form in decoders if kind in ON_GGUF else ("folder",):
        decoder = decoders[form]
        bench = ActingBench(decoder, {"it": weights_of(adapted, "it", decoder.facts, tmp_path / form)})
        length = 8 if (name, form) == ("mistral", "GGUF") else 25  # such files say no window
        ids = [random.choice([7, 30, *range(5, VOCAB)]) for _ in range(length)]
        got, alone = bench.logits([(ids, [("it", 1.0)]), (ids, [])], pieces=2)
        torch.testing.assert_close(got, peft_logits(adapted, ids, [("it", 1.0)]), rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            torch.testing.assert_close(alone, model(torch.tensor([ids])).logits[0], rtol=1e-4, atol=1e-4)
        assert not torch.allclose(got, alone, atol=1e-3), "it changes something"
