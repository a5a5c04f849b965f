"""What an adapter file may be, what is said of it, and what is refused by name."""
from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_bench.engine.adapters.adapter import Adapter
from lora_bench.engine.adapters.errors import AdapterError
from lora_bench.engine.adapters.load import load_adapter
from lora_bench.engine.adapters.open import open_adapter
from lora_bench.engine.adapters.patterns import lookup
from lora_bench.engine.adapters.peft import CONFIG, PICKLE, SAFETENSORS
from lora_bench.engine.models.facts import ModelFacts

Folder = Callable[..., Path]
SAMPLES = Path(__file__).parents[1] / "sample_adapters"


@pytest.fixture
def load(tiny_facts: ModelFacts) -> Callable[[Path], Adapter]:
    return lambda path: load_adapter(open_adapter(path), tiny_facts, "it")


def _edit(folder: Path, **changes: object) -> Path:
    config = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


# -- values of fields ------------------------------------------------------------------------------
@pytest.mark.parametrize(("field", "value"), [
    ("r", "four"), ("r", -4), ("r", 0), ("r", True), ("r", 4.0), ("r", 10**9), ("r", None), ("lora_alpha", None), ("lora_alpha", "8"),
    ("lora_alpha", float("nan")), ("lora_alpha", float("inf")), ("lora_alpha", 10**400), ("rank_pattern", [1]),
    ("rank_pattern", {"q_proj": 0}),
    ("alpha_pattern", {"q_proj": None}), ("use_rslora", "yes"), ("target_modules", 3), ("alora_invocation_tokens", []),
    ("alora_invocation_tokens", "<s>"), ("alora_invocation_tokens", [-1]), ("alora_invocation_tokens", [50]),
])
def test_a_value_that_cannot_be_is_refused_by_name(
    adapter_folder: Folder, load: Callable[[Path], Adapter], field: str, value: object,
) -> None:
    with pytest.raises(AdapterError, match=field.removeprefix("lora_")):
        load(_edit(adapter_folder("a"), **{field: value}))


# -- scales --------------------------------------------------------------------------------------
def test_scales_by_pattern_and_rslora(adapter_folder: Folder, load: Callable[[Path], Adapter]) -> None:
    adapter = load(adapter_folder("a", r=4, lora_alpha=6.5, alpha_pattern={"layers\\.1\\.self_attn\\.q_proj": 3, "v_proj": 1}))
    scales = {name: pair.scaling for name, pair in adapter.modules.items()}
    assert scales == {"layers.0.self_attn.q_proj": 6.5 / 4, "layers.1.self_attn.q_proj": 3 / 4, "layers.0.self_attn.v_proj": 1 / 4,
                      "layers.1.self_attn.v_proj": 1 / 4}
    assert adapter.info.effective_scales == (0.25, 0.75, 1.625)
    rooted = load(adapter_folder("b", r=4, lora_alpha=6, use_rslora=True))
    assert rooted.info.effective_scales == (3.0,) and rooted.info.rslora


def test_an_absent_alpha_takes_the_default_and_says_so(adapter_folder: Folder, load: Callable[[Path], Adapter]) -> None:
    folder = adapter_folder("a", r=4)
    config = json.loads((folder / CONFIG).read_text())
    del config["lora_alpha"]
    (folder / CONFIG).write_text(json.dumps(config))
    info = load(folder).info
    assert info.effective_scales == (2.0,)
    assert any("lora_alpha is absent" in note for note in info.notes)


def test_a_rank_other_than_the_configs_is_refused(adapter_folder: Folder, load: Callable[[Path], Adapter]) -> None:
    with pytest.raises(AdapterError, match=r"q_proj.lora_A.weight' has shape \[4, 24\], the config gives it rank 3"):
        load(_edit(adapter_folder("a"), rank_pattern={"q_proj": 3}))


