"""Files that are no files, files that lie, files that hold code: refused in a sentence that names them, soon, without harm."""
from __future__ import annotations

import io
import json
import os
import pickle
import signal
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from fuzz import families, gguf_bytes, tiny
from fuzz.bench import AdapterBench, BaseBench, use_tokenizer, write_files
from fuzz.target import fault_of_message
from fuzz.targets import gguf_base
from fuzz.usage import peak_mb

from lora_bench.engine.adapters.errors import AdapterError
from lora_bench.engine.adapters.open import open_adapter
from lora_bench.engine.adapters.pickled import read_pickle
from lora_bench.engine.base_file import open_base
from lora_bench.engine.tokenizer import Tokenizer
from lora_bench.engine.weights.files import FormatError

MEGABYTES = 100
ADAPTER = {
    "adapter_config.json": json.dumps(tiny.adapter_config()).encode(),
    "adapter_model.safetensors": tiny.adapter_weights(Random(1), tiny.adapter_shapes()),
}


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    """What is waited for, or never ends, ends the test and not the run of the tests."""
    def ring(*_: object) -> None:
        raise TimeoutError("an input takes a minute")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def adapters(tmp_path: Path) -> AdapterBench:
    return AdapterBench(tmp_path / "bench")


def _refused(act: Callable[[], object], folder: Path) -> str:
    """The words of a refusal that takes no memory and says what it should."""
    before = peak_mb()
    with pytest.raises((FormatError, AdapterError, OSError)) as refusal:
        act()
    message = str(refusal.value)
    assert peak_mb() - before < MEGABYTES, message
    assert fault_of_message(message, folder, str(folder)) == "", message
    return message


# -- what is no file -----------------------------------------------------------------------------
def _replace(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "loop":
            path.symlink_to(path.name)
        case "device":
            path.symlink_to("/dev/zero")
        case "endless":
            with path.open("wb") as stream:
                stream.truncate(1 << 38)


KINDS = ["pipe", "folder", "loop", "device", "endless"]
BASE_FILES = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
              "generation_config.json",
              "chat_template.jinja", "model.safetensors.index.json", "tokenizer.model", "vocab.json", "merges.txt"]
INSTEAD_OF = {"model.safetensors.index.json": "model.safetensors", "tokenizer.model": "tokenizer.json", "vocab.json": "tokenizer.json",
              "merges.txt": "tokenizer.json"}
"""files that are read only where another is not"""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BASE_FILES)
def test_a_base_with_a_file_that_is_none(tmp_path: Path, name: str, kind: str) -> None:
    files = tiny.base_files(Random(1))
    files.pop(INSTEAD_OF.get(name, ""), None)
    if name in ("vocab.json", "merges.txt"):
        files |= {"vocab.json": b"{}", "merges.txt": b"", "tokenizer_config.json": b'{"tokenizer_class": "Qwen2Tokenizer"}'}
    base = write_files(tmp_path / "base", files)
    _replace(base / name, kind)
    _refused(lambda: Tokenizer(open_base(base)), base)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*ADAPTER, "adapter_model.bin", "adapters.safetensors"])
def test_an_adapter_with_a_file_that_is_none(tmp_path: Path, adapters: AdapterBench, name: str, kind: str) -> None:
    files = dict(ADAPTER)
    if name in ("adapter_model.bin", "adapters.safetensors"):
        del files["adapter_model.safetensors"]
    folder = write_files(tmp_path / "adapter", files)
    _replace(folder / name, kind)
    _refused(lambda: adapters.try_adapter(folder), folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["README.md", "tokenizer.json", "own.py"])
