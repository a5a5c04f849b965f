"""The safetensors header reader: files of the safetensors package, shards, and files that lie."""
from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lora_bench.engine.weights.files import FormatError
from lora_bench.engine.weights.safetensors import INDEX, SINGLE, read_folder, read_header


def build(header: object, data: int = 16, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + bytes(data)


def spec(dtype: object = "F32", shape: object = (4,), place: object = (0, 16)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": place}


def test_reads_what_safetensors_writes(tmp_path: Path, seed: int) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(2).half(), "c": torch.randn(4).bfloat16(), "none": torch.zeros(0, 3)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "x.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes()
    assert header.metadata == {"format": "pt"} and header.file_bytes == len(data)
    for name, tensor in tensors.items():
        entry = header.tensors[name]
        assert entry.shape == tuple(tensor.shape) and entry.type == {4: "F32", 2: entry.type}[tensor.element_size()]
        assert data[entry.offset:entry.offset + entry.nbytes] == tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else True


LIES = {
    "empty": (b"", "holds 0 bytes and no safetensors header"),
    "short": (b"\1\2\3", "holds 3 bytes"),
    "header length 2^63": (build({}, length=1 << 63), "header of 9,223,372,036,854,775,808 bytes"),
    "header length past the end": (build({}, length=100), "header of 100 bytes in a file of 26"),
    "no JSON": (build(b"hello!"), "not valid JSON"),
    "list": (build([1]), "holds a JSON list"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "Git LFS pointer"),
    "gguf": (b"GGUF" + bytes(30), "is a GGUF file"),
    "dtype": (build({"t": spec("F4")}), "'t' has the unknown dtype 'F4'"),
    "block dtype": (build({"t": spec("Q4_0")}), "unknown dtype"),
    "dtype list": (build({"t": spec(["F32"])}), "unknown dtype"),
    "shape lies": (build({"t": spec(shape=(5,))}), "takes 20 bytes, its data_offsets give 16"),
    "negative": (build({"t": spec(shape=(-4,))}), "no valid shape"),
    "float shape": (build({"t": spec(shape=(4.0,))}), "no valid shape"),
    "huge shape": (build({"t": spec(shape=(1 << 62, 1 << 62))}), "takes .* bytes"),
    "offsets": (build({"t": spec(place=(16, 0))}), "truncated"),
    "three offsets": (build({"t": spec(place=(0, 8, 16))}), "no valid shape and data_offsets"),
    "past the end": (build({"t": spec(shape=(8,), place=(0, 32))}), "truncated: tensor 't' ends"),
    "no object": (build({"t": 5}), "'t' has no description"),
    "overlap": (build({"t": spec(), "u": spec(shape=(2,), place=(8, 16))}), "'t' and 'u' overlap"),
    "nested": (build(b'{"a":' * 100_000), "nested too deeply|not valid JSON"),
}


@pytest.mark.parametrize("case", LIES)
def test_refuses_by_name(case: str, tmp_path: Path) -> None:
    data, words = LIES[case]
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(FormatError, match=words) as refused:
        read_header(tmp_path / "x.safetensors")
    assert "x.safetensors" in str(refused.value) and str(refused.value).isprintable()


def test_any_broken_file_gives_a_sentence(tmp_path: Path, seed: int) -> None:
    good = build({"a": spec(), "b": spec("F16", (2, 2), (16, 24)), "__metadata__": {"k": "v"}}, data=24)
    chance = random.Random(seed)
    path = tmp_path / "x.safetensors"
    for _ in range(500):
        data = bytearray(good)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(data))
            data[at:at + 1] = chance.choice([b"", b"9", b"\xff", b"\0", b"[[", chance.randbytes(1)])
        path.write_bytes(data[:chance.choice([len(data), chance.randrange(len(data) + 1)])])
        try:
            read_header(path)
        except FormatError as error:
            assert str(path) in str(error)


@pytest.fixture
def shards(tmp_path: Path) -> Callable[..., Path]:
    """A folder of two shards of one tensor each; `index` replaces entries of the weight map."""

    def write(index: dict[str, object] | None = None) -> Path:
        save_file({"a": torch.ones(2)}, tmp_path / "m-00001-of-00002.safetensors")
        save_file({"b": torch.ones(3)}, tmp_path / "m-00002-of-00002.safetensors")
        weight_map = {"a": "m-00001-of-00002.safetensors", "b": "m-00002-of-00002.safetensors"} | (index or {})
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        return tmp_path

    return write


def test_shards_are_one_header(shards: Callable[..., Path]) -> None:
    folder = shards()
    header = read_folder(folder)
    assert {name: entry.file.name[:7] for name, entry in header.tensors.items()} == {"a": "m-00001", "b": "m-00002"}
    assert header.file_bytes == sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def test_a_hugging_face_cache_is_links_into_its_blobs(shards: Callable[..., Path], tmp_path: Path) -> None:
    folder = shards()
    snapshot, blobs = tmp_path / "models--org--m" / "snapshots" / "abc", tmp_path / "models--org--m" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(path for path in folder.iterdir() if path.is_file())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    assert set(read_folder(snapshot).tensors) == {"a", "b"}
    shard = snapshot / "m-00002-of-00002.safetensors"
    target = shard.resolve()
    target.rename(blobs / "unfinished.incomplete")
    with pytest.raises(FormatError, match="m-00002-of-00002.safetensors: links to a file that is not there"):
        read_folder(snapshot)
    os.mkfifo(target)
    with pytest.raises(FormatError, match="m-00002-of-00002.safetensors: is a pipe or device"):
        read_folder(snapshot)
    (snapshot / INDEX).resolve().unlink()
    with pytest.raises(FormatError, match="index.json: links to a file that is not there"):
        read_folder(snapshot)


def test_a_missing_shard_is_named(shards: Callable[..., Path]) -> None:
    folder = shards()
    (folder / "m-00002-of-00002.safetensors").unlink()
    with pytest.raises(FormatError, match="m-00002-of-00002.safetensors: shard is missing"):
        read_folder(folder)


@pytest.mark.parametrize("index, words", [
    ({"a": "../evil.safetensors"}, "not a file name inside"), ({"a": "/etc/passwd"}, "not a file name inside"),
    ({"a": ".."}, "not a file name"),
    ({"c": "m-00001-of-00002.safetensors"}, "does not hold tensor 'c'"),
    ({"a": "m-00002-of-00002.safetensors"}, "does not hold tensor 'a'"),
    ({"a": 5}, "no weight_map"),
])
def test_an_index_that_lies(index: dict[str, object], words: str, shards: Callable[..., Path]) -> None:
    folder = shards(index)
    with pytest.raises(FormatError, match=words):
        read_folder(folder)


def test_a_tensor_in_two_shards(shards: Callable[..., Path]) -> None:
    folder = shards()
    save_file({"b": torch.ones(3), "a": torch.ones(2)}, folder / "m-00002-of-00002.safetensors")
    with pytest.raises(FormatError, match="'a' is also in m-00001"):
        read_folder(folder)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=f"neither {SINGLE} nor"):
        read_folder(tmp_path)