def test_competing_patterns_are_said(adapter_folder: Folder, load: Callable[[Path], Adapter]) -> None:
    info = load(adapter_folder("a", r=4, alpha_pattern={r".*\.0\..*": 4, "q_proj": 8, "v_proj": 8})).info
    assert info.effective_scales == (1.0, 2.0)
    assert any("alpha_pattern" in note and "both match 'model.layers.0.self_attn.q_proj'" in note for note in info.notes)
    assert load(adapter_folder("b", alpha_pattern={"q_proj": 8, "layers.0.self_attn.q_proj": 8})).info.notes == ()


def test_patterns_that_backtrack_without_end_are_stopped() -> None:
    name = "model.layers.0.self_attn." + "a" * 40
    with pytest.raises(AdapterError, match="backtracks without end"):
        lookup({"(a+)+b": 1}, [name], 0, "x: rank_pattern")


def test_a_flood_of_patterns_is_refused() -> None:
    with pytest.raises(AdapterError, match="5,000 patterns are over the limit"):
        lookup({f"layers.{number}.q_proj": 1 for number in range(5000)}, ["q_proj"], 0, "x: rank_pattern")


def test_patterns_that_are_none_are_refused() -> None:
    with pytest.raises(AdapterError, match="is not a regular expression"):
        lookup({"q_proj(": 1}, ["q_proj"], 0, "x: rank_pattern")


# -- names and shapes ----------------------------------------------------------------------------
@pytest.mark.parametrize("prefix", ["base_model.model.model.", "base_model.model.", "", "model.", "base_model.model.model.language_model."])
@pytest.mark.parametrize("infix", ["", ".default", ".my adapter"])
def test_names_match_by_their_end(adapter_folder: Folder, load: Callable[[Path], Adapter], prefix: str, infix: str) -> None:
    plain = adapter_folder("plain")
    tensors = load_file(plain / SAFETENSORS)
    renamed = {
        key.replace("base_model.model.model.", prefix).replace(".weight", f"{infix}.weight"): tensor for key, tensor in tensors.items()
    }
    assert load(adapter_folder("renamed", tensors=renamed)).info.digest == load(plain).info.digest


def test_the_language_model_is_told_from_the_vision_tower(adapter_folder: Folder, load: Callable[[Path], Adapter]) -> None:
    tensors = load_file(adapter_folder("plain") / SAFETENSORS)
    both = {key.replace("model.model.", "model.model.language_model."): tensor for key, tensor in tensors.items()}
    both |= {key.replace("model.model.", "model.model.vision_tower.encoder."): torch.randn(tensor.shape) for key, tensor in tensors.items()}
    info = load(adapter_folder("both", tensors=both)).info
    assert (info.matched, info.total) == (4, 8)
    assert any("4 of 8 modules are not in the base" in note and "vision_tower" in note for note in info.notes)


def test_two_paths_for_one_module_are_ambiguous(adapter_folder: Folder, load: Callable[[Path], Adapter]) -> None:
    tensors = load_file(adapter_folder("plain") / SAFETENSORS)
    twice = tensors | {key.replace("model.model.", "model.draft."): tensor.clone() for key, tensor in tensors.items()}
    with pytest.raises(AdapterError, match="both name the module layers.0.self_attn.q_proj"):
        load(adapter_folder("twice", tensors=twice))


def _rename(tensors: dict[str, torch.Tensor], old: str, new: str | None) -> dict[str, torch.Tensor]:
    return {(key.replace(old, new) if new else key): tensor for key, tensor in tensors.items() if new or old not in key}


