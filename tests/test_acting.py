"""All that an adapter may change, against PEFT on a tiny random llama: logits of every token, at several scales, in mixes and batches."""
from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from acting_bench import ActingBench, base_tensors, change_all, peft_logits, weights_of
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from lora_bench.engine.adapters.adapter import AdapterWeights, TokenRows
from lora_bench.engine.models.decoder import Decoder
from lora_bench.engine.models.facts import ModelFacts

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's advice on configs that are random on purpose
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def _facts(tied: bool, bias: bool) -> ModelFacts:
    return ModelFacts("llama", layers=2, hidden=24, heads=4, kv_heads=2, head_dim=6, intermediate=40, vocab=50, context=64, rms_eps=1e-5,
                      rope_theta=1e4, tied=tied, attention_bias=bias, output_bias=bias, mlp_bias=bias)


def _llama(facts: ModelFacts) -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=facts.vocab, hidden_size=facts.hidden, intermediate_size=facts.intermediate, num_hidden_layers=facts.layers,
        num_attention_heads=facts.heads, num_key_value_heads=facts.kv_heads, head_dim=facts.head_dim, rms_norm_eps=facts.rms_eps,
        max_position_embeddings=facts.context, tie_word_embeddings=facts.tied, rope_theta=facts.rope_theta, attn_implementation="eager",
        attention_bias=facts.attention_bias, mlp_bias=facts.mlp_bias, pad_token_id=None,
    )).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(1)
    return model


KINDS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    "rslora": {"target_modules": "all-linear", "use_rslora": True},
    "patterns": {"target_modules": LINEARS, "rank_pattern": {"q_proj": 2, "down_proj": 7}, "alpha_pattern": {"v_proj": 1.5}},
    "dora": {"target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"], "use_dora": True},
    "dora rslora": {"target_modules": LINEARS, "use_dora": True, "use_rslora": True},
    "dora head": {"target_modules": ["lm_head", "up_proj"], "use_dora": True},
    "dora embedding": {"target_modules": ["embed_tokens", "k_proj"], "use_dora": True},
    "lora bias": {"target_modules": ["k_proj", "o_proj", "up_proj"], "lora_bias": True},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ["lm_head", "v_proj"]},
    "saved embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "saved head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "saved norms": {"target_modules": ["q_proj"], "modules_to_save": ["norm", "input_layernorm"]},
    "saved all": {"target_modules": ["down_proj"], "modules_to_save": ["embed_tokens", "lm_head", "post_attention_layernorm"]},
    "trained tokens": {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [3, 9, 41]}},
}


def _add(model: PeftModel | LlamaForCausalLM, name: str, kind: str) -> PeftModel:
    config = LoraConfig(r=4, lora_alpha=6, init_lora_weights=False, **KINDS[kind])
    if isinstance(model, PeftModel):
        model.add_adapter(name, config)
    else:
        model = get_peft_model(model, config, adapter_name=name)
    return change_all(model, name)


def _bench(model: PeftModel, facts: ModelFacts, folder: Path) -> ActingBench:
    decoder = Decoder(facts, base_tensors(model), facts.context)
    return ActingBench(decoder, {name: weights_of(model, name, facts, folder) for name in model.peft_config})


