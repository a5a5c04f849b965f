"""What an adapter means, against PEFT on a tiny random llama: deltas by module, and logits through slots, routing and decoder."""
from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from lora_bench.engine.active import Span
from lora_bench.engine.adapter_store import AdapterStore
from lora_bench.engine.adapters.load import load_adapter
from lora_bench.engine.adapters.open import open_adapter
from lora_bench.engine.batch import Chunk, step_inputs
from lora_bench.engine.blocks import BlockTable
from lora_bench.engine.mix import resolve_mix
from lora_bench.engine.models.acting import active_lora
from lora_bench.engine.models.decoder import Decoder
from lora_bench.engine.models.facts import ModelFacts
from lora_bench.engine.protocol import AdapterUse, Mix

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's and transformers' advice on configs that are random on purpose
CPU = torch.device("cpu")
FACTS = ModelFacts("llama", layers=3, hidden=32, heads=4, kv_heads=2, head_dim=8, intermediate=48, vocab=64, context=128, rms_eps=1e-5,
                   rope_theta=1e4)
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


def _llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=FACTS.vocab, hidden_size=FACTS.hidden, intermediate_size=FACTS.intermediate, num_hidden_layers=FACTS.layers,
        num_attention_heads=FACTS.heads, num_key_value_heads=FACTS.kv_heads, head_dim=FACTS.head_dim, rms_norm_eps=FACTS.rms_eps,
        max_position_embeddings=FACTS.context, tie_word_embeddings=False, rope_theta=FACTS.rope_theta, attn_implementation="eager",
    )).eval()


def _random_config(rng: random.Random) -> LoraConfig:
    r = rng.randint(1, 9)
    return LoraConfig(
        r=r, lora_alpha=rng.choice([r, 2 * r, -3, 0.7, 5.5]), use_rslora=rng.random() < 0.5, init_lora_weights=False,
        target_modules=rng.choice([rng.sample(LINEARS, rng.randint(1, 8)), "all-linear", r".*layers\.[02].*(q|v|down)_proj"]),
        rank_pattern=rng.choice([{}, {"q_proj": 3, r"layers\.1\.mlp\..*": 2}, {r"model\.layers\.[01]\.self_attn\.v_proj": 7, "v_proj": 1}]),
        alpha_pattern=rng.choice([{}, {"down_proj": 9, r".*\.0\..*": -2.5}, {r"^model\.layers\.2\.self_attn\.q_proj": 1}]),
    )


def _save(model: LlamaForCausalLM, config: LoraConfig, folder: Path, **options: object) -> PeftModel:
    peft_model = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
    peft_model.save_pretrained(folder, **options)
    return peft_model.eval()


@pytest.mark.parametrize("case", range(8))
def test_deltas_of_random_adapters(seed: int, tmp_path: Path, case: int) -> None:
    _save(_llama(), _random_config(random.Random(seed)), tmp_path, safe_serialization=case % 2 == 0)
    # read back by PEFT too: it sorts the patterns when it saves them, and the first that matches wins
    peft_model = PeftModel.from_pretrained(_llama(), tmp_path)
    adapter = load_adapter(open_adapter(tmp_path), FACTS, "it")
    expected = {
        name.removeprefix("base_model.model.").removeprefix("model."): module.get_delta_weight("default")
        for name, module in peft_model.named_modules() if hasattr(module, "get_delta_weight")
    }
    assert adapter.modules.keys() == expected.keys()
    for name, pair in adapter.modules.items():
        torch.testing.assert_close(pair.scaling * (pair.b @ pair.a), expected[name], rtol=1e-4, atol=1e-5)


class _NoText:
    """The ids as they are; the texts are not under test here."""

    def decode(self, ids: object, special: bool) -> str:
        return str(ids)


class _Bench:
    """A decoder and a store; logits [tokens, vocab] of a batch of (ids, mix), prefilled in one step."""

    def __init__(self, model: LlamaForCausalLM, adapters: dict[str, Path]) -> None:
        weights = {name.removeprefix("model."): tensor.clone() for name, tensor in model.state_dict().items() if "rotary" not in name}
        self.decoder = Decoder(FACTS, weights, FACTS.context)
        self.store = AdapterStore(self.decoder, 3, 1 << 24, lambda event: None, _NoText())  # type: ignore[arg-type]
        for name, path in adapters.items():
            self.store.load(path, name)

    def logits(self, batch: list[tuple[list[int], Mix]]) -> torch.Tensor:
        mixes = [resolve_mix(mix, ids, self.store.infos, self.store.text) for ids, mix in batch]
        for user, mix in enumerate(mixes):
            self.store.acquire(mix.names, user, "a test")
        routing = self.store.routing({name for mix in mixes for name in mix.names})
        lora = None
        if routing is not None:
            spans = [Span(mix, 0, len(ids)) for (ids, _), mix in zip(batch, mixes, strict=True)]
            lora = active_lora(routing, spans, [Span(span.mix, span.count - 1, 1) for span in spans])
        chunks = [Chunk(ids, 0, BlockTable((2 * i, 2 * i + 1)), True) for i, (ids, _) in enumerate(batch)]
        caches = self.decoder.kv_cache(2 * len(batch), 16)
        return self.decoder.forward(step_inputs(chunks, CPU), caches, lora, lambda op: None)


