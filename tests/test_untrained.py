"""Adapters as PEFT makes them, before they are trained: of every kind it is said that they change nothing, and of a trained one never."""
from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from acting_bench import change_all
from conftest import tiny_tokenizer
from peft import LoraConfig, get_peft_model
from peft_files import edit
from tiny_models import make_model, save_folder

from lora_bench.engine.adapters.describe import CHANGES_NOTHING
from lora_bench.engine.check import run_check
from lora_bench.engine.engine import Engine
from lora_bench.engine.protocol import CheckReport, DeltaNorm, LoadModel
from lora_bench.workbench.check_text import sections

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's advice
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dora": {"use_dora": True},
    "dora embedding": {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True},
    "saved": {"modules_to_save": ["lm_head", "norm", "input_layernorm"]},
    "trained tokens": {"trainable_token_indices": [5, 6]},
}


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("llama", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def base(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(model, tmp_path_factory.mktemp("base"), tiny_tokenizer())


def adapter(model: Any, folder: Path, trained: bool = False, dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(**{"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]} | config))
    (change_all(adapted, "default") if trained else adapted).to(dtype).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("trained", [False, True])
def test_loading_and_checking_say_what_changes_nothing(model: Any, base: Path, tmp_path: Path, trained: bool) -> None:
    paths = [str(adapter(model, tmp_path / kind, trained, **settings)) for kind, settings in KINDS.items()]
    engine = Engine(lambda event: None)
    engine.load_model(LoadModel(str(base), device="cpu", dtype="fp32"))
    noted = {kind: CHANGES_NOTHING in engine.load_adapter(path).notes for kind, path in zip(KINDS, paths, strict=True)}
    assert noted == dict.fromkeys(KINDS, not trained)
    result = run_check(str(base), paths, effect=False, device="cpu", dtype="fp32")
    findings = [report["findings"] for report in result["reports"]]
    assert [[finding["text"] for finding in found].count(CHANGES_NOTHING) for found in findings] == [not trained] * len(KINDS)
    assert [all(finding["level"] != "refused" for finding in found) for found in findings] == [trained] * len(KINDS)


@pytest.mark.parametrize("kind", ["dora", "saved", "trained tokens"])
def test_rounding_of_the_file_is_no_change(model: Any, base: Path, tmp_path: Path, kind: str) -> None:
    path = adapter(model, tmp_path / "it", dtype=torch.bfloat16, **KINDS[kind])
    assert not run_check(str(base), [str(path)], effect=False, device="cpu", dtype="fp32")["usable"]


def test_one_number_that_was_trained_is_enough(model: Any, base: Path, tmp_path: Path) -> None:
    path = adapter(model, tmp_path / "it", **KINDS["saved"])
    edit(path, lambda tensors: tensors["base_model.model.lm_head.weight"][40].add_(0.01))
    assert run_check(str(base), [str(path)], effect=False, device="cpu", dtype="fp32")["usable"]


def test_a_delta_too_small_to_act_changes_nothing(model: Any, base: Path, tmp_path: Path) -> None:
    path = adapter(model, tmp_path / "it", trained=True, lora_alpha=1)
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 1e-9}))
    for effect in (False, True):
        (report,) = run_check(str(base), [str(path)], effect=effect, device="cpu", dtype="fp32")["reports"]
        assert report["findings"][0]["level"] == "refused" and "changes nothing: no part of it" in report["findings"][0]["text"]


def test_the_checkpoint_of_a_run_that_is_opened_is_no_warning(model: Any, base: Path, tmp_path: Path) -> None:
    adapter(model, tmp_path / "run" / "checkpoint-20", trained=True)
    (report,) = run_check(str(base), [str(tmp_path / "run")], effect=False, device="cpu", dtype="fp32")["reports"]
    assert [finding["level"] for finding in report["findings"] if "is opened, the newest" in finding["text"]] == ["note"]


def test_norms_that_are_not_finite_are_shown_so() -> None:
    inf = float("inf")
    deltas = (DeltaNorm("layer 0", inf, 2.0), DeltaNorm("layer 1", 1.0, 2.0), DeltaNorm("norms and biases", 1.0, 0.0),
              DeltaNorm("lm_head", inf - inf, 1.0))
    shown = "\n".join(sections(CheckReport("p", "n", "m", deltas=deltas), 100)[-1].lines)
    assert shown.count("not finite") == 2 and shown.count("new") == 1 and "largest 50.00%" in shown
    assert "largest" not in sections(CheckReport("p", "n", "m", deltas=deltas[:1]), 100)[-1].lines[0]