@pytest.mark.parametrize(("old", "new", "words"), [
    ("layers.1.self_attn.v_proj.lora_B", None, "v_proj.*lora_B of the pair is missing"),
    ("layers.1.self_attn.v_proj.lora_A", None, "v_proj.*lora_A of the pair is missing"),
    ("layers.1.", "layers.2.", r"layers\.2, the base has layers\.0 to layers\.1"),
    ("self_attn", "attn", "no module of it matches the base.*layers.N.attn.q_proj.*the base has 'layers.N.self_attn.q_proj'"),
    ("layers.1.self_attn.v_proj.lora_B.weight", "layers.1.self_attn.v_proj.lora_magnitude_vector", "lora_B of the pair"),
    ("layers.1.self_attn.v_proj.lora_B.weight", "lm_head.weight", "lora_B of the pair"),
    ("layers.1.self_attn.v_proj.lora_B.weight", "embed_tokens.lora_embedding_B", "lora_embedding_A of the pair"),
    ("layers.1.self_attn.v_proj.lora_B.weight", "layers.1.self_attn.v_proj.lora_B.bias", "lora_B of the pair"),
])
def test_tensors_that_do_not_fit_are_named(
    adapter_folder: Folder, load: Callable[[Path], Adapter], old: str, new: str | None, words: str,
) -> None:
    tensors = load_file(adapter_folder("plain") / SAFETENSORS)
    with pytest.raises(AdapterError, match=words):
        load(adapter_folder("broken", tensors=_rename(tensors, old, new)))


def test_a_copy_of_the_base_weight_stands_in_its_place_and_is_said(adapter_folder: Folder, load: Callable[[Path], Adapter]) -> None:
    tensors = load_file(adapter_folder("plain", ("lm_head",)) / SAFETENSORS)
    copy = torch.randn(50, 24)
    copied = load(adapter_folder("copied", ("lm_head",), tensors=tensors | {"base_model.model.lm_head.base_layer.weight": copy}))
    assert copied.info.matched == 1 and any("own copy of lm_head.weight" in note for note in copied.info.notes)
    assert torch.equal(copied.weights.replaced["lm_head.weight"], copy)
    larger = tensors | {"base_model.model.lm_head.base_layer.weight": torch.randn(52, 24)}
    with pytest.raises(AdapterError, match="24 inputs and 50 outputs, in the base that module has 24 and 52"):
        load(adapter_folder("larger", ("lm_head",), tensors=larger))


@pytest.mark.parametrize(("change", "words"), [
    (lambda t: t.T.contiguous(), r"lora_B.weight' has shape \[4, 12|shape \[4, 36|has shape"),
    (lambda t: torch.cat([t, t]), "inputs and .* outputs, in the base"),
    (lambda t: t.to(torch.int8), "dtype I8"),
    (lambda t: t.to(torch.float8_e4m3fn), "dtype F8_E4M3"),
    (lambda t: t.index_fill(0, torch.tensor([1]), torch.nan), "not finite"),
    (lambda t: t.index_fill(0, torch.tensor([1]), torch.inf), "not finite"),
    (lambda t: t[:, :0].clone(), "rank 4"),
    (lambda t: t.flatten(), "rank 4"),
])
def test_values_that_do_not_fit_are_named(
    adapter_folder: Folder, load: Callable[[Path], Adapter], change: Callable[[torch.Tensor], torch.Tensor], words: str,
) -> None:
    tensors = load_file(adapter_folder("plain") / SAFETENSORS)
    name = next(key for key in tensors if "q_proj.lora_B" in key)
    tensors[name] = change(tensors[name])
    with pytest.raises(AdapterError, match=words) as refusal:
        load(adapter_folder("broken", tensors=tensors))
    assert "q_proj" in str(refusal.value)


def test_nothing_is_silent(adapter_folder: Folder, load: Callable[[Path], Adapter]) -> None:
    notes = " / ".join(load(_edit(adapter_folder("a"), target_modules=["q_proj", "up_proj"])).info.notes)
    assert "target_modules lists 'up_proj', missing from the file" in notes
    assert "target_modules leaves out 2 of the 4 modules of the file" in notes and "v_proj" in notes
    tensors = {key: torch.zeros_like(t) if "lora_B" in key else t for key, t in load_file(adapter_folder("b") / SAFETENSORS).items()}
    assert any("changes nothing" in note for note in load(adapter_folder("zero", tensors=tensors)).info.notes)
    assert any("changes nothing" in note for note in load(adapter_folder("off", lora_alpha=0)).info.notes)
    assert not any("changes nothing" in note for note in load(adapter_folder("c")).info.notes)