def _ids(size: int) -> list[int]:
    return [random.choice([3, 9, 41, *range(50)]) for _ in range(size)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_alone(tmp_path: Path, seed: int, kind: str, tied: bool) -> None:
    facts = _facts(tied, bias=kind in ("dora", "lora bias", "plain"))
    model = _add(_llama(facts), "it", kind)
    bench, ids = _bench(model, facts, tmp_path), _ids(21)
    got = bench.logits([(ids, [("it", 1.0)])])[0]
    torch.testing.assert_close(got, peft_logits(model, ids, [("it", 1.0)]), **CLOSE)
    assert not torch.allclose(got, bench.logits([(ids, [])])[0], atol=1e-2), "it changes something"
    torch.testing.assert_close(bench.logits([(ids, [])])[0], peft_logits(model, ids, []), **CLOSE)
    assert torch.equal(bench.logits([(ids, [("it", 0.0)])])[0], bench.logits([(ids, [])])[0]), "off is the base, bit for bit"


@pytest.mark.parametrize("config", [
    {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, {"target_modules": ["q_proj", "embed_tokens"]},
    {"target_modules": ["lm_head"]}, {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [1, 2], "lm_head": [1, 2]}},
], ids=str)
def test_tied_weights_that_stay_tied(tmp_path: Path, seed: int, config: dict[str, Any]) -> None:
    facts = _facts(tied=True, bias=False)
    lora = LoraConfig(r=3, init_lora_weights=False, ensure_weight_tying=True, **config)
    model = change_all(get_peft_model(_llama(facts), lora, "it"), "it")
    ids = _ids(17)
    got = _bench(model, facts, tmp_path).logits([(ids, [("it", 1.0)])])[0]
    torch.testing.assert_close(got, peft_logits(model, ids, [("it", 1.0)]), **CLOSE)


@pytest.mark.parametrize(("config", "tied"), [
    ({"target_modules": ["q_proj"]}, False), ({"target_modules": ["q_proj"]}, True),
    ({"target_modules": ["embed_tokens", "q_proj"]}, True), ({"target_modules": ["lm_head"]}, True),  # untied PEFT saves one matrix of two
    ({"target_modules": ["v_proj"], "trainable_token_indices": {"embed_tokens": [4, 50, 51, 52]}}, False),
    ({"target_modules": ["v_proj"], "trainable_token_indices": {"embed_tokens": [4, 50, 51, 52]}}, True),
], ids=str)
def test_a_vocabulary_that_was_resized(tmp_path: Path, seed: int, config: dict[str, Any], tied: bool) -> None:
    facts = _facts(tied, bias=False)
    llama = _llama(facts)
    decoder = Decoder(facts, {name.removeprefix("model."): tensor.clone() for name, tensor in llama.state_dict().items()
                              if not (tied and name.startswith("lm_head"))}, facts.context)
    llama.resize_token_embeddings(53, mean_resizing=False)
    model = change_all(get_peft_model(llama, LoraConfig(r=3, init_lora_weights=False, **config), "it"), "it")
    bench = ActingBench(decoder, {"it": weights_of(model, "it", facts, tmp_path, save_embedding_layers=True)})
    ids, others = [*_ids(12), 50, 52, 4], _ids(9)
    got, base = bench.logits([(ids, [("it", 1.0)]), (others, [])])
    torch.testing.assert_close(got, peft_logits(model, ids, [("it", 1.0)]), **CLOSE)
    torch.testing.assert_close(base[:, :50], bench.logits([(others, [])])[0], **CLOSE)


@pytest.mark.parametrize("dora", [False, True])
def test_trained_biases_of_the_base(tmp_path: Path, seed: int, dora: bool) -> None:
    facts = _facts(tied=False, bias=True)
    llama = _llama(facts)
    decoder = Decoder(facts, {name.removeprefix("model."): tensor.clone() for name, tensor in llama.state_dict().items()}, facts.context)
    config = LoraConfig(r=3, target_modules=["q_proj", "down_proj"], bias="all", use_dora=dora, init_lora_weights=False)
    model = change_all(get_peft_model(llama, config, "it"), "it")
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.data += torch.randn_like(parameter) * 0.2
    ids = _ids(15)
    bench = ActingBench(decoder, {"it": weights_of(model, "it", facts, tmp_path)})
    got, base = bench.logits([(ids, [("it", 1.0)]), (ids, [])])
    torch.testing.assert_close(got, peft_logits(model, ids, [("it", 1.0)]), **CLOSE)
    torch.testing.assert_close(base, bench.logits([(ids, [])])[0], **CLOSE)


@pytest.mark.parametrize("kind", ["plain", "dora", "dora rslora", "dora head", "dora embedding", "lora bias", "embedding", "head"])
@pytest.mark.parametrize("scale", [0.5, 2.0, -1.0])
def test_low_rank_kinds_at_other_scales(tmp_path: Path, seed: int, kind: str, scale: float) -> None:
    facts = _facts(tied=False, bias=True)
    model = _add(_llama(facts), "it", kind)
    ids = _ids(17)
    got = _bench(model, facts, tmp_path).logits([(ids, [("it", scale)])])[0]
    torch.testing.assert_close(got, peft_logits(model, ids, [("it", scale)]), **CLOSE)


def test_what_replaces_acts_as_a_difference(tmp_path: Path, seed: int) -> None:
    facts = _facts(tied=False, bias=False)
    model = _add(_llama(facts), "it", "saved all")
    ids, scale = _ids(17), -0.4
    got = _bench(model, facts, tmp_path).logits([(ids, [("it", scale)])])[0]
    changes = weights_of(model, "it", facts, tmp_path)
    plain = _llama(facts)
    weights = base_tensors(model)
    for name, tensor in changes.replaced.items():
        weights[name] += scale * (tensor - weights[name])
    for name, pair in changes.modules.items():
        weights[f"{name}.weight"] += scale * pair.scaling * (pair.b @ pair.a)
    plain.load_state_dict({name if name.startswith("lm_head") else f"model.{name}": tensor for name, tensor in weights.items()})
    torch.testing.assert_close(got, plain(torch.tensor([ids])).logits[0].detach(), **CLOSE)


def test_whole_matrices_with_trained_rows_in_another_dtype_than_the_base(seed: int) -> None:
    facts = _facts(tied=False, bias=False)
    decoder = Decoder(facts, {name.removeprefix("model."): tensor for name, tensor in _llama(facts).state_dict().items()}, facts.context)
    ids = torch.tensor([3, 9])
    for _ in range(20):  # memory that was freed is taken again, perhaps at once
        whole = {name: torch.randn(50, 24).half() for name in ("embed_tokens.weight", "lm_head.weight")}
        rows = {name: TokenRows(ids, torch.randn(2, 24).half()) for name in whole}
        content = ActingBench(decoder, {"it": AdapterWeights({}, replaced=whole, rows=rows)}).slots["it"].content
        for name, part in (("embed_tokens.weight", content.embedding), ("lm_head.weight", content.head)):
            assert torch.equal(part.replaced, whole[name].index_copy(0, ids, rows[name].values).float())
        same = AdapterWeights({}, replaced=dict.fromkeys(whole, whole["lm_head.weight"]), rows=dict.fromkeys(whole, rows["lm_head.weight"]))
        content = ActingBench(decoder, {"it": same}).slots["it"].content
        assert content.embedding.replaced is content.head.replaced, "what is shared is held once"


MIXES = [["plain", "dora"], ["dora", "plain"], ["dora", "dora rslora"], ["dora rslora", "dora"], ["lora bias", "dora", "plain"],
         ["dora", "rslora", "dora rslora"], ["dora embedding", "embedding", "dora"], ["embedding", "dora embedding"], ["dora head", "head"],
         ["head", "dora head"]]


@pytest.mark.parametrize("mix", MIXES, ids="+".join)
def test_mixes_in_their_order(tmp_path: Path, seed: int, mix: list[str]) -> None:
    facts = _facts(tied=False, bias=True)
    model: Any = _llama(facts)
    for kind in dict.fromkeys(mix):
        model = _add(model, kind.replace(" ", "_"), kind)
    uses = [(kind.replace(" ", "_"), random.choice([1.0, 0.7, -0.6])) for kind in mix]
    ids = _ids(15)
    got = _bench(model, facts, tmp_path).logits([(ids, uses)])[0]
    torch.testing.assert_close(got, peft_logits(model, ids, uses), **CLOSE)


Zoo = tuple[dict[str, PeftModel], ActingBench]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """Every kind as an adapter of one base; to PEFT each is a model of its own, it has no mix of all of them."""
    facts = _facts(tied=False, bias=True)
    base = _llama(facts)
    models = {kind.replace(" ", "_"): _add(copy.deepcopy(base), kind.replace(" ", "_"), kind) for kind in KINDS}
    decoder = Decoder(facts, base_tensors(models["plain"]), facts.context)
    folder = tmp_path_factory.mktemp("zoo")
    return models, ActingBench(decoder, {name: weights_of(model, name, facts, folder) for name, model in models.items()})


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_batch_of_all_kinds_is_each_alone(zoo: Zoo, seed: int, pieces: int) -> None:
    _, bench = zoo
    names = list(bench.slots)
    requests: list[Any] = [(_ids(random.randint(3, 20)), [(name, random.choice([1.0, 0.5, -1.0]))]) for name in names]
    requests += [(_ids(9), []), (_ids(12), [])]
    for _ in range(8):
        mix = [(name, random.choice([1.0, 1.7]), random.choice([0, 0, 5])) for name in random.sample(names, random.randint(2, 5))]
        requests.append((_ids(random.randint(6, 20)), mix))
    random.shuffle(requests)
    for (ids, mix), together in zip(requests, bench.logits(requests, pieces), strict=True):
        torch.testing.assert_close(together, bench.logits([(ids, mix)])[0], rtol=1e-4, atol=2e-4)


def test_every_kind_among_the_others_is_peft_s(zoo: Zoo, seed: int) -> None:
    models, bench = zoo
    requests: list[Any] = [(_ids(11), [(name, 1.0)]) for name in models] + [(_ids(11), [])]
    for (ids, mix), together in zip(requests, bench.logits(requests), strict=True):
        model = models[mix[0][0] if mix else "plain"]
        torch.testing.assert_close(together, peft_logits(model, ids, mix), **CLOSE)


def test_dora_that_starts_later_leaves_the_tokens_before_it_alone(zoo: Zoo, seed: int) -> None:
    _, bench = zoo
    ids, start = _ids(18), 7
    mixed, base, whole = bench.logits([(ids, [("plain", 1.0), ("dora", 0.8, start)]), (ids, [("plain", 1.0)]),
                                       (ids, [("plain", 1.0), ("dora", 0.8)])])
    torch.testing.assert_close(mixed[:start], base[:start], **CLOSE)
    assert not torch.allclose(mixed[start:], base[start:], atol=1e-2)
    assert not torch.allclose(mixed[start:], whole[start:], atol=1e-3), "the keys before it are other ones"


def test_greedy_replies_are_peft_s(zoo: Zoo, seed: int) -> None:
    models, bench = zoo
    for name, model in models.items():
        ids = _ids(5)
        theirs = list(ids)
        for _ in range(6):
            theirs.append(int(peft_logits(model, theirs, [(name, 1.0)])[-1].argmax()))
        ours = list(ids)
        for _ in range(6):
            ours.append(int(bench.logits([(ours, [(name, 1.0)])])[0][-1].argmax()))
        assert ours == theirs, name

