"""Checks of adapters: norms against dense sums, the effect against logits one by one, and what is said of those that cannot be used."""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import fake_engine
import pytest
import torch
from engine_bench import Bench

from lora_bench.engine import effect
from lora_bench.engine.adapters.adapter import Adapter, AdapterWeights, LoraPair, TokenRows
from lora_bench.engine.chat import own_template_note
from lora_bench.engine.check import run_check
from lora_bench.engine.deltas import VECTORS, WeightSquares, delta_norms
from lora_bench.engine.models.decoder import Decoder
from lora_bench.engine.protocol import (
    AdapterLoaded,
    AdapterUse,
    CheckAdapter,
    CheckFailed,
    CheckFinished,
    CheckProgress,
    CheckReport,
    CommandFailed,
    DeltaNorm,
    Event,
    LoadAdapter,
    LoadModel,
    Shutdown,
    TokenIds,
    plain_data,
)
from lora_bench.engine.report import NO_EFFECT_KL, plain_name
from lora_bench.engine.service import Inbox, serve

Q, DOWN = "layers.0.self_attn.q_proj", "layers.1.mlp.down_proj"


def finish(bench: Bench, name: str, effect_too: bool = True) -> CheckReport:
    bench.engine.checks.ask(name, effect_too)
    while bench.engine.checks.busy:
        bench.engine.checks.advance()
    (event,) = [event for event in bench.events if isinstance(event, CheckFinished | CheckFailed)]
    assert isinstance(event, CheckFinished), event
    bench.events.clear()
    return event.report


def drained(work) -> object:
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value


def norms(facts, tensors, **weights) -> dict[str, DeltaNorm]:
    """By place, of an adapter with these weights on a decoder of `tensors`."""
    base = WeightSquares(Decoder(facts, dict(tensors), 32))
    adapter = Adapter(fake_engine.adapter("x"), AdapterWeights(**{"modules": {}} | weights))
    return {norm.place: norm for norm in drained(delta_norms(base, adapter))}


def pair(d_out: int, d_in: int, **more) -> LoraPair:
    return LoraPair(torch.randn(3, d_in), torch.randn(d_out, 3), 0.7, **more)


# -- norms ------------------------------------------------------------------------------------------
def test_norms_of_low_rank_deltas_are_those_of_the_dense_ones(tiny_facts, tiny_tensors) -> None:
    shapes = {module: tiny_tensors[f"{module}.weight"].shape for module in (Q, "layers.0.mlp.up_proj", DOWN, "lm_head")}
    pairs = {module: pair(*shape) for module, shape in shapes.items()}
    found = norms(tiny_facts, tiny_tensors, modules=pairs)
    dense = {module: 0.7 * one.b @ one.a for module, one in pairs.items()}
    assert list(found) == ["layer 0", "layer 1", "lm_head"]
    expected = torch.cat([dense[Q].flatten(), dense["layers.0.mlp.up_proj"].flatten()]).norm().item()
    assert found["layer 0"].delta == pytest.approx(expected, rel=1e-4)
    assert found["lm_head"].delta == pytest.approx(dense["lm_head"].norm().item(), rel=1e-4)
    assert found["lm_head"].weight == pytest.approx(tiny_tensors["lm_head.weight"].norm().item(), rel=1e-5)
    assert found["layer 1"].weight == pytest.approx(tiny_tensors[f"{DOWN}.weight"].norm().item(), rel=1e-5)


def test_norms_of_dora_are_those_of_what_it_makes_of_the_weight(tiny_facts, tiny_tensors) -> None:
    weight = tiny_tensors[f"{Q}.weight"]
    one = pair(*weight.shape, magnitude=torch.rand(weight.shape[0]) + 0.5)
    moved = weight + 0.7 * one.b @ one.a
    moved = one.magnitude.unsqueeze(1) * moved / moved.norm(dim=1, keepdim=True)
    assert norms(tiny_facts, tiny_tensors, modules={Q: one})["layer 0"].delta == pytest.approx((moved - weight).norm().item(), rel=1e-4)


