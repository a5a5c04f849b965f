"""The load screen: what it lists, what Enter means, how a load and its failure are shown; and the settings behind it."""
from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from textual.app import App
from textual.pilot import Pilot
from textual.widgets import Input, OptionList, Static

from lora_bench.engine.protocol import LoadModel, ModelFailed, ModelInfo, ModelLoaded, ModelLoading
from lora_bench.workbench.arguments import UsageError
from lora_bench.workbench.load_choices import load_command, memory_line, size_input
from lora_bench.workbench.model_scan import Found, find_models
from lora_bench.workbench.paths import settings_file
from lora_bench.workbench.screens.load import LoadScreen
from lora_bench.workbench.settings import MAX_RECENT, Settings, read_settings, remember

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
MODEL = ModelInfo("m", "/m", "gguf", "llama", 1, 8, 1, 1, 9, 64, 64, 100, 100, 400, {}, "cpu", "fp32", True, 1, 7, True, (2,))


class Host(App[None]):
    """Holds the screen and notes what it asks for."""

    def __init__(self, screen: LoadScreen) -> None:
        super().__init__()
        self.load_screen = screen
        self.asked: list[LoadModel | str] = []

    def on_mount(self) -> None:
        self.push_screen(self.load_screen)

    def on_load_screen_open(self, message: LoadScreen.Open) -> None:
        self.asked.append(message.load)

    def on_load_screen_cancel_load(self) -> None:
        self.asked.append("cancel")


@pytest.fixture(autouse=True)
def empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and a current folder in which only the test's models lie."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def wait_until(pilot: Pilot, true: Callable[[], bool]) -> None:
    for _ in range(400):
        if true():
            return
        await pilot.pause(0.05)
    raise AssertionError("it did not come true in 20 s")


def text(screen: LoadScreen, name: str) -> str:
    return str(screen.query_one(f"#{name}", Static).content)


async def scanned(pilot: Pilot, screen: LoadScreen) -> None:
    await pilot.pause()
    await wait_until(pilot, lambda: not [w for w in screen.workers if w.group == "scan" and not w.is_finished])
    await pilot.pause()


def models(screen: LoadScreen) -> list[str]:
    options = screen.query_one("#models", OptionList)
    return [str(options.get_option_at_index(i).prompt) for i in range(options.option_count)]


async def test_it_lists_the_default_recent_and_found_models_and_filters(empty_machine: Path) -> None:
    (empty_machine / "models" / "deep").mkdir(parents=True)
    (empty_machine / "models" / "deep" / "evil\x1b]2;x\x07.gguf").write_bytes(b"GGUF")
    snapshot = empty_machine / "hub" / "models--org--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).write_text("{}")
    remember(settings_file(), LoadModel("/gone/old.gguf"), "old [/x] model", NOW)
    screen = LoadScreen()
    async with Host(screen).run_test(size=(100, 30)) as pilot:
        await scanned(pilot, screen)
        lines = models(screen)
        assert [line.split()[0] for line in lines] == ["SmolLM2-135M-Instruct", "old", "evil␛]2;x␇.gguf", "org/tiny"]
        assert "recent" in lines[1] and "here" in lines[2] and "HF cache" in lines[3] and "\x1b" not in "".join(lines)
        await pilot.press(*"tiny")
        assert [line.split()[0] for line in models(screen)] == ["org/tiny"]
        await pilot.press("enter")
        await pilot.pause()
        assert [load.path for load in pilot.app.asked] == [str(snapshot)]


async def test_a_pasted_path_is_opened_with_the_options(empty_machine: Path) -> None:
    model = empty_machine / "my model.gguf"
    model.write_bytes(b"GGUF")
    screen = LoadScreen(LoadModel(slots=8, dtype="bf16"))
    async with Host(screen).run_test(size=(100, 30)) as pilot:
        screen.query_one("#context", Input).value = "2k"
        screen.query_one("#path", Input).value = f"'{model}'"
        await pilot.press("enter")
        await pilot.pause()
        assert pilot.app.asked == [LoadModel(str(model), "auto", "bf16", 2048, 8, 1 << 30)]


