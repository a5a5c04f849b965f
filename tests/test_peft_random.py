"""Random adapters against PEFT: some cases of `peft_random.py`, and what is refused because PEFT means something else by it."""
from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from peft_files import edit
from peft_random import make_base, run_case

from lora_bench.engine.adapter_store import AdapterStore
from lora_bench.engine.adapters.adapter import Adapter
from lora_bench.engine.adapters.errors import AdapterError
from lora_bench.engine.adapters.load import load_adapter
from lora_bench.engine.adapters.open import open_adapter

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's advice on configs that are random on purpose


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bases")


@pytest.mark.parametrize(("adapters", "cases", "compared"), [(1, 40, 3 / 4), (2, 15, 1 / 2), (3, 15, 0.3)])
def test_random_adapters(bases: Path, adapters: int, cases: int, compared: float) -> None:
    """`compared` is the least part of the adapters and mixes that PEFT makes; what is refused here is of one kind."""
    found = {number: run_case(number, 20 + adapters, bases, adapters) for number in range(cases)}
    assert not {number: outcome.what for number, outcome in found.items() if outcome.kind == "wrong"}
    kinds = Counter(outcome.kind for outcome in found.values())
    assert kinds["not made"] <= cases / 3 and kinds["same"] >= compared * (cases - kinds["not made"]), kinds
    refused = [outcome.what for outcome in found.values() if outcome.kind == "refused"]
    assert all("in PEFT that acts before the invocation too" in why for why in refused) and len(refused) <= cases / 10, refused


def _read(bases: Path, folder: Path, name: str, save: bool = False, **config: Any) -> Adapter:
    base = make_base(name, bases)
    get_peft_model(copy.deepcopy(base.model), LoraConfig(**{"r": 2, "target_modules": ["q_proj"]} | config)).save_pretrained(
        folder, save_embedding_layers=save)
    return load_adapter(open_adapter(folder), base.decoders["folder"].facts, "it")


@pytest.mark.parametrize("trained", [
    {"modules_to_save": ["norm"]}, {"modules_to_save": ["lm_head"]}, {"bias": "all"}, {"bias": "lora_only"},
    {"trainable_token_indices": [3]},
])
def test_what_does_not_wait_for_an_invocation(bases: Path, tmp_path: Path, trained: dict[str, Any]) -> None:
    waiting = {"alora_invocation_tokens": [5, 6], "task_type": "CAUSAL_LM"}
    with pytest.raises(AdapterError, match="in PEFT that acts before the invocation too"):
        _read(bases, tmp_path, "llama biases", **waiting, **trained)
    adapter = _read(bases, tmp_path, "llama biases", save=True, **waiting)
    assert any("what it holds whole acts from its invocation on" in note for note in adapter.info.notes)


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("config", [
    {"modules_to_save": ["lm_head"], "trainable_token_indices": [3, 9]},
    {"modules_to_save": ["embed_tokens"], "trainable_token_indices": [3, 9]},
    {"modules_to_save": ["embed_tokens"], "trainable_token_indices": {"lm_head": [3]}, "ensure_weight_tying": True},
])
def test_a_module_wrapped_twice(bases: Path, tmp_path: Path, config: dict[str, Any], save: bool) -> None:
    with pytest.raises(AdapterError, match="modules_to_save and trainable_token_indices both act on"):
        _read(bases, tmp_path, "qwen2", save=save, **config)


def test_dora_on_a_head_that_is_not_the_bases_is_refused_at_once(bases: Path, tmp_path: Path) -> None:
    base = make_base("llama", bases)
    store = AdapterStore(base.decoders["folder"], 1, 1 << 24, lambda event: None, None)  # type: ignore[arg-type]
    _read(bases, tmp_path / "a", "llama", save=True, target_modules=["lm_head", "embed_tokens"], use_dora=True)
    store.load(tmp_path / "a", "a")
    edit(tmp_path / "a", lambda tensors: tensors["base_model.model.lm_head.base_layer.weight"].add_(0.1))
    with pytest.raises(AdapterError, match="has DoRA on lm_head.weight and another lm_head.weight than the base"):
        store.load(tmp_path / "a", "b")


def test_weights_beside_the_adapter_are_said(bases: Path, tmp_path: Path) -> None:
    for name in ("non_lora_trainables.bin", "new_embeddings.safetensors", "optimizer.pt", "training_args.bin", "adapter_model.bin",
                 ".hidden.pt"):
        (tmp_path / name).write_bytes(b"no tensors at all")
    notes = _read(bases, tmp_path, "llama").info.notes
    assert "'new_embeddings.safetensors', 'non_lora_trainables.bin' beside adapter_model.safetensors: not read, as PEFT does not; " \
        "what was trained is missing if it is there" in notes
    assert not any("optimizer" in note or "training_args" in note or "hidden" in note for note in notes)