def test_norms_of_dora_on_the_embedding_go_by_columns(tiny_facts, tiny_tensors) -> None:
    weight = tiny_tensors["embed_tokens.weight"]
    one = LoraPair(torch.randn(3, weight.shape[0]), torch.randn(weight.shape[1], 3), 0.7, magnitude=torch.rand(weight.shape[1]) + 0.5)
    moved = weight + 0.7 * (one.b @ one.a).T
    moved = one.magnitude * moved / moved.norm(dim=0)
    found = norms(tiny_facts, tiny_tensors, embedding=one)["embed_tokens"]
    assert found.delta == pytest.approx((moved - weight).norm().item(), rel=1e-4)
    plain = norms(tiny_facts, tiny_tensors, embedding=LoraPair(one.a, one.b, 0.7))["embed_tokens"]
    assert plain.delta == pytest.approx((0.7 * one.b @ one.a).norm().item(), rel=1e-4)


def test_norms_of_all_else_that_an_adapter_changes(tiny_facts, tiny_tensors) -> None:
    norm, head = tiny_tensors["layers.1.input_layernorm.weight"], tiny_tensors["lm_head.weight"]
    own = torch.cat([head + 1, torch.randn(2, head.shape[1])])  # two words more than the base
    ids = torch.tensor([3, 7])
    found = norms(
        tiny_facts, tiny_tensors, modules={Q: pair(*tiny_tensors[f"{Q}.weight"].shape, bias=torch.ones(36))},
        replaced={"layers.1.input_layernorm.weight": norm + 2, "lm_head.weight": own},
        rows={"embed_tokens.weight": TokenRows(ids, tiny_tensors["embed_tokens.weight"][ids] + 3)})
    assert found["lm_head"].delta == pytest.approx(head.numel() ** 0.5, rel=1e-5)
    assert found["rows of embed_tokens"].delta == pytest.approx(3 * (2 * tiny_facts.hidden) ** 0.5, rel=1e-5)
    assert found["rows of embed_tokens"].weight == pytest.approx(tiny_tensors["embed_tokens.weight"][ids].norm().item(), rel=1e-5)
    assert found[VECTORS].delta == pytest.approx((0.49 * 36 + 4 * norm.numel()) ** 0.5, rel=1e-5)
    assert found[VECTORS].weight == pytest.approx(norm.norm().item(), rel=1e-5)
    assert DeltaNorm("x", 1.0, 0.0).share == float("inf") and DeltaNorm("x", 0.0, 0.0).share == 0


# -- effect -----------------------------------------------------------------------------------------
@pytest.fixture
def one_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effect, "PROMPTS", (("chat", "the hat"),))


def test_the_effect_is_that_of_logits_taken_one_by_one(tiny_gguf: Callable, adapter_folder: Callable, one_prompt: None) -> None:
    bench = Bench(tiny_gguf())
    bench.engine.load_adapter(adapter_folder("x", ("q_proj", "down_proj")), "x")
    seen: list[list[int]] = []
    requests = bench.engine.make_request
    bench.engine.make_request = lambda number, ids, mix, sampling: seen.append(ids) or requests(number, ids, mix, sampling)
    (part,) = finish(bench, "x").effect
    ids = list(seen[-1])
    assert len(ids) > len(seen[0]) - 24 and part.positions == len(ids)
    changed = kl = 0.0
    for end in range(1, len(ids) + 1):
        base, other = (torch.log_softmax(bench.engine.logits(ids[:end], mix), -1).double() for mix in ((), (AdapterUse("x"),)))
        changed += base.argmax() != other.argmax()
        kl += (base.exp() * (base - other)).sum().item() / len(ids)
    assert part.changed == changed and part.kl == pytest.approx(kl, rel=1e-3)
    assert not changed or part.before != part.after or part.before == ""


