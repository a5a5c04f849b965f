"""An adapter's content swapped under its name: who keeps the old one, who gets the new one, and what a bad file changes: nothing."""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from engine_bench import PROMPT, Bench

from lora_bench.engine.adapter_read import differences
from lora_bench.engine.adapters.errors import AdapterError
from lora_bench.engine.protocol import (
    AdapterChanged,
    AdapterFileChanged,
    AdapterInfo,
    AdapterReloaded,
    AdapterUnloaded,
    AdapterUse,
    CheckpointAppeared,
    Mix,
    RequestStarted,
    SlotEvicted,
    SlotLoaded,
)
from lora_bench.engine.watch import FileWatch, Look, look, stamp_of

Write = Callable[..., Path]
MIX = (AdapterUse("one"),)


pytestmark = pytest.mark.usefixtures("endless")


class _Bench(Bench):
    """Its replies are drawn, so that any other content shows."""

    def submit(self, number: int, prompt: object = PROMPT, mix: Mix = (), **sampling: object) -> None:
        super().submit(number, prompt, mix, **{"temperature": 1.0} | sampling)


@pytest.fixture
def bench(tiny_gguf: Write, adapter_folder: Write) -> Bench:
    bench = _Bench(tiny_gguf(), slots=2)
    bench.engine.load_adapter(str(_written(adapter_folder, "one")), "one")
    bench.events.clear()
    return bench


def _written(adapter_folder: Write, name: str, r: int = 3, **config: object) -> Path:
    """Fresh random weights every time, strong enough to change greedy replies."""
    return adapter_folder(name, ("q_proj", "o_proj", "down_proj"), r=r, lora_alpha=4 * r, **config)


