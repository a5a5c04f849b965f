"""inspect: plain data about bases and adapters, without torch."""
from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from lora_bench.engine.adapters.verdicts import field_verdicts
from lora_bench.engine.inspect import inspect_path
from lora_bench.engine.report import report_refused
from lora_bench.engine.weights.files import FormatError


def test_a_base_of_either_format(tiny_gguf: Callable, tiny_folder: Callable) -> None:
    for path, form, source in ((tiny_gguf(), "gguf", "GGUF metadata"), (tiny_folder(), "safetensors", "tokenizer.json")):
        facts = inspect_path(path)
        assert json.loads(json.dumps(facts)) == facts
        assert (facts["kind"], facts["format"], facts["architecture"], facts["layers"]) == ("base", form, "llama", 2)
        assert facts["linear_modules"] == 15 and facts["weight_types"] == {"F32": 21} and facts["file_bytes"] == _bytes(path)
        assert source in facts["tokenizer"]["from"] and facts["tokenizer"]["end_tokens"] == [2, 4]


def _bytes(path: Path) -> int:
    return (path / "model.safetensors" if path.is_dir() else path).stat().st_size


def test_an_adapter(adapter_folder: Callable) -> None:
    folder = adapter_folder("pirate", ("q_proj", "v_proj"), r=4, lora_alpha=6, alpha_pattern={"v_proj": 2},
                            base_model_name_or_path="some/base")
    facts = inspect_path(folder)
    assert json.loads(json.dumps(facts)) == facts
    assert (facts["kind"], facts["name"], facts["modules"], facts["ranks"]) == ("adapter", "pirate", 4, [4])
    assert facts["effective_scales"] == [0.5, 1.5] and facts["targets"] == {"q_proj": 2, "v_proj": 2} and facts["base_model"] == "some/base"
    assert facts == inspect_path(folder / "adapter_model.safetensors") | {"path": str(folder)}


def test_what_it_is_none_of(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(FormatError, match="is not a model .*config.json"):
        inspect_path(tmp_path / "notes.txt")


def test_the_program(tiny_gguf: Callable, tmp_path: Path) -> None:
    def run(path: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-P", "-m", "lora_bench.engine.inspect", path], capture_output=True, text=True)

    good = run(tiny_gguf())
    assert good.returncode == 0 and json.loads(good.stdout)["name"] == "tiny"
    bad = run(tmp_path / "none.gguf")
    assert bad.returncode == 3 and bad.stdout == "" and bad.stderr.count("\n") == 1 and "no such file" in bad.stderr


def test_no_torch(tiny_gguf: Callable, adapter_folder: Callable) -> None:
    code = ("import sys; from lora_bench.engine.inspect import inspect_path; [inspect_path(p) for p in sys.argv[1:]]; "
            "print(int('torch' in sys.modules), int('numpy' in sys.modules))")
    done = subprocess.run([sys.executable, "-c", code, tiny_gguf(), adapter_folder("a")], capture_output=True, text=True, check=True)
    assert done.stdout == "0 0\n"


@pytest.mark.parametrize(("config", "words"), [
    ({"r": 8}, "rank 8.*do not belong together"), ({"rank_pattern": {"v_proj": 2}}, "rank 2"), ({"use_qalora": True}, "QA-LoRA")])
def test_an_adapter_that_loading_would_refuse_is_refused(adapter_folder: Callable, config: dict, words: str) -> None:
    file = adapter_folder("x", ("q_proj", "v_proj"), r=4) / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with pytest.raises(ValueError, match=words):
        inspect_path(file)


def test_a_pickle_is_not_looked_into_and_that_is_said(adapter_folder: Callable) -> None:
    folder = adapter_folder("x")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    facts = inspect_path(folder)
    assert "modules" not in facts and any("only when it is loaded" in note for note in facts["notes"])


def test_weights_without_their_config(adapter_folder: Callable) -> None:
    folder = adapter_folder("x")
    (folder / "adapter_config.json").unlink()
    with pytest.raises(ValueError, match="has no adapter_config.json"):
        inspect_path(folder)


def test_an_adapter_says_what_became_of_its_fields_and_where_it_stands(adapter_folder: Callable) -> None:
    for step in (20, 100):
        adapter_folder(f"run/checkpoint-{step}", bias="none", lora_dropout=0.1)
    facts = inspect_path(adapter_folder("run/checkpoint-100").parent)
    assert facts["checkpoints"] == ["checkpoint-20", "checkpoint-100"] and facts["name"] == "run-checkpoint-100"
    good = adapter_folder("good", bias="none", lora_dropout=0.1)
    (good / "README.md").write_text("---\nbase_model: org/base\nlicense: mit\ntags:\n- pirate\n- lora\n---\n# hello\n")
    facts = inspect_path(good)
    assert facts["fields"]["honoured"]["bias"] == '"none"' and facts["fields"]["irrelevant"] == ["lora_dropout"]
    assert facts["card"]["license"] == "mit" and "pirate" in facts["card"]["tags"] and "refused" not in facts["fields"]


def test_the_fields_are_those_of_the_config_that_was_opened(adapter_folder: Callable) -> None:
    snapshot = adapter_folder("models--org--pirate/snapshots/0123456789abcdef0123456789abcdef01234567", use_rslora=True)
    entry = snapshot.parents[1]
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text(snapshot.name)
    adapter_folder("run/checkpoint-7", use_rslora=True)
    adapter_folder("run/checkpoint-11", use_qalora=True)  # the newest, and refused
    found = {field.field: field.verdict for field in field_verdicts(entry)}
    assert found["use_rslora"] == "honoured"
    assert field_verdicts(entry.parent / "run")[0].field == "use_qalora"
    assert field_verdicts(entry.parent / "nowhere") == ()


def test_metadata_that_is_not_shown_is_counted(adapter_folder: Callable) -> None:
    folder = adapter_folder("x")
    weights = folder / "adapter_model.safetensors"
    save_file(load_file(weights), weights, metadata={f"key {number}": "x" for number in range(70)})
    seen = inspect_path(folder)
    assert (len(seen["metadata"]), seen["more_metadata_keys"]) == (64, 6)
    assert report_refused(folder, "why", "base").about["metadata"] == "… 6 more keys"