async def test_a_highlight_of_a_line_that_is_gone_by_now() -> None:
    screen = LoadScreen()
    async with Host(screen).run_test(size=(100, 30)) as pilot:
        await scanned(pilot, screen)
        screen.query_one("#models", OptionList).focus()
        for text in ("zzz", "", "Smol", "zzz"):
            screen.query_one("#path", Input).value = text
            screen.query_one("#models", OptionList).action_first()
        await pilot.pause()
        assert pilot.app.is_running and not models(screen)


async def test_the_default_model_comes_first_and_bad_options_are_said_in_place() -> None:
    screen = LoadScreen()
    async with Host(screen).run_test(size=(80, 24)) as pilot:
        screen.query_one("#slots", Input).value = "none"
        await pilot.press("enter")
        await pilot.pause()
        assert pilot.app.asked == [] and "slots: 'none' is not a number" in text(screen, "problem")
        screen.query_one("#slots", Input).value = "2"
        await pilot.press("enter")
        await pilot.pause()
        assert pilot.app.asked == [LoadModel(None, slots=2)] and text(screen, "problem") == ""
        screen.engine_event(ModelFailed("x"))
        for typed, said in (("no such model", "no model here has these words"), ("/nowhere/x.gguf", "/nowhere/x.gguf does not exist")):
            screen.query_one("#path", Input).value = typed
            await pilot.press("enter")
            await pilot.pause()
            assert said in text(screen, "problem")


async def test_progress_cancel_failure_retry_and_success() -> None:
    screen = LoadScreen(problem="bad.gguf: is no GGUF file [/x]\x1b[2J")
    async with Host(screen).run_test(size=(80, 24)) as pilot:
        assert text(screen, "problem") == "✗ bad.gguf: is no GGUF file [/x]␛[2J"
        await pilot.press("enter")
        await pilot.pause()
        screen.engine_event(ModelLoading("download", "tiny.whl", 31 << 20, 93 << 20))
        assert "33%" in text(screen, "progress") and "31.0 MiB of 93.0 MiB" in text(screen, "progress")
        assert "esc stop the load" in text(screen, "keys")
        screen.engine_event(ModelLoading("weights", "layers.0", 5, 0))
        await pilot.press("enter", "escape")
        await pilot.pause()
        assert pilot.app.asked == [LoadModel(), "cancel"]
        screen.engine_event(ModelFailed("stopped", cancelled=True))
        assert "cancelled; Enter starts it again" in text(screen, "problem") and text(screen, "progress") == ""
        await pilot.press("enter")
        await pilot.pause()
        screen.engine_event(ModelFailed("no network; connect once"))
        assert "no network" in text(screen, "problem")
        await pilot.press("enter")
        await pilot.pause()
        assert pilot.app.asked == [LoadModel(), "cancel", LoadModel(), LoadModel()]
        screen.engine_event(ModelLoaded(MODEL, 1.0))
        await pilot.pause()
        assert pilot.app.screen is not screen


async def test_what_the_header_says_of_memory_follows_the_options(sample_base: Path) -> None:
    screen = LoadScreen()
    async with Host(screen).run_test(size=(100, 30)) as pilot:
        screen.query_one("#path", Input).value = str(sample_base)
        await wait_until(pilot, lambda: "weights packed 92.1 MiB +" in text(screen, "memory"))
        screen.query_one("#dtype").value = "fp32"
        await wait_until(pilot, lambda: "weights dense 513 MiB (packed 92.1 MiB)" in text(screen, "memory"))
        assert "llama · 30 layers" in text(screen, "memory") and "fits" in text(screen, "memory")
        screen.query_one("#dtype").value = "bf16"
        await wait_until(pilot, lambda: "weights dense 257 MiB" in text(screen, "memory"))
        screen.query_one("#weights").value = "packed"
        await wait_until(pilot, lambda: "weights packed 92.0 MiB (dense 257 MiB)" in text(screen, "memory"))