# -- containers ----------------------------------------------------------------------------------
@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_of_tensors_equals_the_safetensors_file(adapter_folder: Folder, load: Callable[[Path], Adapter], zipped: bool) -> None:
    folder = adapter_folder("a")
    expected = load(folder)
    torch.save(load_file(folder / SAFETENSORS), folder / PICKLE, _use_new_zipfile_serialization=zipped)
    assert any(PICKLE in note for note in load(folder).info.notes)
    (folder / SAFETENSORS).unlink()
    adapter = load(folder)
    assert adapter.info.digest == expected.info.digest and adapter.info.format == "PEFT bin"
    (folder / PICKLE).unlink()
    assert all(torch.isfinite(pair.a).all() for pair in adapter.modules.values())


class _Danger:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.canary),)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("save", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
def test_a_pickle_with_code_is_refused_and_not_run(
    adapter_folder: Folder, load: Callable[[Path], Adapter], tmp_path: Path, save: Callable[[object, Path], object],
) -> None:
    folder = adapter_folder("a")
    (folder / SAFETENSORS).unlink()
    save({"x": _Danger(tmp_path / "canary")}, folder / PICKLE)
    with pytest.raises(AdapterError, match="safetensors"):
        load(folder)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("content", [
    [1, 2], {"x": "y"}, {"x": torch.tensor(1.0).expand(1 << 20, 1 << 20)}, {"x": torch.zeros(2, dtype=torch.int8)},
    {"x": torch.zeros(2, 2).to_sparse()},
])
def test_a_pickle_of_something_else_is_refused(adapter_folder: Folder, load: Callable[[Path], Adapter], content: object) -> None:
    folder = adapter_folder("a")
    (folder / SAFETENSORS).unlink()
    torch.save(content, folder / PICKLE)
    with pytest.raises(AdapterError, match=PICKLE):
        load(folder)


def test_paths_that_are_no_adapter(adapter_folder: Folder, load: Callable[[Path], Adapter], tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="no such file or folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(AdapterError, match=f"has no {CONFIG}"):
        load(tmp_path)
    (tmp_path / "x.gguf").touch()
    with pytest.raises(ValueError, match="x.gguf: is not a GGUF file"):
        load(tmp_path / "x.gguf")
    (tmp_path / "x.txt").touch()
    with pytest.raises(AdapterError, match="is no adapter"):
        load(tmp_path / "x.txt")
    folder = adapter_folder("a")
    assert load(folder / CONFIG).info.digest == load(folder / SAFETENSORS).info.digest == load(folder).info.digest
    (folder / SAFETENSORS).unlink()
    with pytest.raises(AdapterError, match=f"neither {SAFETENSORS} nor {PICKLE}"):
        load(folder)
    os.mkfifo(folder / PICKLE)
    with pytest.raises(ValueError, match="not a regular file"):
        load(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "\0" * 50, "[" * 100_000, '{"peft_type": "LORA", "r": ' + "9" * 5000 + "}"])
def test_configs_that_are_none(adapter_folder: Folder, load: Callable[[Path], Adapter], text: str) -> None:
    folder = adapter_folder("a")
    (folder / CONFIG).write_text(text)
    with pytest.raises(ValueError, match=CONFIG):
        load(folder)


@pytest.mark.parametrize("broken", [CONFIG, SAFETENSORS, PICKLE])
def test_broken_bytes_give_a_sentence(adapter_folder: Folder, load: Callable[[Path], Adapter], seed: int, broken: str) -> None:
    rng = random.Random(seed)
    folder = adapter_folder("a", rank_pattern={"q_proj": 4}, alpha_pattern={"v_proj": 2})
    if broken == PICKLE:
        torch.save(load_file(folder / SAFETENSORS), folder / PICKLE)
        (folder / SAFETENSORS).unlink()
    good = (folder / broken).read_bytes()
    refused = 0
    for _ in range(120):
        data = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data) if rng.random() < 0.5 else min(len(data), 700))
            data[at:at + rng.choice([0, 1, 1, 8])] = rng.randbytes(rng.choice([0, 1, 1, 8]))
        (folder / broken).write_bytes(data[:rng.randrange(len(data))] if rng.random() < 0.2 else data)
        try:
            load(folder)
        except (ValueError, OSError) as error:
            refused += 1
            assert "\n" not in str(error) and "\x1b" not in str(error), error
    assert refused > 40


