"""Fixtures that many test files share."""
from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import triton_cpu

from lora_bench.engine.default_model import ensure_default_model
from lora_bench.engine.models.facts import ModelFacts, module_shapes, tensor_shapes
from lora_bench.engine.models.names import config_name, gguf_name

if TYPE_CHECKING:
    from engine_bench import Bench
    from torch import Tensor


os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # shorter than the engine's process sets it: tests share their cores
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # as the engine's process sets it


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly:
        triton_cpu.begin(session.items)


def pytest_sessionfinish() -> None:
    triton_cpu.end()


@pytest.fixture(autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings and logs of a test never touch the person's own."""
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    monkeypatch.setenv("XDG_DATA_HOME", str(folder / "data"))


@pytest.fixture(scope="session")
def sample_base() -> Path:
    """The default model's GGUF file; fetched on the first run on a machine."""
    return ensure_default_model()


@pytest.fixture(scope="session")
def golden() -> Path:
    """Reference token ids and logits, computed with transformers and PEFT; its README says how."""
    return Path(__file__).parent / "data" / "golden"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked `gpu` are skipped where there is no CUDA device."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture
def seed() -> int:
    """A fresh seed, printed so that a failure can be repeated; torch is seeded with it."""
    import torch

    number = random.SystemRandom().randrange(1 << 31)
    print(f"seed {number}")
    torch.manual_seed(number)
    return number


@pytest.fixture(scope="session")
def tiny_facts() -> ModelFacts:
    """A decoder of two layers whose sizes are all different, where they may be."""
    return ModelFacts(
        architecture="llama", layers=2, hidden=24, heads=6, kv_heads=2, head_dim=6, intermediate=40, vocab=50, context=256,
        rms_eps=1e-5, rope_theta=1e4,
    )


AdapterFolder = Callable[..., Path]


@pytest.fixture
def adapter_folder(tmp_path: Path, tiny_facts: ModelFacts, seed: int) -> AdapterFolder:
    """`adapter_folder(name, targets, r=.., tensors=.., **config)` writes a PEFT folder of random weights for `tiny_facts`."""
    import torch
    from safetensors.torch import save_file

    shapes = module_shapes(tiny_facts)

    def write(name: str, targets: tuple[str, ...] = ("q_proj", "v_proj"), r: int = 4, tensors: Mapping[str, Tensor] | None = None,
              **config: object) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True, exist_ok=True)
        if tensors is None:
            tensors = {}
            for module, (d_out, d_in) in shapes.items():
                if module.rsplit(".", 1)[-1] in targets:
                    path = f"base_model.model.{'' if module == 'lm_head' else 'model.'}{module}"
                    tensors[f"{path}.lora_A.weight"] = torch.randn(r, d_in)
                    tensors[f"{path}.lora_B.weight"] = torch.randn(d_out, r)
        save_file(dict(tensors), folder / "adapter_model.safetensors")
        whole = {"peft_type": "LORA", "r": r, "lora_alpha": 2 * r, "target_modules": list(targets)} | config
        (folder / "adapter_config.json").write_text(json.dumps(whole))
        return folder

    return write


TINY_TOKENS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKL.,:!Ġ", "th", "he"]
"""a byte-level vocabulary of 50: five special tokens, characters, two merged tokens"""
TINY_TEMPLATE = ("{% for m in messages %}{{ '<|im_start|>' + m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}"
                 "{% if add_generation_prompt %}{{ '<|im_start|>assistant:' }}{% endif %}")


def tiny_tokenizer() -> dict[str, object]:
    """A tokenizer.json of TINY_TOKENS."""
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
                          "special": True} for i, text in enumerate(TINY_TOKENS[:5])],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {text: i for i, text in enumerate(TINY_TOKENS)}, "merges": [["t", "h"], ["h", "e"]]},
    }


@pytest.fixture
def tiny_tensors(tiny_facts: ModelFacts, seed: int, request: pytest.FixtureRequest) -> dict[str, Tensor]:
    """Random weights of `tiny_facts` by canonical name.

    Of size 1, or smaller for tests marked `calm`: those of size 1 amplify rounding from layer to layer.
    """
    import torch

    size = 0.3 if request.node.get_closest_marker("calm") else 1.0
    return {name: size * torch.randn(shape) for name, shape in tensor_shapes(tiny_facts).items()}