async def test_a_file_that_is_no_model_is_told_before_it_is_loaded(empty_machine: Path) -> None:
    (empty_machine / "bad.gguf").write_bytes(b"not a model at all")
    screen = LoadScreen()
    async with Host(screen).run_test(size=(100, 30)) as pilot:
        screen.query_one("#path", Input).value = str(empty_machine / "bad.gguf")
        await wait_until(pilot, lambda: "bad.gguf" in text(screen, "memory"))


@pytest.mark.parametrize("size", [(200, 60), (60, 20), (30, 10), (20, 6)])
async def test_any_size_of_terminal(size: tuple[int, int]) -> None:
    screen = LoadScreen()
    async with Host(screen).run_test(size=size) as pilot:
        await pilot.pause()
        screen.engine_event(ModelLoading("weights", "x" * 300, 1, 2))
        await pilot.resize_terminal(90, 24)
        await pilot.pause()


# -- without the screen ----------------------------------------------------------------------------
def test_the_scan_is_bounded_and_follows_no_folder_links(empty_machine: Path) -> None:
    deep = empty_machine / "root" / "a" / "b" / "c" / "d"
    deep.mkdir(parents=True)
    (deep / "deep.gguf").write_bytes(b"x")
    (empty_machine / "root" / "a" / "near.gguf").write_bytes(b"x")
    (empty_machine / "root" / "empty.gguf").write_bytes(b"")
    os.mkfifo(empty_machine / "root" / "pipe.gguf")
    (empty_machine / "root" / "loop").symlink_to(empty_machine / "root")
    (empty_machine / "root" / "again.gguf").symlink_to(empty_machine / "root" / "a" / "near.gguf")
    (empty_machine / "root" / "dangling.gguf").symlink_to("nowhere")
    found = list(find_models([("x", empty_machine / "root", 2), ("y", empty_machine / "root", 2), ("z", empty_machine / "none", 2)]))
    assert [(f.name, f.place, f.bytes) for f in found] == [("near.gguf", "x", 1)]
    assert [f.name for f in find_models([("x", empty_machine / "root", 4)])] == ["deep.gguf", "near.gguf"]


def test_a_model_file_without_a_name_takes_its_folders(empty_machine: Path) -> None:
    (empty_machine / "qwen").mkdir()
    (empty_machine / "qwen" / "model.gguf").write_bytes(b"x")
    assert [f.name for f in find_models([("x", empty_machine, 2)])] == ["qwen/model.gguf"]
    assert isinstance(Found(Path("x"), "x", "y", 1).path, Path)


