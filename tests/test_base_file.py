"""Bases of both formats: facts, tensors, weights, and refusals that name what is wrong."""
from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from conftest import tiny_tokenizer
from gguf import quants

from lora_bench.engine.base_file import NO_END_TOKEN, NO_TEMPLATE, open_base
from lora_bench.engine.base_gguf import NO_PRE_TOKENIZER
from lora_bench.engine.models.facts import ModelFacts, RopeScaling, module_shapes, tensor_shapes
from lora_bench.engine.models.llama import facts_from_config
from lora_bench.engine.models.names import gguf_name
from lora_bench.engine.tokenizer import Tokenizer
from lora_bench.engine.weights.files import FormatError
from lora_bench.engine.weights.load import LoadCancelled, load_weights


# -- what is read ---------------------------------------------------------------------------------
def test_the_default_base(sample_base: Path) -> None:
    base = open_base(sample_base)
    f = base.facts
    assert (f.architecture, f.layers, f.hidden, f.heads, f.kv_heads, f.head_dim, f.intermediate) == ("llama", 30, 576, 9, 3, 64, 1536)
    assert (f.vocab, f.context, f.rope_theta, f.tied, f.rope_scaling) == (49152, 8192, 100000.0, True, None)
    assert base.weight_types == {"Q4_1": 210, "F32": 61, "Q8_0": 1} and base.parameters == 134_515_008
    assert 2 in base.end_tokens and base.tokenizer.bos == 1 and base.tokenizer.add_bos is False and base.notes == ()
    assert base.details["license"] == "apache-2.0" and base.chat_template.startswith("{% for message in messages %}")
    shapes = module_shapes(f)
    assert len(shapes) == 211 and shapes["layers.3.self_attn.k_proj"] == (192, 576) and shapes["lm_head"] == (49152, 576)


def test_both_formats_give_the_same_facts_and_weights(
    tiny_gguf: Callable, tiny_folder: Callable, tiny_facts: ModelFacts, tiny_tensors: dict,
) -> None:
    for base in (open_base(tiny_gguf()), open_base(tiny_folder())):
        assert replace(base.facts, rms_eps=1e-5) == tiny_facts and base.facts.rms_eps == pytest.approx(1e-5)
        assert base.end_tokens == (2, 4) and base.tokenizer.texts["bos_token"] == "<s>" and base.notes == ()
        weights = load_weights(base, "cpu", torch.float32)
        assert weights.keys() == tiny_tensors.keys()
        for name, tensor in tiny_tensors.items():
            assert weights[name].is_contiguous() and torch.equal(weights[name], tensor), name