def test_the_replies_are_the_bases_own(tiny_gguf: Callable, adapter_folder: Callable, one_prompt: None) -> None:
    bench = Bench(tiny_gguf())
    bench.engine.load_adapter(adapter_folder("x"), "x")
    prompt = effect._prompt(bench.engine.model, "the hat", bench.engine.model.store.infos["x"])
    (answered,) = drained(effect._replies(bench.engine, [prompt]))
    bench.submit(1, TokenIds(tuple(prompt)), max_tokens=effect.REPLY_TOKENS)
    bench.run()
    ended = [token for token in bench.ids(1) if token not in (2, 4)]
    assert answered[len(prompt):] == ended[: len(answered) - len(prompt)] and len(answered) - len(prompt) >= min(len(ended), 23)


def test_an_alora_is_invoked_and_counted_from_there(tiny_gguf: Callable, adapter_folder: Callable, one_prompt: None) -> None:
    bench = Bench(tiny_gguf())
    bench.engine.load_adapter(adapter_folder("x", alora_invocation_tokens=[9, 10]), "x")
    (part,) = finish(bench, "x").effect
    assert 2 <= part.positions <= 2 + effect.REPLY_TOKENS and part.kl > 0


def test_a_short_context_cuts_prompts(tiny_gguf: Callable, adapter_folder: Callable) -> None:
    bench = Bench(tiny_gguf(), context=40)
    bench.engine.load_adapter(adapter_folder("x"), "x")
    assert all(0 < part.positions <= 40 for part in finish(bench, "x").effect)


# -- what is said -----------------------------------------------------------------------------------
def test_a_good_adapter(tiny_gguf: Callable, adapter_folder: Callable) -> None:
    bench = Bench(tiny_gguf())
    bench.engine.load_adapter(adapter_folder("x", base_model_name_or_path="org/Tiny-Q4_K_M"), "x")
    report = finish(bench, "x")
    assert report.usable and report.findings == () and report.info.matched == 4 == len(report.modules)
    assert [(group.scale, group.kinds) for group in report.scales] == [(2.0, {"q_proj": 2, "v_proj": 2})]
    assert [delta.place for delta in report.deltas] == ["layer 0", "layer 1"] and len(report.effect) == 5
    assert ("r", "4", "honoured") in [(field.field, field.value, field.verdict) for field in report.fields]
    assert json.loads(json.dumps(plain_data(report)))["info"]["norms"]


def test_an_adapter_that_changes_nothing_is_not_usable(tiny_gguf: Callable, adapter_folder: Callable) -> None:
    report = run_check(str(tiny_gguf()), [str(adapter_folder("x", lora_alpha=0))])["reports"][0]
    assert (report["findings"][0]["level"], report["findings"][0]["text"][:15]) == ("refused", "changes nothing")
    assert not [part for part in report["effect"] if part["changed"] or part["kl"] >= NO_EFFECT_KL]
    assert any("no effect was seen" in finding["text"] for finding in report["findings"])


def test_modules_without_a_place_another_base_and_no_base(tiny_gguf: Callable, adapter_folder: Callable, tiny_facts) -> None:
    path = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    tensors = {path.format(0, "A"): torch.randn(4, 24), path.format(0, "B"): torch.randn(36, 4)}
    tensors |= {"base_model.model.model.layers.0.odd_proj.lora_A.weight": torch.randn(4, 24),
                "base_model.model.model.layers.0.odd_proj.lora_B.weight": torch.randn(5, 4)}
    other, nameless = adapter_folder("other", tensors=tensors, base_model_name_or_path="org/Llama-9B"), adapter_folder("nameless")
    result = run_check(str(tiny_gguf()), [str(other), str(nameless)], effect=False)
    first, second = result["reports"]
    assert result["usable"] and first["unmatched"] == ["model.layers.0.odd_proj"] and first["modules"] == [Q]
    texts = [finding["text"] for finding in first["findings"]]
    assert any("1 of 2 modules" in text for text in texts) and any("org/Llama-9B" in text and "tiny" in text for text in texts)
    assert [finding["level"] for finding in second["findings"]] == ["note"] and second["effect"] == []