# -- what is said --------------------------------------------------------------------------------
def test_digest_is_of_content_alone(adapter_folder: Folder, load: Callable[[Path], Adapter]) -> None:
    folder = adapter_folder("a", lora_alpha=8)
    digest = load(folder).info.digest
    tensors = load_file(folder / SAFETENSORS)
    reordered = adapter_folder("elsewhere", tensors=dict(reversed(tensors.items())), task_type=None, lora_alpha=8.0)
    save_file(tensors, reordered / SAFETENSORS, metadata={"made": "otherwise"})
    assert load(reordered).info.digest == digest
    assert load(_edit(folder, lora_alpha=9)).info.digest != digest
    assert load(_edit(folder, lora_alpha=8, alora_invocation_tokens=[1, 2])).info.digest != digest
    assert load(_edit(folder, alora_invocation_tokens=None)).info.digest == digest
    changed = tensors | {next(iter(tensors)): next(iter(tensors.values())) + 1e-3}
    assert load(adapter_folder("changed", tensors=changed, lora_alpha=8)).info.digest != digest


def test_norms_are_those_of_the_whole_products(adapter_folder: Folder, load: Callable[[Path], Adapter]) -> None:
    adapter = load(adapter_folder("a", targets=("q_proj", "down_proj", "lm_head"), lora_alpha=-3))
    for layer in range(2):
        deltas = [pair.scaling * (pair.b @ pair.a) for name, pair in adapter.modules.items() if name.startswith(f"layers.{layer}.")]
        assert adapter.info.norms[layer] == pytest.approx(sum(delta.square().sum().item() for delta in deltas) ** 0.5, rel=1e-4)
    assert adapter.info.targets == {"q_proj": 2, "down_proj": 2, "lm_head": 1}
    assert adapter.info.bytes == sum(pair.a.nbytes + pair.b.nbytes for pair in adapter.modules.values())


@pytest.mark.parametrize(("name", "ranks", "scales", "modules", "invocation"), [
    ("pirate", (8,), (2.0,), 120, ()),
    ("json", (16,), (4.0,), 210, ()),
    ("caps", (2, 4, 6, 8), (1.0, 8 / 6, 2.0, 4.0), 150, ()),
    ("certainty", (16,), (2.0,), 90, (1, 33622, 198)),
])
def test_sample_adapters(
    name: str, ranks: tuple[int, ...], scales: tuple[float, ...], modules: int, invocation: tuple[int, ...],
) -> None:
    facts = ModelFacts("llama", 30, 576, 9, 3, 64, 1536, 49152, 8192, 1e-5, 1e5, tied=True)
    info = load_adapter(open_adapter(SAMPLES / name), facts, name).info
    assert (info.ranks, info.effective_scales, info.matched, info.total) == (ranks, scales, modules, modules)
    assert info.invocation_tokens == invocation and info.notes == () and len(info.norms) == 30 and min(info.norms) > 0


def test_opening_needs_no_torch() -> None:
    code = ("import sys; from lora_bench.engine.adapters.open import open_adapter; open_adapter(sys.argv[1]); "
            "assert 'torch' not in sys.modules")
    subprocess.run([sys.executable, "-c", code, str(SAMPLES / "caps")], check=True)