def _reference(model: PeftModel, ids: list[int], name: str | None, scale: float) -> torch.Tensor:
    """Last logits by PEFT with one adapter at `scale`, or none."""
    with torch.no_grad():
        if name is None:
            with model.disable_adapter():
                return model(input_ids=torch.tensor([ids])).logits[0, -1]
        model.set_adapter(name)
        for module in model.modules():
            if hasattr(module, "set_scale") and name in getattr(module, "scaling", {}):
                module.set_scale(name, scale)
        return model(input_ids=torch.tensor([ids])).logits[0, -1]


def _ids(rng: random.Random, size: int) -> list[int]:
    return [rng.randrange(8, FACTS.vocab) for _ in range(size)]


def test_four_mixes_in_one_batch(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    llama = _llama()
    _save(llama, _random_config(rng), tmp_path / "one")
    llama = _llama_like(llama)
    _save(llama, _random_config(rng), tmp_path / "two")
    llama = _llama_like(llama)
    bench = _Bench(llama, {"one": tmp_path / "one", "two": tmp_path / "two"})
    model = PeftModel.from_pretrained(llama, tmp_path / "one", adapter_name="one").eval()
    model.load_adapter(tmp_path / "two", adapter_name="two")
    asked = [(_ids(rng, rng.randint(1, 30)), name, scale) for name, scale in (("one", 1.0), (None, 0.0), ("two", -0.7), ("one", 0.3))]
    rng.shuffle(asked)
    batch = [(ids, (AdapterUse(name, scale),) if name else ()) for ids, name, scale in asked]
    together = bench.logits(batch)
    for row, (ids, name, scale) in zip(together, asked, strict=True):
        torch.testing.assert_close(row, _reference(model, ids, name, scale), rtol=1e-3, atol=1e-3)
    for row, request in zip(together, batch, strict=True):
        torch.testing.assert_close(row, bench.logits([request])[0], rtol=1e-4, atol=1e-4)


def test_two_adapters_at_once_are_the_sum_of_their_deltas(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    llama = _llama()
    for name in ("one", "two"):
        _save(llama, _random_config(rng), tmp_path / name)
        llama = _llama_like(llama)
    bench = _Bench(llama, {"one": tmp_path / "one", "two": tmp_path / "two"})
    ids, scales = _ids(rng, 20), {"one": 0.8, "two": -1.3}
    got = bench.logits([(ids, tuple(AdapterUse(name, scale) for name, scale in scales.items()))])[0]
    with torch.no_grad():
        for name, scale in scales.items():
            for module, pair in load_adapter(open_adapter(tmp_path / name), FACTS, name).modules.items():
                path = module if module == "lm_head" else f"model.{module}"
                llama.get_submodule(path).weight += scale * pair.scaling * (pair.b @ pair.a)
        expected = llama(input_ids=torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("prompt", [[9, 9, 1, 2, 3, 9], [1, 2, 3, 9, 1, 2, 3], [1, 2, 3], [9, 9], [1, 2, 9, 3], [1, 1, 2, 3, 9]])
def test_alora_acts_from_its_last_invocation_on(seed: int, tmp_path: Path, prompt: list[int]) -> None:
    config = LoraConfig(r=4, lora_alpha=9, target_modules=["q_proj", "k_proj", "v_proj"], alora_invocation_tokens=[1, 2, 3],
                        init_lora_weights=False, task_type="CAUSAL_LM")
    llama = _llama()
    model = _save(llama, config, tmp_path)
    bench = _Bench(_llama_like(llama), {"it": tmp_path})
    got = bench.logits([(prompt, (AdapterUse("it"),)), ([9, 8], ()), (prompt, ())])
    torch.testing.assert_close(got[0], _reference(model, prompt, "default", 1.0), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(got[2], _reference(model, prompt, None, 0.0), rtol=1e-3, atol=1e-3)


def test_scale_zero_is_the_base_bit_for_bit(seed: int, tmp_path: Path) -> None:
    llama = _llama()
    _save(llama, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False), tmp_path)
    bench = _Bench(_llama_like(llama), {"it": tmp_path})
    ids = _ids(random.Random(seed), 20)
    assert torch.equal(bench.logits([(ids, (AdapterUse("it", 0.0),))]), bench.logits([(ids, ())]))


def _llama_like(wrapped: LlamaForCausalLM) -> LlamaForCausalLM:
    """A model of its own with the base weights of `wrapped`, whose linears PEFT has replaced."""
    clean = _llama()
    clean.load_state_dict({
        name.replace(".base_layer", ""): tensor for name, tensor in wrapped.state_dict().items() if "lora_" not in name
    })
    return clean