def test_what_lies_beside_an_adapter_is_said(tiny_gguf: Callable, adapter_folder: Callable, tmp_path: Path) -> None:
    old, new = adapter_folder("run/checkpoint-90"), adapter_folder("run/checkpoint-100")
    (new / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }} of its own"}))
    (old / "tokenizer_config.json").write_text("{")
    result = run_check(str(tiny_gguf()), [str(tmp_path / "run"), str(old)], effect=False)
    assert result["usable"]
    for report, says in zip(result["reports"], ("has a chat template of its own, which chats do not use", "cannot be read"), strict=True):
        assert [finding["text"] for finding in report["findings"] if finding["level"] == "warning" and says in finding["text"]]
        assert report["about"]["checkpoints of its run"] == "2, the newest first: checkpoint-100, checkpoint-90"


def test_a_base_s_own_template_is_not_said(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert own_template_note(tmp_path, "x") == ""
    (tmp_path / "chat_template.jinja").write_text("{{ x }}\n")
    assert own_template_note(tmp_path, "{{ x }}") == "" and "the base has none" in own_template_note(tmp_path, None)
    assert "written with the base's" in own_template_note(tmp_path, "{{ y }}")
    assert own_template_note(tmp_path / "chat_template.jinja", None) == ""


def test_refused_adapters_have_a_report_with_the_reason_first(tiny_gguf: Callable, adapter_folder: Callable) -> None:
    nan = adapter_folder("nan")
    from safetensors.torch import load_file, save_file
    tensors = load_file(nan / "adapter_model.safetensors")
    tensors[min(tensors)][0, 0] = float("nan")
    save_file(tensors, nan / "adapter_model.safetensors")
    loha = adapter_folder("loha", use_qalora=True)
    half = adapter_folder("half", tensors={min(tensors): torch.zeros(4, 24)})
    result = run_check(str(tiny_gguf()), [str(nan), str(loha), str(nan.parent / "gone"), str(half)], effect=False)
    first, second, third, fourth = result["reports"]
    assert "missing" in fourth["findings"][0]["text"] and (fourth["tensors"], fourth["dtypes"]) == (1, {"F32": 1})
    assert not result["usable"] and all(report["findings"][0]["level"] == "refused" for report in result["reports"])
    assert "not finite" in first["findings"][0]["text"] and min(tensors) in first["findings"][0]["text"]
    assert first["tensors"] == len(tensors)
    assert second["fields"][0] == {"field": "use_qalora", "value": "true", "verdict": "refused", "why": "QA-LoRA, pooled inputs"}
    assert "no such file" in third["findings"][0]["text"] and third["fields"] == []


@pytest.mark.parametrize(("name", "plain"), [
    ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2135minstruct"), ("SmolLM2-135M-Instruct.Q4_1", "smollm2135minstruct"),
    ("SmolLM2-135M-Instruct-Q4_1-dequant", "smollm2135minstruct"), ("unsloth/Llama-3.2-1B-Instruct-bnb-4bit", "llama321binstruct"),
    ("/x/hub/models--meta-llama--Llama-3.2-1B/snapshots/0123abc", "llama321b"), ("C:\\models\\Qwen3-0.6B-IQ4_XS.gguf", "qwen306b"),
    ("granite-3.3-2b-instruct-f16.gguf", "granite332binstruct"), ("", ""), ("///", ""), ("Llama-3.2-1B", "llama321b")])
def test_names_of_bases_are_compared_without_the_marks_of_conversion(name: str, plain: str) -> None:
    assert plain_name(name) == plain


# -- beside replies ---------------------------------------------------------------------------------
def test_a_check_leaves_replies_as_they_were_and_waits_for_them(tiny_gguf: Callable, adapter_folder: Callable) -> None:
    bench = Bench(tiny_gguf())
    bench.engine.load_adapter(adapter_folder("x"), "x")
    alone = bench.reply((AdapterUse("x"),))
    free = bench.engine.model.memory.free
    bench.engine.checks.ask("x", True)
    bench.submit(1, mix=(AdapterUse("x"),))
    while bench.engine.checks.busy:
        bench.engine.checks.advance()
        bench.engine.step()
    bench.run()
    assert bench.ids(1) == alone and bench.of(CheckFinished) and bench.of(CheckProgress)
    assert bench.engine.model.memory.free == free


def test_a_check_that_cannot_go_on_says_so(tiny_gguf: Callable, adapter_folder: Callable) -> None:
    bench = Bench(tiny_gguf())
    bench.engine.load_adapter(adapter_folder("x"), "x")
    with pytest.raises(ValueError, match="no adapter 'y' is loaded"):
        bench.engine.checks.ask("y", True)
    bench.engine.checks.ask("x", True)
    for _ in range(8):
        bench.engine.checks.advance()
    bench.engine.unload_adapter("x")
    while bench.engine.checks.busy:
        bench.engine.checks.advance()
    (failed,) = bench.of(CheckFailed)
    assert failed.name == "x" and "'x'" in failed.message


def test_a_check_is_stopped_where_it_is_and_leaves_nothing_behind(tiny_gguf: Callable, adapter_folder: Callable) -> None:
    bench = Bench(tiny_gguf())
    for name in "xy":
        bench.engine.load_adapter(adapter_folder(name), name)
    checks, memory = bench.engine.checks, bench.engine.model.memory
    free = memory.free
    checks.ask("x", True)
    checks.ask("y", False)
    while memory.free == free:
        checks.advance()
    assert checks.cancel("x") and not checks.cancel("x") and memory.free == free
    assert all(slot.users == 0 for slot in bench.engine.snapshot().slots)
    assert bench.of(CheckFailed) == [CheckFailed("x", "the check was stopped", cancelled=True)]
    assert checks.cancel("y") and not checks.busy and not bench.of(CheckFinished)
    checks.ask("x", False)
    while checks.busy:
        checks.advance()
    assert [event.name for event in bench.of(CheckFinished)] == ["x"]


def test_a_base_that_goes_ends_its_checks(tiny_gguf: Callable, adapter_folder: Callable, tmp_path: Path) -> None:
    bench = Bench(tiny_gguf())
    bench.engine.load_adapter(adapter_folder("x"), "x")
    bench.engine.checks.ask("x", True)
    bench.engine.checks.advance()
    bench.engine.load_model(LoadModel(str(tmp_path / "tiny.gguf"), device="cpu"))
    (failed,) = bench.of(CheckFailed)
    assert "the base was unloaded" in failed.message and not bench.engine.checks.busy


def test_the_loop_checks_between_steps_and_tells_of_names_that_are_not_there(tiny_gguf: Callable, adapter_folder: Callable) -> None:
    inbox, events = Inbox(), []

    def emit(event: Event) -> None:
        events.append(event)
        if isinstance(event, AdapterLoaded):
            inbox.put(CheckAdapter("nobody"))
            inbox.put(CheckAdapter("x", True))
        if isinstance(event, CheckFinished):
            inbox.put(Shutdown())

    inbox.put(LoadModel(str(tiny_gguf()), device="cpu"))
    inbox.put(LoadAdapter(str(adapter_folder("x")), "x"))
    serve(inbox, emit)
    (refused,) = [event for event in events if isinstance(event, CommandFailed)]
    assert "no adapter 'nobody' is loaded" in refused.message
    (done,) = [event for event in events if isinstance(event, CheckFinished)]
    assert done.name == "x" and len(done.report.effect) == 5