def test_what_need_not_be_read_is_not_waited_for(tmp_path: Path, adapters: AdapterBench, name: str, kind: str) -> None:
    folder = write_files(tmp_path / "adapter", ADAPTER)
    _replace(folder / name, kind)
    adapters.try_adapter(folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("suffix", [".gguf", ".safetensors", ".bin"])
def test_a_path_that_is_no_file(tmp_path: Path, adapters: AdapterBench, suffix: str, kind: str) -> None:
    _replace(tmp_path / f"x{suffix}", kind)
    _refused(lambda: adapters.try_adapter(tmp_path / f"x{suffix}"), tmp_path)
    _refused(lambda: open_base(tmp_path / f"x{suffix}"), tmp_path)


# -- what stays inside the folder ----------------------------------------------------------------
@pytest.mark.parametrize("shard", ["../out.safetensors", "/dev/zero", "sub/x.safetensors", "..", "", "./x.safetensors",
                                   "x\ud800.safetensors", "\x1b[2J", "x" * 70_000, "x\0y"])
def test_an_index_names_only_files_of_its_folder(tmp_path: Path, shard: str) -> None:
    files = tiny.base_files(Random(1))
    (tmp_path / "out.safetensors").write_bytes(files.pop("model.safetensors"))
    index = {"weight_map": dict.fromkeys(tiny.base_shapes(), shard)}
    base = write_files(tmp_path / "base", files | {"model.safetensors.index.json": json.dumps(index).encode()})
    assert "index.json" in _refused(lambda: open_base(base), base)


def test_links_of_a_cache_are_followed(tmp_path: Path, adapters: AdapterBench) -> None:
    """The Hugging Face cache holds the files of a snapshot as links to blobs outside of it."""
    folder = tmp_path / "snapshots" / "a"
    folder.mkdir(parents=True)
    write_files(tmp_path / "blobs", ADAPTER)
    for name in ADAPTER:
        (folder / name).symlink_to(f"../../blobs/{name}")
    adapters.try_adapter(folder)


# -- code ----------------------------------------------------------------------------------------
CODE = "import pathlib\npathlib.Path(__file__).with_name('CANARY').touch()\nclass Own: pass\n"


def test_code_in_a_base_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = {f"{name}_own.py": CODE.encode() for name in ("modeling", "configuration", "tokenization")}
    settings = tiny.TOKENIZER_CONFIG | {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}, "tokenizer_class": "Own",
                                        "trust_remote_code": True}
    base = write_files(tmp_path / "base", tiny.base_files(Random(1)) | own | {"tokenizer_config.json": json.dumps(settings).encode()})
    BaseBench().try_base(base)
    config = tiny.CONFIG | {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own", "AutoConfig": "configuration_own.Own"},
                            "trust_remote_code": True}
    (base / "config.json").write_text(json.dumps(config))
    BaseBench().try_base(base)
    (base / "config.json").write_text(json.dumps(config | {"model_type": "own"}))
    assert "auto_map" in _refused(lambda: open_base(base), base)
    assert not list(tmp_path.rglob("CANARY")) and "modeling_own" not in sys.modules


def test_code_beside_an_adapter_is_never_run(tmp_path: Path, adapters: AdapterBench) -> None:
    config = tiny.adapter_config(auto_mapping={"base_model_class": "Own", "parent_library": "own"})
    folder = write_files(tmp_path / "adapter", ADAPTER | {"own.py": CODE.encode(), "adapter_config.json": json.dumps(config).encode()})
    adapters.try_adapter(folder)
    assert not list(tmp_path.rglob("CANARY")) and "own" not in sys.modules


# -- pickles -------------------------------------------------------------------------------------
def _pickled(tmp_path: Path, content: bytes) -> Path:
    return write_files(tmp_path / "adapter", {"adapter_config.json": ADAPTER["adapter_config.json"], "adapter_model.bin": content})


def _saved(zipped: bool = True) -> bytes:
    stream = io.BytesIO()
    torch.save({name: torch.ones(shape) for name, shape in tiny.adapter_shapes().items()}, stream, _use_new_zipfile_serialization=zipped)
    return stream.getvalue()


def _packed(method: int, change: Callable[[str, bytes], bytes] = lambda name, content: content) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(_saved())) as old, zipfile.ZipFile(stream, "w", method) as new:
        for record in old.infolist():
            new.writestr(record.filename, change(record.filename, old.read(record)))
    return stream.getvalue()


@pytest.mark.parametrize("zipped", [True, False])
def test_a_plain_pickle_loads(tmp_path: Path, adapters: AdapterBench, zipped: bool) -> None:
    adapters.try_adapter(_pickled(tmp_path, _saved(zipped)))


def test_compressed_records_are_not_taken_for_numbers(tmp_path: Path, adapters: AdapterBench) -> None:
    folder = _pickled(tmp_path, _packed(zipfile.ZIP_DEFLATED))
    assert "compressed" in _refused(lambda: adapters.try_adapter(folder), folder)