def test_any_file_of_a_folder_opens_it(tiny_folder: Callable) -> None:
    folder = tiny_folder()
    assert open_base(folder / "config.json") == open_base(folder / "model.safetensors") == open_base(folder) == open_base(str(folder))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantised_tensors_are_dequantised(dtype: torch.dtype, tiny_gguf: Callable, tiny_facts: ModelFacts, seed: int,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of one block and of a few rows give what the whole gives."""
    monkeypatch.setattr("lora_bench.engine.weights.load.CHUNK_BYTES", 300)
    hidden = 64
    kinds = {"blk.0.ffn_gate.weight": "Q8_0", "blk.1.ffn_up.weight": "Q4_1", "blk.0.attn_q.weight": "Q4_0"}
    tensors, expected = _widened(tiny_facts, hidden, kinds)
    path = tiny_gguf(metadata={"llama.embedding_length": hidden}, tensors=tensors)
    weights = load_weights(open_base(path), "cpu", dtype)
    for name, tensor in expected.items():
        assert weights[name].dtype == dtype and torch.equal(weights[name], tensor.to(dtype)), name


def _widened(facts: ModelFacts, hidden: int, kinds: dict[str, str]) -> tuple[dict, dict]:
    """Tensors of `facts` at another hidden size, by GGUF name, some packed; and what loading them must give."""
    packed, expected = {}, {}
    for name, shape in tensor_shapes(replace(facts, hidden=hidden)).items():
        array = torch.randn(shape).numpy()
        in_file = gguf_name(name, facts)
        if in_file in kinds:
            kind = gguf.GGMLQuantizationType[kinds[in_file]]
            packed[in_file] = (kind, quants.quantize(array, kind))
            array = quants.dequantize(packed[in_file][1], kind)
        else:
            packed[in_file] = array
        expected[name] = torch.from_numpy(array)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = facts.heads if "q_proj" in name else facts.kv_heads
            rows = [head * facts.head_dim + half + 2 * i for head in range(heads) for half in range(2) for i in range(facts.head_dim // 2)]
            expected[name] = expected[name][rows]
    return packed, expected


def test_tied_biased_and_freq_factored_bases(tiny_gguf: Callable, tiny_folder: Callable, tiny_facts: ModelFacts) -> None:
    tied = open_base(tiny_gguf(tensors={"output.weight": None}))
    assert tied.facts.tied and "lm_head.weight" not in tied.tensors and "lm_head" in module_shapes(tied.facts)
    factors = torch.rand(3)
    freqs = open_base(tiny_gguf("f.gguf", tensors={"rope_freqs.weight": factors.numpy()}))
    assert freqs.facts.rope_freq_factors
    assert torch.equal(load_weights(freqs, "cpu", torch.bfloat16)["rope_freqs.weight"], factors)
    biases = {f"model.layers.{i}.self_attn.{p}_proj.bias": torch.randn(n) for i in range(2)
              for p, n in zip("qkvo", (36, 12, 12, 24), strict=True)}
    biased = open_base(tiny_folder(config={"attention_bias": True}, tensors=biases))
    assert biased.facts.attention_bias and biased.facts.output_bias and "layers.1.self_attn.o_proj.bias" in biased.tensors
    both = open_base(tiny_folder("t", config={"tie_word_embeddings": True}))
    assert "lm_head.weight" in both.tensors and not both.facts.tied and "has an lm_head.weight: it is used" in both.notes[0]


def test_q_and_k_biases_of_a_gguf_are_put_in_order(tiny_gguf: Callable, tiny_facts: ModelFacts) -> None:
    names = [("attn_q", 36), ("attn_k", 12), ("attn_v", 12), ("attn_output", 24)]
    biases = {f"blk.{i}.{name}.bias": torch.arange(size).float().numpy() for i in range(2) for name, size in names}
    weights = load_weights(open_base(tiny_gguf(tensors=biases)), "cpu", torch.float32)
    assert weights["layers.0.self_attn.q_proj.bias"][:6].tolist() == [0, 2, 4, 1, 3, 5]
    assert weights["layers.0.self_attn.v_proj.bias"].tolist() == list(range(12))


CONFIG = {
    "model_type": "llama", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6, "vocab_size": 50,
    "max_position_embeddings": 256,
}


@pytest.mark.parametrize("change, fields", [
    ({}, {"kv_heads": 6, "head_dim": 4, "rope_theta": 10000.0, "rms_eps": 1e-6, "tied": False, "rope_scaling": None}),
    ({"head_dim": 8, "num_key_value_heads": 2, "rope_theta": 500000}, {"head_dim": 8, "kv_heads": 2, "rope_theta": 500000.0}),
    ({"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}}, {"rope_theta": 5000.0, "rope_scaling": None}),
    ({"rope_scaling": {"type": "linear", "factor": 4}}, {"rope_scaling": RopeScaling("linear", 4.0)}),
    ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, {"rope_scaling": RopeScaling("linear", 2.0)}),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                       "original_max_position_embeddings": 32}}, {"rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 32)}),
])
def test_config_of_old_and_new_styles(change: dict, fields: dict) -> None:
    facts = facts_from_config(CONFIG | change, Path("config.json"))
    assert {name: getattr(facts, name) for name in fields} == fields


# -- what is refused ------------------------------------------------------------------------------
@pytest.mark.parametrize("change, words", [
    ({"num_attention_heads": 0}, "num_attention_heads is 0"), ({"num_attention_heads": "6"}, "whole number is expected"),
    ({"num_hidden_layers": 10**9}, "number of layers .* is 1000000000"), ({"hidden_size": None}, "hidden_size is missing"),
    ({"hidden_size": 25}, "not divisible"), ({"num_key_value_heads": 4}, "cannot share 4"),
    ({"head_dim": 5}, "5 dimensions, an even number"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"), ({"quantization_config": {"quant_method": "gptq"}}, "quantised safetensors"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "architectures is"),
    ({"rope_scaling": {"rope_type": "spiral", "factor": 4.0}}, "kind 'spiral' is not supported"),
    ({"rope_scaling": 3}, "an object is expected"),
    ({"rope_scaling": {"rope_type": ["x"], "factor": 4.0}}, "is not supported"),
    ({"rope_scaling": {"rope_type": "linear", "factor": -1.0}}, "positive number"), ({"rope_theta": float("nan")}, "a number is expected"),
    ({"rope_theta": 0.5}, "over 1"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}}, "low_freq_factor"),
    ({"rms_norm_eps": 0}, "epsilon"), ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ({"attention_bias": 1}, "true or false"),
    ({"vocab_size": True}, "whole number"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps is"),
])
def test_configs_that_cannot_run(change: dict, words: str) -> None:
    with pytest.raises(FormatError, match=words) as refused:
        facts_from_config(CONFIG | change, Path("config.json"))
    assert str(refused.value).startswith("config.json: ")


@pytest.mark.parametrize("metadata, tensors, words", [
    ({"llama.attention.head_count": 0}, {}, "attention heads .* is 0"), ({"llama.block_count": 1 << 31}, {}, "number of layers"),
    ({"llama.block_count": 3}, {}, "blk.2.attn_q.weight .* missing"), ({"llama.block_count": None}, {}, "llama.block_count is missing"),
    ({"llama.block_count": 1}, {}, "does not use"),
    ({"llama.embedding_length": 25, "llama.attention.key_length": None}, {}, "not divisible"),
    ({"llama.rope.dimension_count": 4}, {}, "rope.dimension_count is 4"), ({"llama.rope.scaling.type": "spiral"}, {}, "'spiral'"),
    ({"llama.attention.sliding_window": 8}, {}, "sliding_window"), ({"llama.expert_count": 8}, {}, "expert_count is 8"),
    ({"general.type": "adapter"}, {}, "is a LoRA adapter, .* open a base first"), ({"split.count": 2}, {}, "is one of 2 parts"),
    ({"tokenizer.ggml.tokens": None}, {}, "no tokenizer"), ({"tokenizer.ggml.tokens": ["a", "b"]}, {}, "lists 2 tokens .* vocabulary"),
    ({"tokenizer.ggml.token_type": [1, 1]}, {}, "one type for each"), ({"tokenizer.ggml.bos_token_id": 4_000_000_000}, {}, "bos_token_id"),
    ({}, {"blk.0.attn_v.weight": None}, "blk.0.attn_v.weight is missing"),
    ({}, {"output_norm.weight": torch.ones(36).numpy()}, r"output_norm.* \[36\]"),
    ({}, {"blk.0.attn_q_norm.weight": torch.ones(6).numpy()}, "attn_q_norm.weight' that a plain llama"),
    ({}, {"output.weight": torch.ones(50, 24).double().numpy()}, "output.weight is of type F64"),
])
def test_gguf_bases_that_cannot_run(metadata: dict, tensors: dict, words: str, tiny_gguf: Callable) -> None:
    path = tiny_gguf(metadata=metadata, tensors=tensors)
    with pytest.raises(FormatError, match=words) as refused:
        open_base(path)
    assert str(path) in str(refused.value)


def test_a_folder_of_pickled_weights_is_told_apart(tiny_folder: Callable) -> None:
    folder = tiny_folder(files={"pytorch_model.bin": "x"})
    (folder / "model.safetensors").unlink()
    with pytest.raises(FormatError, match=r"neither model.safetensors nor .*its pytorch_model.bin is a pickle.*save the model again"):
        open_base(folder)


def test_padding_that_is_no_token_is_said(tiny_gguf: Callable) -> None:
    base = open_base(tiny_gguf(metadata={"tokenizer.ggml.padding_token_id": 50, "tokenizer.ggml.unknown_token_id": 0}))
    assert any("padding_token_id is 50, a token that the vocabulary has not" in note for note in base.notes)
    assert "pad_token" not in base.tokenizer.texts and base.tokenizer.texts["unk_token"]


def test_unknown_architectures_are_named_with_those_that_run(tiny_gguf: Callable, tiny_folder: Callable) -> None:
    with pytest.raises(FormatError, match="architecture 'flux', which is not supported; supported: llama"):
        open_base(tiny_gguf(architecture="flux"))
    with pytest.raises(FormatError, match="model_type 'own' is not a supported architecture .*auto_map.* supported: llama, mistral"):
        open_base(tiny_folder(config={"model_type": "own", "auto_map": {"AutoModel": "own.Own"}}))


@pytest.mark.parametrize("change, words", [
    ({"files": {"config.json": None}}, "no config.json"), ({"files": {"tokenizer.json": None}}, "no tokenizer.json"),
    ({"files": {"config.json": None, "adapter_config.json": {}}}, "is a LoRA adapter"), ({"files": {"config.json": "{"}}, "not valid JSON"),
    ({"tensors": {"model.layers.1.self_attn.v_proj.weight": None}}, "layers.1.self_attn.v_proj.weight is missing"),
    ({"config": {"vocab_size": 60}}, r"embed_tokens.weight has the shape \[50, 24\]"),
    ({"config": {"eos_token_id": 99}}, "eos_token_id is 99"),
    ({"tensors": {"model.layers.0.self_attn.q_norm.weight": torch.ones(6)}}, "q_norm.weight' that a plain llama"),
    ({"files": {"generation_config.json": {"eos_token_id": [2, 70]}}}, "generation_config.json: eos_token_id is 70"),
])
def test_folders_that_cannot_run(change: dict, words: str, tiny_folder: Callable) -> None:
    with pytest.raises(FormatError, match=words):
        open_base(tiny_folder(**change))


def _with_more(*texts: str) -> dict[str, object]:
    known = tiny_tokenizer()
    more = [known["added_tokens"][0] | {"id": 50 + i, "content": text} for i, text in enumerate(texts)]
    return known | {"added_tokens": [*known["added_tokens"], *more]}


def test_added_tokens_without_a_row_stay_text(tiny_folder: Callable) -> None:
    base = open_base(tiny_folder(files={"tokenizer.json": _with_more("<pad>", "<image>")}, settings={"pad_token": "<pad>"}))
    assert "its tokenizer names tokens that have no row in the embedding ('<pad>', '<image>'); they stay text" in base.notes
    tokenizer, plain = Tokenizer(base), Tokenizer(open_base(tiny_folder("plain")))
    for text in ("a<pad>b", "<image>", "the</s>"):
        assert tokenizer.encode(text, special=True) == plain.encode(text, special=True)
    assert tokenizer.vocab_size == 50 and tokenizer.spelling(50) is None


@pytest.mark.parametrize("settings, words", [
    ({"eos_token": "<pad>"}, r"tokenizer.json: the token '<pad>' \(50\) is the eos_token, but the embedding has rows for 50 tokens alone"),
    ({"bos_token": "<pad>"}, "is the bos_token"), ({"chat_template": "{{ messages[0].content }}<pad>"}, "stands in the chat template"),
])
def test_tokens_without_a_row_that_chats_need_are_refused(settings: dict, words: str, tiny_folder: Callable) -> None:
    with pytest.raises(FormatError, match=words):
        open_base(tiny_folder(files={"tokenizer.json": _with_more("<pad>")}, settings=settings))


def test_not_a_base(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file or folder; give the path"):
        open_base(tmp_path / "none.gguf")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(FormatError, match="is a LoRA adapter, not a base model"):
        open_base(tmp_path / "adapter_model.safetensors")


# -- models in parts ------------------------------------------------------------------------------
@pytest.fixture
def parts(tiny_gguf: Callable, tiny_facts: ModelFacts, tiny_tensors: dict) -> Callable[..., list[Path]]:
    """`parts(metadata of the second)` writes a GGUF in two files, layer 1 in the second."""

    def write(**second: object) -> list[Path]:
        names = [gguf_name(name, tiny_facts) for name in tiny_tensors]
        later = {name for name in names if name.startswith("blk.1.")}
        keys = {"split.count": 2, "split.tensors.count": len(names)}
        return [
            tiny_gguf("m-00001-of-00002.gguf", metadata=keys | {"split.no": 0}, tensors=dict.fromkeys(later)),
            tiny_gguf("m-00002-of-00002.gguf", metadata=keys | {"split.no": 1} | second, tensors=dict.fromkeys(set(names) - later)),
        ]

    return write


def test_any_part_opens_all(parts: Callable, tiny_tensors: dict) -> None:
    files = parts()
    for path in files:
        base = open_base(path)
        assert base.file_bytes == sum(file.stat().st_size for file in files)
        weights = load_weights(base, "cpu", torch.float32)
        assert all(torch.equal(weights[name], tensor) for name, tensor in tiny_tensors.items())


def test_parts_that_are_missing_or_do_not_belong(parts: Callable) -> None:
    first, second = parts(**{"split.no": 0})
    with pytest.raises(FormatError, match="m-00002-of-00002.gguf: is not part 2 of 2"):
        open_base(first)
    second.unlink()
    with pytest.raises(FormatError, match="m-00002-of-00002.gguf: part 2 of 2 is missing"):
        open_base(first)
    alone = first.rename(first.with_name("alone.gguf"))
    with pytest.raises(FormatError, match="alone.gguf: is one of 2 parts, whose names must end"):
        open_base(alone)


# -- templates and end tokens ---------------------------------------------------------------------
def test_which_chat_template_is_taken(tiny_folder: Callable) -> None:
    listed = [{"name": "tool_use", "template": "TOOLS"}, {"name": "default", "template": "DEFAULT"}]
    assert open_base(tiny_folder("a", settings={"chat_template": listed})).chat_template == "DEFAULT"
    assert open_base(tiny_folder("b", settings={"chat_template": "X"}, files={"chat_template.jinja": "FILE"})).chat_template == "FILE"
    none = open_base(tiny_folder("c", settings={"chat_template": None}))
    assert none.chat_template is None and none.notes == (NO_TEMPLATE,)


def test_every_end_token_is_found_and_what_is_missing_is_said(tiny_folder: Callable, tiny_gguf: Callable) -> None:
    assert open_base(tiny_folder("zero", config={"bos_token_id": 0}, settings={"bos_token": None})).tokenizer.bos == 0
    listed = tiny_folder("a", files={"generation_config.json": {"eos_token_id": [2, 7]}})
    assert open_base(listed).end_tokens == (2, 4, 7)
    assert open_base(tiny_gguf("a.gguf", metadata={"tokenizer.ggml.eot_token_id": 9})).end_tokens == (2, 4, 9)
    assert open_base(tiny_gguf("c.gguf", metadata={"tokenizer.ggml.pre": None})).notes == (NO_PRE_TOKENIZER,)
    plain = {"tokenizer.ggml.token_type": [1] * 50, "tokenizer.ggml.eos_token_id": None}
    ends = open_base(tiny_gguf("b.gguf", metadata=plain)).end_tokens
    assert ends == (4,), "<|im_end|> ends a turn whatever a converter noted; </s> may be text"
    tokens = ["<|im_end.|>" if text == "<|im_end|>" else text
              for text in open_base(tiny_gguf()).tokenizer.metadata["tokenizer.ggml.tokens"]]
    assert open_base(tiny_gguf("d.gguf", metadata=plain | {"tokenizer.ggml.tokens": tokens})).notes == (NO_END_TOKEN,)


# -- loading --------------------------------------------------------------------------------------
def test_progress_counts_every_byte_once(tiny_gguf: Callable) -> None:
    base = open_base(tiny_gguf())
    seen: list[tuple[str, int, int]] = []
    load_weights(base, "cpu", torch.float32, lambda *report: seen.append(report))
    total = sum(entry.nbytes for entry in base.tensors.values())
    done = [report[1] for report in seen]
    assert done == sorted(done) and seen[-1][1:] == (total, total) and {report[0] for report in seen} == set(base.tensors)


def test_loading_is_cancelled(tiny_gguf: Callable) -> None:
    count = 0

    def cancelled() -> bool:
        nonlocal count
        count += 1
        return count == 3

    with pytest.raises(LoadCancelled):
        load_weights(open_base(tiny_gguf()), "cpu", torch.float32, cancelled=cancelled)
    assert count == 3


def test_a_file_cut_after_it_was_opened(tiny_gguf: Callable) -> None:
    path = tiny_gguf()
    base = open_base(path)
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size - 64)
    with pytest.raises(FormatError, match="got shorter while tensor"):
        load_weights(base, "cpu", torch.float32)


def test_headers_are_read_without_torch(tiny_gguf: Callable, tiny_folder: Callable) -> None:
    code = ("import sys; from lora_bench.engine.base_file import open_base; [open_base(p) for p in sys.argv[1:]]; "
            "print([m for m in ('torch', 'numpy', 'gguf', 'safetensors', 'tokenizers', 'jinja2') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code, tiny_gguf(), tiny_folder()], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.replace("'", '"')) == []


# -- files that nobody vouches for ----------------------------------------------------------------
JUNK = [None, True, -1, 0, 10**30, 1.5, float("nan"), "", "x" * 300, "\x1b[2J", [], [[]], [None], ["x"], {}, {"a": {}}, [{"id": 1}]]


def test_any_value_in_the_json_of_a_folder_gives_a_base_or_a_sentence(tiny_folder: Callable, seed: int) -> None:
    """One field after another, at any depth that matters, replaced by junk."""
    folder = tiny_folder(files={"generation_config.json": {"eos_token_id": [2]}, "special_tokens_map.json": {"bos_token": "<s>"}})
    chance = random.Random(seed)
    for name in ("config.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json", "tokenizer.json"):
        good = json.loads((folder / name).read_text())
        for key in [*good, "rope_scaling", "rope_parameters", "sliding_window", "quantization_config", "architectures", "chat_template"]:
            for junk in chance.sample(JUNK, 4):
                (folder / name).write_text(json.dumps(good | {key: junk}))
                _opens_or_says(folder)
        (folder / name).write_text(json.dumps(good))
    Tokenizer(open_base(folder))


def test_any_value_in_the_metadata_of_a_gguf_gives_a_base_or_a_sentence(tiny_gguf: Callable, seed: int) -> None:
    chance = random.Random(seed)
    keys = ["llama.block_count", "llama.embedding_length", "llama.attention.head_count", "llama.attention.key_length",
            "llama.rope.freq_base",
            "llama.attention.layer_norm_rms_epsilon", "llama.context_length", "general.name", "general.type", "split.count",
            "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.attention.sliding_window",
            "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges",
            "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.add_bos_token", "tokenizer.chat_template"]
    junk = [True, -1, 0, 1 << 31, 1.5, float("nan"), "x", "\x1b[2J", [1, 2], ["x"], [1.5] * 50, [7] * 50, ["x"] * 50]
    for key in keys:
        for value in chance.sample(junk, 5):
            _opens_or_says(tiny_gguf("junk.gguf", metadata={key: value}))


def _opens_or_says(path: Path) -> None:
    try:
        Tokenizer(open_base(path))
    except FormatError as error:
        assert str(error).isprintable() and str(path) in str(error)