@pytest.fixture
def tiny_gguf(tmp_path: Path, tiny_facts: ModelFacts, tiny_tensors: dict[str, Tensor]) -> Callable[..., Path]:
    """`tiny_gguf(name, metadata={key: value or None}, tensors={name in the file: array or None})` writes a GGUF of `tiny_facts`.

    None takes a key or tensor away. Everything else is as convert scripts write it, q/k rows interleaved.
    """
    import gguf

    f = tiny_facts
    usual = {
        "llama.block_count": f.layers, "llama.context_length": f.context, "llama.embedding_length": f.hidden,
        "llama.feed_forward_length": f.intermediate, "llama.attention.head_count": f.heads, "llama.attention.head_count_kv": f.kv_heads,
        "llama.attention.key_length": f.head_dim, "llama.attention.value_length": f.head_dim, "llama.rope.dimension_count": f.head_dim,
        "llama.rope.freq_base": f.rope_theta, "llama.attention.layer_norm_rms_epsilon": f.rms_eps, "general.name": "tiny",
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": TINY_TOKENS,
        "tokenizer.ggml.token_type": [2, 3, 3, 3, 3] + [1] * 45, "tokenizer.ggml.merges": ["t h", "h e"],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TINY_TEMPLATE,
    }
    interleaved = {gguf_name(name, f): _interleaved(name, tensor, f).numpy() for name, tensor in tiny_tensors.items()}

    def write(name: str = "tiny.gguf", metadata: Mapping[str, object] = {}, tensors: Mapping[str, object] = {},  # noqa: B006
              architecture: str = "llama") -> Path:
        writer = gguf.GGUFWriter(tmp_path / name, architecture)
        for key, value in (usual | dict(metadata)).items():
            if key == "general.alignment":
                writer.add_custom_alignment(value)
            elif isinstance(value, list):
                writer.add_array(key, value)
            elif value is not None:
                kind = gguf.GGUFValueType.get_type(value)
                writer.add_key_value(key, value, gguf.GGUFValueType.UINT32 if kind == gguf.GGUFValueType.INT32 and value >= 0 else kind)
        for tensor_name, array in (interleaved | dict(tensors)).items():
            if array is not None:
                kind, data = array if isinstance(array, tuple) else (None, array)
                writer.add_tensor(tensor_name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / name

    return write


@pytest.fixture
def talking_head(tiny_tensors: dict[str, Tensor]) -> Tensor:
    """The head of `tiny_tensors`, which hardly ever says a special token, so that replies have their full length."""
    head = tiny_tensors["lm_head.weight"].clone()
    head[:5] = 0
    return head


@pytest.fixture
def tiny_talker(tiny_gguf: Callable[..., Path], talking_head: Tensor) -> Callable[..., Path]:
    """As `tiny_gguf`, without `tensors`, of a base that has `talking_head`."""
    return partial(tiny_gguf, tensors={"output.weight": talking_head.numpy()})


@pytest.fixture
def base(tiny_talker: Callable[..., Path]) -> Path:
    """A tiny random base that hardly ever says a special token."""
    return tiny_talker()


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token ends a reply, so that each has its full length."""
    from lora_bench.engine import loaded

    open_base = loaded.open_base
    monkeypatch.setattr(loaded, "open_base", lambda path: replace(open_base(path), end_tokens=()))


@pytest.fixture
def make(base: Path, adapter_folder: AdapterFolder, monkeypatch: pytest.MonkeyPatch, endless: None) -> Callable[..., Bench]:
    """`make(blocks=, step_tokens=, pages=, **load)`: an engine on `base` with three adapters; no token ends a reply."""
    from engine_bench import NAMES, Bench

    from lora_bench.engine import loaded

    folders = {name: adapter_folder(name, ("q_proj", "v_proj", "down_proj"), r=2 + number) for number, name in enumerate(NAMES)}
    make_config = loaded.make_config

    def build(blocks: int = 64, step_tokens: int = 128, pages: int | None = None, **load: object) -> Bench:
        sizes = {"blocks": blocks, "step_tokens": step_tokens} | ({} if pages is None else {"pages": pages})
        monkeypatch.setattr(loaded, "make_config", lambda *asked: replace(make_config(*asked), **sizes))
        bench = Bench(base, **{"slots": 3} | load)
        for name, folder in folders.items():
            bench.engine.load_adapter(str(folder), name)
        bench.events.clear()
        return bench
    return build


def _interleaved(name: str, tensor: Tensor, facts: ModelFacts) -> Tensor:
    """The rows of q and k as llama GGUF files order them: the two halves of a head alternate."""
    kind = next((kind for kind in ("q_proj", "k_proj") if kind in name), None)
    if kind is None:
        return tensor
    heads = facts.heads if kind == "q_proj" else facts.kv_heads
    return tensor.reshape(heads, 2, facts.head_dim // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape).contiguous()


@pytest.fixture
def tiny_folder(tmp_path: Path, tiny_facts: ModelFacts, tiny_tensors: dict[str, Tensor]) -> Callable[..., Path]:
    """`tiny_folder(name, config={..}, settings={..}, tensors={..}, files={file: JSON or text})`.

    It writes a Hugging Face folder of `tiny_facts`.
    `config` and `settings` (tokenizer_config.json) replace fields, None takes one away; so does `tensors`, by the file's names.
    """
    from safetensors.torch import save_file

    f = tiny_facts
    usual = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": f.hidden,
        "intermediate_size": f.intermediate, "num_hidden_layers": f.layers, "num_attention_heads": f.heads,
        "num_key_value_heads": f.kv_heads, "head_dim": f.head_dim, "vocab_size": f.vocab, "max_position_embeddings": f.context,
        "rms_norm_eps": f.rms_eps, "rope_theta": f.rope_theta, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    }
    tokenizer = tiny_tokenizer()

    def write(name: str = "tiny", config: Mapping[str, object] = {}, settings: Mapping[str, object] = {},  # noqa: B006
              tensors: Mapping[str, object] = {}, files: Mapping[str, object] = {}) -> Path:  # noqa: B006
        folder = tmp_path / name
        folder.mkdir()
        weights = {config_name(key): tensor for key, tensor in tiny_tensors.items()} | dict(tensors)
        save_file({key: tensor for key, tensor in weights.items() if tensor is not None}, folder / "model.safetensors")
        own = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TINY_TEMPLATE} | dict(settings)
        written = {"config.json": usual | dict(config), "tokenizer_config.json": own, "tokenizer.json": tokenizer} | dict(files)
        for file, content in written.items():
            if isinstance(content, dict):
                content = json.dumps({key: value for key, value in content.items() if value is not None or file == "tokenizer.json"})
            if content is not None:
                (folder / file).write_text(content)
        return folder

    return write