def test_a_pickle_that_is_cut_short_while_it_is_in_use(tmp_path: Path) -> None:
    path = _pickled(tmp_path, _saved()) / "adapter_model.bin"
    tensors = read_pickle(path, path.stat().st_size)
    os.truncate(path, 10)
    assert all(torch.equal(tensor, torch.ones_like(tensor)) for tensor in tensors.values())


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_pickle_without_end_is_not_followed(tmp_path: Path, adapters: AdapterBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_bench.engine.adapters.pickled.MAX_PICKLE_BYTES", 10_000)
    endless = b"\x80\x02" + b"N" * 600_000 + b"."
    before = b"".join(pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001,
                                                           {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}))
    folder = _pickled(tmp_path, _packed(zipfile.ZIP_STORED, lambda name, content: endless if name.endswith("data.pkl") else content))
    assert "description" in _refused(lambda: adapters.try_adapter(folder), folder)
    (folder / "adapter_model.bin").write_bytes(before + endless)
    assert "steps" in _refused(lambda: adapters.try_adapter(folder), folder)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("content", [
    b"\x80\x02cposix\nmknod\nX\x06\x00\x00\x00CANARY\x85R.", b"cbuiltins\neval\n(S'open(\"CANARY\",\"w\")'\ntR.",
    b"\x80\x04\x8c\x02os\x8c\x05mknod\x93\x8c\x06CANARY\x85R.",
    pickle.dumps({"a": Random(1)}), b"\x80\x02\x8b\xff\xff\xff\x7f1.", b"\x80\x02X\xff\xff\xff\x7fa.",
    b"\x80\x04\x95" + b"\xff" * 8 + b".", b"\x80\x02" + b"(" * 5000 + b".",
])
@pytest.mark.parametrize("zipped", [True, False])
def test_pickles_that_call_or_lie(
    tmp_path: Path, adapters: AdapterBench, monkeypatch: pytest.MonkeyPatch, content: bytes, zipped: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    data = _packed(zipfile.ZIP_STORED, lambda name, old: content if name.endswith("data.pkl") else old) if zipped else content
    folder = _pickled(tmp_path, data)
    _refused(lambda: adapters.try_adapter(folder), folder)
    assert not os.path.lexists("CANARY")


# -- memory --------------------------------------------------------------------------------------
def test_an_adapter_beyond_the_memory(tmp_path: Path, adapters: AdapterBench) -> None:
    """Its file is as long as it says, though nothing was ever written to most of it."""
    rows = 1 << 34
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora"
    header = {f"{name}_{half}.weight": {"dtype": "F32", "shape": shape, "data_offsets": place}
              for half, shape, place in (("A", [rows, 32], [0, 128 * rows]), ("B", [32, rows], [128 * rows, 256 * rows]))}
    text = json.dumps(header).encode()
    folder = write_files(tmp_path / "adapter", ADAPTER | {"adapter_model.safetensors": struct.pack("<Q", len(text)) + text})
    os.truncate(folder / "adapter_model.safetensors", 8 + len(text) + 256 * rows)
    assert "memory" in _refused(lambda: adapters.try_adapter(folder), folder)


# -- numbers and lists that are none, or without proportion --------------------------------------
@pytest.mark.parametrize(("kind", "changes", "names"), [
    ("smollm3", {"layer_types": 7}, "layer_types"), ("llama", {"max_position_embeddings": 1}, "context"),
    ("llama", {"num_hidden_layers": 10**9}, "layers"),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "factor"),
    ("phi3", {"rope_scaling": families.LONGROPE | {"short_factor": [1e999] * 4}}, "short_factor"),
    ("llama", {"architectures": ["x" * 9] * 9999}, "architectures"),
])
def test_configs_that_lie(tmp_path: Path, kind: str, changes: dict[str, object], names: str) -> None:
    config = json.dumps(families.config(kind) | changes).encode()
    base = write_files(tmp_path / "base", tiny.base_files(Random(1)) | {"model.safetensors": families.weights(kind), "config.json": config})
    assert names in _refused(lambda: open_base(base), base)


@pytest.mark.parametrize(("changes", "names"), [
    ({"layer_replication": [[0, 2]] + [[1, 2]] * 10_000}, "layer_replication"),
    ({"layer_replication": [[0, 1 << 19]] * 10_000}, "layer_replication"),
    ({"modules_to_save": ["x" * 70_000]}, "modules_to_save"), ({"r": 10**40}, "r"), ({"x" * 70_000: True}, "xxx"),
    ({"rank_pattern": {"(a+)+$": 4, "x" * 29_999: 4}}, "rank_pattern"),
])
def test_adapter_configs_that_lie(tmp_path: Path, adapters: AdapterBench, changes: dict[str, object], names: str) -> None:
    folder = write_files(tmp_path / "adapter", ADAPTER | {"adapter_config.json": json.dumps(tiny.adapter_config(**changes)).encode()})
    assert names in _refused(lambda: adapters.try_adapter(folder), folder)