def test_options_and_memory_without_a_header() -> None:
    options = {"device": "cuda", "dtype": "auto", "weights": "packed", "context": "4k", "slots": "2", "host_cache": "512M"}
    assert load_command("/m", options) == LoadModel("/m", "cuda", "auto", 4096, 2, 512 << 20, "packed")
    with pytest.raises(UsageError, match="dtype packed and weights dense exclude each other; choose weights auto"):
        load_command("/m", options | {"dtype": "packed", "weights": "dense"})
    options["weights"] = "auto"
    halves = {"dense_weights_bytes": 2 << 30, "packed_weights_bytes": 1 << 29, "kv_of_a_token_bytes": 2 << 10}
    singles = {"dense_weights_bytes": 4 << 30, "packed_weights_bytes": 1 << 29, "kv_of_a_token_bytes": 4 << 10}
    plan = {"name": "m", "architecture": "llama", "layers": 2, "weight_types": {"F16": 3}, "file_bytes": 100, "trained_context": 9000,
            "parameters": 1 << 30, "memory": {"fp32": singles, "bf16": halves, "fp16": halves}, "dense_share": 0.75, "cpu_dtype": "fp32",
            "download_bytes": 0, "available_bytes": 1 << 30}
    assert "weights dense 2.0 GiB (packed 512 MiB) + a full chat of 4096 tokens 8.0 MiB" in memory_line(plan, options)
    assert "weights packed 512 MiB (dense 4.0 GiB) + a full chat of 4096 tokens 16.0 MiB" in memory_line(plan, options | {"device": "cpu"})
    assert "fits" in memory_line(plan, options | {"device": "cpu"})
    asked = options | {"device": "cpu", "dtype": "packed"}
    for taken, said in ((3 << 28, "weights packed 768 MiB + a full"), (4 << 30, "weights dense 4.0 GiB + a full")):
        plain = singles | {"packed_weights_bytes": taken}
        packed = singles | {"dense_weights_bytes": taken, "packed_weights_bytes": taken}
        assert said in memory_line(plan | {"memory": {"fp32": plain, "packed": packed}}, asked)
    assert "weights dense 4.0 GiB" in memory_line(plan | {"available_bytes": 6 << 30}, options | {"device": "cpu"})
    assert "DOES NOT FIT" in memory_line(plan, options | {"device": "cpu", "weights": "dense"})
    assert "context: 'x' is not a size" in memory_line(plan, options | {"context": "x"})
    fetch = {"name": "d", "download_bytes": 93 << 20, "available_bytes": 1}
    assert "downloaded once: 93.0 MiB" in memory_line(fetch, options)
    assert [size_input(n) for n in (1 << 30, 512 << 20, 3 << 10, 1000, 0)] == ["1G", "512M", "3k", "1000", "0"]


def test_recent_models_are_kept_newest_first_with_a_persons_comments(tmp_path: Path) -> None:
    file = tmp_path / "config" / "settings.toml"
    assert read_settings(file) == (Settings(), "")
    for number in range(MAX_RECENT + 3):
        assert remember(file, LoadModel(f"/m/{number}"), f"m{number}", NOW) == ""
    file.write_text("# mine\n" + file.read_text())
    remember(file, LoadModel(), "default", NOW)
    remember(file, LoadModel("/m/10"), "m10", NOW)
    recent = read_settings(file)[0].recent
    assert [r.path for r in recent[:3]] == ["/m/10", "", "/m/14"] and len(recent) == MAX_RECENT
    assert file.read_text().startswith("# mine\n") and sorted(os.listdir(file.parent)) == ["settings.toml"]


@pytest.mark.parametrize("damage", [b"[[recent]]\npath = 3\n", b"= = =", b"\xff\xfe\x00", b"[[recent]]\npath='a'\nname='b'\n",
                                    b"recent = 1", b"x" * (2 << 20)])
def test_a_damaged_settings_file_is_put_aside_and_said(tmp_path: Path, damage: bytes) -> None:
    file = tmp_path / "settings.toml"
    file.write_bytes(damage)
    settings, note = read_settings(file)
    assert settings == Settings() and "is damaged" in note and "settings.toml.damaged" in note
    assert (tmp_path / "settings.toml.damaged").read_bytes() == damage and not file.exists()
    assert remember(file, LoadModel("/m"), "m", NOW) == "" and len(read_settings(file)[0].recent) == 1


def test_settings_that_cannot_be_written_are_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be written" in remember(tmp_path / "file" / "settings.toml", LoadModel("/m"), "m", NOW)
    os.mkfifo(tmp_path / "settings.toml")
    assert "not a plain file" in read_settings(tmp_path / "settings.toml")[1]


async def test_a_damaged_settings_file_is_said_on_the_screen() -> None:
    settings_file().parent.mkdir(parents=True)
    settings_file().write_text("= broken")
    screen = LoadScreen()
    async with Host(screen).run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        assert "is damaged" in text(screen, "problem")