def _replies(bench: Bench) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the base and of adapter one, alone."""
    return bench.reply(), bench.reply(MIX)


def _alone(bench: Bench, folder: Path) -> tuple[int, ...]:
    """What the content at `folder` replies in an engine that never held another."""
    fresh = _Bench(bench.engine.model.base.path)
    fresh.engine.load_adapter(str(folder), "one")
    return fresh.reply(MIX)


def test_running_requests_finish_on_the_old_content_and_new_ones_take_the_new(bench: Bench, adapter_folder: Write) -> None:
    base, old = _replies(bench)
    bench.submit(1, mix=MIX)
    bench.run(steps=5)
    new = _alone(bench, _written(adapter_folder, "one", r=5))
    assert len({base, old, new}) == 3
    digest = bench.engine.model.store.infos["one"].digest
    bench.engine.reload_adapter("one")
    (event,) = bench.of(AdapterReloaded)
    kept = f"one@{digest[:8]}"
    assert (event.old_digest, event.kept_for, event.kept_as) == (digest, (1,), kept)
    assert "rank 3 → 5" in event.changes and event.adapter.ranks == (5,)
    bench.submit(2, mix=MIX)
    bench.submit(3)
    bench.run(steps=2)
    assert [view.adapter for view in bench.engine.model.store.slot_views()] == [kept, "one"]
    assert max(event.adapters for event in bench.events if hasattr(event, "adapters")) == 2, "both contents acted in one step"
    assert set(bench.engine.model.store.infos) == {"one"}
    bench.run()
    assert (bench.ids(1), bench.ids(2), bench.ids(3)) == (old, new, base)
    assert bench.of(AdapterUnloaded)[-1].name == kept
    assert [view.adapter for view in bench.engine.model.store.slot_views()] == ["", "one"]


def test_a_waiting_request_and_the_standing_mix_get_the_new_content(tiny_gguf: Write, adapter_folder: Write) -> None:
    bench = _Bench(tiny_gguf(), slots=1)
    for name in ("one", "two"):
        bench.engine.load_adapter(str(_written(adapter_folder, name)), name)
    bench.engine.set_mix(MIX)
    bench.submit(1, mix=(AdapterUse("two"),))
    bench.run(steps=3)
    bench.submit(2, mix=MIX)
    new = _alone(bench, _written(adapter_folder, "one"))
    bench.engine.reload_adapter("one")
    bench.run()
    assert bench.ids(2) == new
    bench.engine.set_mix(MIX)
    again = _alone(bench, _written(adapter_folder, "one"))
    bench.events.clear()
    bench.engine.reload_adapter("one")
    assert bench.of(SlotEvicted)[0].adapter == "one" and bench.of(SlotLoaded)[0].because == "its file was read again"
    assert bench.reply(MIX) == again


def test_an_invocation_that_the_new_content_has_is_looked_for_in_waiting_requests(tiny_gguf: Write, adapter_folder: Write) -> None:
    bench = _Bench(tiny_gguf(), slots=1)
    bench.engine.load_adapter(str(_written(adapter_folder, "one")), "one")
    bench.engine.load_adapter(str(_written(adapter_folder, "two")), "two")
    bench.submit(1, mix=(AdapterUse("two"),))
    bench.run(steps=3)
    bench.submit(2, mix=MIX)
    _written(adapter_folder, "one", alora_invocation_tokens=[8, 9])
    bench.engine.reload_adapter("one")
    bench.run()
    (activation,) = next(event for event in bench.of(RequestStarted) if event.request_id == 2).activations
    assert activation.start == PROMPT.ids.index(8) and bench.of(AdapterReloaded)[0].changes[0].startswith("invocation none →")


def test_rescaling_a_running_reply_stays_on_what_it_began_with(bench: Bench, adapter_folder: Write) -> None:
    def rescaled(reload: bool) -> tuple[int, ...]:
        number = 1 + reload
        bench.submit(number, mix=MIX)
        bench.run(steps=4)
        if reload:
            _written(adapter_folder, "one")
            bench.engine.reload_adapter("one")
        bench.engine.set_mix((AdapterUse("one", 0.25),), (number,))
        bench.run()
        bench.engine.set_mix(())
        return bench.ids(number)

    assert rescaled(reload=False) == rescaled(reload=True)


def test_two_reloads_under_one_reply_keep_three_contents_apart(tiny_gguf: Write, adapter_folder: Write) -> None:
    bench = _Bench(tiny_gguf(), slots=3)
    replies = []
    for number in (1, 2, 3):
        folder = _written(adapter_folder, "one")
        replies.append(_alone(bench, folder))
        bench.engine.load_adapter(str(folder), "one") if number == 1 else bench.engine.reload_adapter("one")
        bench.submit(number, mix=MIX)
        bench.run(steps=3)
    assert len(bench.engine.model.scheduler.running) == 3
    bench.run()
    assert [bench.ids(number) for number in (1, 2, 3)] == replies
    assert [view.info.name for view in bench.engine.model.store.adapter_views()] == ["one"]


def test_a_reply_that_waits_for_the_slot_of_old_content_says_so(tiny_gguf: Write, adapter_folder: Write) -> None:
    bench = _Bench(tiny_gguf(), slots=1)
    bench.engine.load_adapter(str(_written(adapter_folder, "one")), "one")
    bench.engine.set_mix(MIX)
    old = bench.reply(MIX)
    bench.submit(1, mix=MIX)
    bench.run(steps=3)
    new = _alone(bench, _written(adapter_folder, "one"))
    bench.engine.reload_adapter("one")
    bench.submit(2, mix=MIX)
    bench.run()
    assert (bench.ids(1), bench.ids(2)) == (old, new)


@pytest.mark.parametrize("fault", ["no file", "no number", "another rank", "too large", "cut"])
def test_a_bad_file_leaves_what_is_loaded(bench: Bench, adapter_folder: Write, fault: str) -> None:
    old = bench.reply(MIX)
    bench.engine.set_mix(MIX)
    bench.submit(1, mix=MIX)
    bench.run(steps=3)
    before = bench.engine.snapshot()
    folder = Path(before.adapters[0].info.path)
    weights = folder / "adapter_model.safetensors"
    match fault:
        case "no file":
            weights.unlink()
        case "no number":
            path = "base_model.model.model.layers.0.self_attn.q_proj"
            adapter_folder("one",
                           tensors={f"{path}.lora_A.weight": torch.full((4, 24), torch.nan), f"{path}.lora_B.weight": torch.ones(36, 4)})
        case "another rank":
            config = json.loads((folder / "adapter_config.json").read_text())
            (folder / "adapter_config.json").write_text(json.dumps(config | {"r": 7}))
        case "too large":
            path = "base_model.model.model.layers.0.self_attn.q_proj"
            adapter_folder("one", tensors={f"{path}.lora_A.weight": torch.ones(4, 24), f"{path}.lora_B.weight": torch.full((36, 4), 3e38)})
        case "cut":
            weights.write_bytes(weights.read_bytes()[:-40])
    bench.events.clear()
    with pytest.raises((ValueError, OSError)) as caught:
        bench.engine.reload_adapter("one")
    assert "one" in str(caught.value) and bench.events == []
    after = bench.engine.snapshot()
    assert (after.adapters, after.host, after.mix) == (before.adapters, before.host, before.mix)
    bench.run()
    assert bench.ids(1) == old and bench.reply(MIX) == old


def test_the_same_content_is_said_and_changes_nothing(bench: Bench) -> None:
    bench.submit(1, mix=MIX)
    bench.run(steps=3)
    info = bench.engine.model.store.infos["one"]
    (Path(info.path) / "adapter_model.safetensors").touch()
    bench.engine.reload_adapter("one")
    (event,) = bench.of(AdapterReloaded)
    assert (event.adapter, event.old_digest, event.changes, event.kept_for) == (info, info.digest, (), ())
    assert not bench.of(AdapterUnloaded) and len(bench.of(SlotLoaded)) == 1


def test_pin_and_an_invocation_that_was_set_stay_and_other_names_of_the_file_are_told(bench: Bench, adapter_folder: Write) -> None:
    store = bench.engine.model.store
    bench.engine.load_adapter(store.infos["one"].path, "other")
    bench.engine.pin_adapter("one", True)
    bench.engine.set_invocation("one", "abc")
    tokens = bench.of(AdapterChanged)[0].adapter.invocation_tokens
    old = store.infos["other"].digest
    _written(adapter_folder, "one", alora_invocation_tokens=[9])
    bench.engine.reload_adapter("one")
    assert bench.of(AdapterReloaded)[0].others == ("other",) and store.infos["other"].digest == old
    assert (store.infos["one"].invocation, store.infos["one"].invocation_tokens) == ("abc", tokens)
    assert store.adapter_views()[0].pinned
    with pytest.raises(AdapterError, match="the name 'other' is taken by what this path held before; reload it"):
        bench.engine.load_adapter(store.infos["one"].path, "other")


def test_what_is_unknown_or_leaving_is_not_reloaded(bench: Bench) -> None:
    with pytest.raises(AdapterError, match="no adapter 'two' is loaded"):
        bench.engine.reload_adapter("two")
    bench.submit(1, mix=MIX)
    bench.run(steps=2)
    bench.engine.unload_adapter("one")
    with pytest.raises(AdapterError, match="is being unloaded"):
        bench.engine.reload_adapter("one")


def test_old_content_cannot_be_named(bench: Bench, adapter_folder: Write) -> None:
    bench.submit(1, mix=MIX)
    bench.run(steps=2)
    _written(adapter_folder, "one")
    bench.engine.reload_adapter("one")
    kept = bench.of(AdapterReloaded)[0].kept_as
    for call in (lambda: bench.engine.unload_adapter(kept), lambda: bench.engine.pin_adapter(kept, True),
                 lambda: bench.engine.set_mix((AdapterUse(kept),)), lambda: bench.submit(2, mix=(AdapterUse(kept),))):
        with pytest.raises(ValueError, match="no adapter"):
            call()
    bench.engine.abort(1)
    assert bench.of(AdapterUnloaded)[-1].name == kept


# -- files ---------------------------------------------------------------------------------------
def _look(bench: Bench, watch: FileWatch) -> None:
    bench.engine.files_seen(look(bench.engine.watched(), watch._families))


def test_a_file_that_changes_goes_or_comes_back_is_told_once(bench: Bench, adapter_folder: Write, tmp_path: Path) -> None:
    watch, old = FileWatch(), bench.reply(MIX)
    folder = Path(bench.engine.model.store.infos["one"].path)

    def told() -> list[str]:
        bench.events.clear()
        _look(bench, watch)
        _look(bench, watch)
        return [event.what for event in bench.of(AdapterFileChanged)]

    assert told() == []
    folder.rename(tmp_path / "elsewhere")
    assert told() == ["deleted"] and bench.engine.snapshot().adapters[0].file == "deleted"
    (tmp_path / "elsewhere").rename(folder)
    assert told() == ["back"] and bench.engine.snapshot().adapters[0].file == ""
    _written(adapter_folder, "one")
    assert told() == ["changed"] and bench.engine.snapshot().adapters[0].file == "changed"
    assert bench.reply(MIX) == old, "what is loaded is not touched"
    bench.engine.reload_adapter("one")
    assert told() == [] and bench.engine.snapshot().adapters[0].file == ""
    (folder / "adapter_config.json").unlink()
    assert told() == ["deleted"]


def test_a_look_at_what_was_reloaded_meanwhile_says_nothing(bench: Bench, adapter_folder: Write) -> None:
    watched = bench.engine.watched()
    _written(adapter_folder, "one")
    found = look(watched, FileWatch()._families)
    assert found.states[0][1] == "changed"
    bench.engine.reload_adapter("one")
    bench.events.clear()
    bench.engine.files_seen(Look(found.states, ()))
    assert bench.events == []


def test_a_file_that_changes_under_the_reading_is_refused(bench: Bench, adapter_folder: Write) -> None:
    folder = Path(bench.engine.model.store.infos["one"].path)
    with pytest.raises(AdapterError, match="changed while it was read"):
        bench.engine.model.store.read(folder, "x", lambda done, total: (folder / "adapter_config.json").touch())


def test_a_checkpoint_that_appears_is_told_when_it_is_complete(bench: Bench, adapter_folder: Write) -> None:
    watch = FileWatch()
    bench.engine.load_adapter(str(_written(adapter_folder, "run/checkpoint-100")))
    _look(bench, watch)
    folder = _written(adapter_folder, "run/checkpoint-200")
    weights = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").unlink()
    _look(bench, watch)
    _look(bench, watch)
    (folder / "adapter_model.safetensors").write_bytes(weights[:50])
    _look(bench, watch)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    _look(bench, watch)
    assert not bench.of(CheckpointAppeared)
    _look(bench, watch)
    _look(bench, watch)
    assert bench.of(CheckpointAppeared) == [CheckpointAppeared("run-checkpoint-100", str(folder))]
    assert set(bench.engine.model.store.infos) == {"one", "run-checkpoint-100"}


def test_a_run_s_folder_stays_the_checkpoint_that_was_newest_until_it_is_reloaded(tiny_gguf: Write, adapter_folder: Write) -> None:
    first = _written(adapter_folder, "run/checkpoint-100")
    bench = _Bench(tiny_gguf(), slots=1, host_cache_bytes=6000)  # the host tier holds one of them
    info = bench.engine.load_adapter(str(first.parent), "run")
    old = bench.reply((AdapterUse("run"),))
    new = _alone(bench, _written(adapter_folder, "run/checkpoint-200"))
    bench.engine.load_adapter(str(_written(adapter_folder, "two")), "two")
    bench.reply((AdapterUse("two"),))
    assert bench.engine.snapshot().adapters[0].tier == "disk" and info.bytes <= 6000 < 2 * info.bytes
    assert bench.reply((AdapterUse("run"),)) == old, "read again from where it was read"
    bench.engine.reload_adapter("run")
    assert bench.reply((AdapterUse("run"),)) == new
    assert any("checkpoint-200 is opened" in note for note in bench.engine.model.store.infos["run"].notes)


def test_a_link_that_points_elsewhere_is_another_file(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text("same")
    (tmp_path / "link").symlink_to("a")
    before = stamp_of([tmp_path / "link"])
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("b")
    assert stamp_of([tmp_path / "link"]) != before and stamp_of([tmp_path / "none"]) == (None,)


def test_what_a_reload_changed_beside_numbers_is_said() -> None:
    plain = AdapterInfo(name="a", path="", format="", digest="1", ranks=(8,), effective_scales=(2.0,), matched=4, total=4, targets={},
                        bytes=1, rslora=False, dtype="float32", base_model="")
    other = msgspec.structs.replace(plain, digest="2", dora=True, added_rows=2, replaced=("embed_tokens.weight",))
    assert differences(plain, other) == ("DoRA no → yes", "tokens added 0 → 2", "whole tensors 0 → 1")
    assert differences(plain, msgspec.structs.replace(plain, digest="2")) == ("the weights",) and differences(plain, plain) == ()