@pytest.mark.parametrize("rank", ["nan", "inf", "-inf", "1e999", "4.5", "-4", "x"])
def test_a_rank_in_metadata_that_is_none(tmp_path: Path, rank: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(tiny.adapter_weights(Random(1), tiny.adapter_shapes(), metadata={"rank": rank, "alpha": "8"}))
    assert "rank" in _refused(lambda: open_adapter(path), tmp_path)


def test_a_config_in_metadata_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(tiny.adapter_weights(Random(1), tiny.adapter_shapes(), metadata={"adapter_config": '{"r": "\ud800"}'}))
    assert "adapter_config" in _refused(lambda: open_adapter(path), tmp_path)


@pytest.mark.parametrize(("changes", "names"), [
    ({"added_tokens": [{"id": None, "content": "</s>", "special": True}]}, "added_tokens"),
    ({"added_tokens": [{"content": "<s>"}]}, "added_tokens"),
    ({"added_tokens": [{"id": 1, "content": "x" * 600, "special": True}]}, "600 characters"),
    ({"added_tokens": [{"id": 1, "content": f"{i:0400}", "special": True} for i in range(6000)]}, "added tokens hold"),
    ({"model": {"type": "Unigram", "unk_id": 0, "vocab": [[f"{i:0400}", -1.0] for i in range(12_000)]}}, "pieces hold"),
    ({"decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}] * 300}}, "decodes"),
    ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "unk_token": "<gone>"}, "pre_tokenizer": None, "decoder": None,
      "added_tokens": []}, "plain text"),
])
def test_tokenizers_that_cannot_be(tmp_path: Path, changes: dict[str, object], names: str) -> None:
    base = write_files(tmp_path / "base", tiny.base_files(Random(1)) | {"tokenizer.json": json.dumps(tiny.TOKENIZER | changes).encode()})
    assert names in _refused(lambda: use_tokenizer(Tokenizer(open_base(base))), base)


@pytest.mark.parametrize(("kind", "names"), [("gpt2", "600 characters"), ("llama", "600 characters"), ("t5", "600 characters")])
def test_a_special_token_in_metadata_without_proportion(tmp_path: Path, kind: str, names: str) -> None:
    metadata = tiny.gguf_metadata() | {"tokenizer.ggml.model": kind, "tokenizer.ggml.tokens": ["x" * 600, *tiny.TOKENS[1:]],
                                       "tokenizer.ggml.scores": [0.0] * len(tiny.TOKENS)}
    tensors = gguf_base.tensors(Random(1))
    (tmp_path / "x.gguf").write_bytes(gguf_bytes.write(metadata, tensors))
    assert names in _refused(lambda: Tokenizer(open_base(tmp_path / "x.gguf")), tmp_path)


@pytest.mark.parametrize("key", ["llama.rope.\0\x1b[2J", "llama.attention." + "x" * 60_000, "llama.rope.\u202e", "llama.attention.own"])
def test_a_key_of_metadata_that_is_no_name(tmp_path: Path, key: str) -> None:
    (tmp_path / "x.gguf").write_bytes(gguf_bytes.write(tiny.gguf_metadata() | {key: 7}, gguf_base.tensors(Random(1))))
    assert "llama." in _refused(lambda: open_base(tmp_path / "x.gguf"), tmp_path)


def test_more_tensors_and_pairs_than_any_model_has(tmp_path: Path) -> None:
    gguf, safetensors = tmp_path / "x.gguf", tmp_path / "x.safetensors"
    pairs = b"".join(struct.pack("<Q", 6) + b"%06x" % i + struct.pack("<IB", 0, 1) for i in range(100_000))
    gguf.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 100_000) + pairs)
    assert "100,000 metadata pairs, more" in _refused(lambda: open_base(gguf), tmp_path)
    gguf.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 200_000, 0) + bytes(33 * 200_000))
    assert "200,000 tensors, more" in _refused(lambda: open_base(gguf), tmp_path)
    text = json.dumps({f"{i}": 0 for i in range(200_000)}).encode()
    safetensors.write_bytes(struct.pack("<Q", len(text)) + text)
    assert "200,000 tensors, more" in _refused(lambda: open_adapter(safetensors), tmp_path)
