"""The GGUF header reader: what the gguf package writes is read back; what contradicts itself is refused, quickly and by name."""
from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from lora_bench.engine.weights.files import FormatError, open_regular, read_json_object, show
from lora_bench.engine.weights.gguf import read_header


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def place(name: str = "t", dims: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0, n_dims: int | None = None) -> bytes:
    return (text(name) + struct.pack("<I", len(dims) if n_dims is None else n_dims) + struct.pack(f"<{len(dims)}Q", *dims)
            + struct.pack("<IQ", kind, offset))


def build(pairs: tuple[bytes, ...] = (), places: tuple[bytes, ...] = (), data: int = 64, version: int = 3, n_pairs: int | None = None,
          n_tensors: int | None = None, magic: bytes = b"GGUF") -> bytes:
    head = magic + struct.pack("<IQQ", version, len(places) if n_tensors is None else n_tensors, len(pairs) if n_pairs is None else n_pairs)
    body = head + b"".join(pairs) + b"".join(places)
    return body + bytes(-len(body) % 32 + data)


@pytest.fixture
def read(tmp_path: Path) -> Callable[[bytes], object]:
    def run(data: bytes) -> object:
        path = tmp_path / "x.gguf"
        path.write_bytes(data)
        return read_header(path)

    return run


@pytest.mark.parametrize("alignment", [32, 64, 256])
def test_reads_what_gguf_writes(tmp_path: Path, alignment: int, seed: int) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    writer.add_uint32("n", 7)
    writer.add_int64("negative", -(1 << 40))
    writer.add_float64("f", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("words", "naïve ▁ 😀")
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("texts", ["a", "", "ü"])
    arrays = {"a": np.random.rand(3, 5).astype(np.float32), "b": np.random.rand(7).astype(np.float16)}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(path)
    m = header.metadata
    assert (m["n"], m["negative"], m["f"], m["yes"], m["words"]) == (7, -(1 << 40), 0.1, True, "naïve ▁ 😀")
    assert list(m["numbers"]) == [1, -2, 3] and m["texts"] == ["a", "", "ü"] and header.version == 3
    data = path.read_bytes()
    for name, array in arrays.items():
        entry = header.tensors[name]
        assert entry.shape == array.shape and entry.type == {"float32": "F32", "float16": "F16"}[array.dtype.name]
        assert data[entry.offset:entry.offset + entry.nbytes] == array.tobytes()


def test_version_2_is_read_alike(read: Callable) -> None:
    good = dict(pairs=(pair("k", 4, struct.pack("<I", 5)),), places=(place(),))
    assert read(build(version=2, **good)).tensors == read(build(version=3, **good)).tensors


HOSTILE = {
    "empty": (b"", "magic"),
    "magic only": (b"GGUF", "header.*truncated|truncated.*header"),
    "html": (b"<!DOCTYPE html><html></html>", "not a GGUF file .magic '<!DO'"),
    "old format": (b"tjgg" + bytes(40), "old GGML"),
    "version 1": (build(version=1), "version 1"),
    "version 4": (build(version=4), "version 4"),
    "version 1, big endian": (b"GGUF" + struct.pack(">IQQ", 1, 0, 0) + bytes(64), "version 1"),
    "version 0": (build(version=0), "version 0"),
    "pairs 2^63": (build(n_pairs=1 << 63), "states 9,223,372,036,854,775,808 metadata pairs"),
    "tensors 2^62": (build(n_tensors=1 << 62), "4,611,686,018,427,387,904 tensors"),
    "array 2^62": (build((pair("k", 9, struct.pack("<IQ", 4, 1 << 62)),)), "metadata 'k'"),
    "string array 2^62": (build((pair("k", 9, struct.pack("<IQ", 8, 1 << 62)),)), "strings in the array of metadata 'k'"),
    "string 2^62": (build((pair("k", 8, struct.pack("<Q", 1 << 62)),)), "metadata 'k' states a length"),
    "key 2^40": (build((struct.pack("<Q", 1 << 40),)), "key states a length"),
    "value type": (build((pair("k", 99, b""),)), "'k' has the unknown value type 99"),
    "item type": (build((pair("k", 9, struct.pack("<IQ", 77, 1) + bytes(8)),)), "unknown value type 77"),
    "nested array": (build((pair("k", 9, struct.pack("<IQIQ", 9, 1, 9, 1)),)), "array of arrays"),
    "key twice": (build((pair("k", 7, b"\1"), pair("k", 7, b"\1"))), "'k' occurs twice"),
    "tensor twice": (build(places=(place(), place(offset=32))), "'t' occurs twice"),
    "no dimensions": (build(places=(place(dims=()),)), "states 0 dimensions"),
    "dimensions 10^6": (build(places=(place(n_dims=1_000_000),)), "states 1,000,000 dimensions"),
    "dimension 0": (build(places=(place(dims=(4, 0)),)), r"shape \[0, 4\]"),
    "overflow": (build(places=(place(dims=(1 << 32, 1 << 32)),)), "no tensor can have"),
    "type": (build(places=(place(kind=250),)), "unknown type 250"),
    "given up": (build(places=(place(kind=31),)), "type Q4_0_4_4, which ggml gave up"),
    "torn rows": (build(places=(place(dims=(33,), kind=8),)), "rows of 33 elements"),
    "beyond the end": (build(places=(place(dims=(1000,)),)), "'t' ends at byte .* beyond the end"),
    "offset beyond": (build(places=(place(offset=1 << 40),)), "beyond the end"),
    "odd offset": (build(places=(place(offset=4),)), "offset 4, not a multiple"),
    "overlap": (build(places=(place(dims=(16,)), place("u", dims=(8,), offset=32))), "'t' and 'u' overlap"),
    "alignment 3": (build((pair("general.alignment", 4, struct.pack("<I", 3)),)), "general.alignment is 3"),
    "alignment 0": (build((pair("general.alignment", 4, struct.pack("<I", 0)),)), "general.alignment is 0"),
    "alignment text": (build((pair("general.alignment", 8, text("32")),)), "general.alignment is '32'"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_refuses_by_name(case: str, read: Callable) -> None:
    data, words = HOSTILE[case]
    with pytest.raises(FormatError, match=words) as refused:
        read(data)
    assert "x.gguf" in str(refused.value) and str(refused.value).isprintable()


def test_names_from_a_file_never_reach_a_terminal_raw(read: Callable) -> None:
    with pytest.raises(FormatError) as refused:
        read(build(places=(place("\x1b]0;owned\x07\u202e", kind=250),)))
    assert str(refused.value).isprintable() and "\\x1b]0;owned" in str(refused.value)


def test_any_broken_file_gives_a_sentence(tmp_path: Path, tiny_gguf: Callable, seed: int) -> None:
    """Bytes flipped, numbers blown up, ends cut: the header is read or refused; nothing else happens."""
    good = tiny_gguf().read_bytes()
    chance = random.Random(seed)
    path = tmp_path / "broken.gguf"
    header_end = 4000
    for _ in range(300):
        data = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(header_end)
            data[at:at + 8] = chance.choice([b"\xff" * 8, bytes(8), struct.pack("<Q", 1 << chance.randrange(64)), chance.randbytes(1)])
        if chance.random() < 0.3:
            del data[chance.randrange(len(data)):]
        path.write_bytes(data)
        try:
            read_header(path)
        except FormatError as error:
            assert str(path) in str(error)


def test_the_header_has_a_limit(monkeypatch: pytest.MonkeyPatch, read: Callable) -> None:
    monkeypatch.setattr("lora_bench.engine.weights.gguf.MAX_HEADER_BYTES", 4096)
    with pytest.raises(FormatError, match="takes the header past 4,096 bytes"):
        read(build((pair("k", 9, struct.pack("<IQ", 0, 5000) + bytes(5000)),)))


def test_special_files_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for path, words in ((tmp_path / "pipe.gguf", "pipe or device"), (Path("/dev/zero"), "pipe or device"), (tmp_path, "is a folder")):
        with pytest.raises(FormatError, match=words):
            open_regular(path)





@pytest.mark.parametrize("data, words", [
    (b"[1]", "holds a JSON list"), (b"{", "not valid JSON"), (b"\xff{}", "not valid JSON"), (b"[" * 200_000, "nested too deeply|not valid"),
    (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"), (b'{"a": ' + b"9" * 10_000 + b"}", "not valid JSON"),
])
def test_json_that_is_none(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "c.json").write_bytes(data)
    with pytest.raises(FormatError, match=words):
        read_json_object(tmp_path / "c.json")


def test_json_is_refused_by_size_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("{" + " " * 100 + "}")
    with pytest.raises(FormatError, match="102 bytes, more than the 10"):
        read_json_object(tmp_path / "c.json", limit=10)


def test_show_quotes_cuts_and_escapes() -> None:
    assert show("a") == "'a'" and show(4) == "4" and show(None) == "None"
    assert show("x" * 100) == "'" + "x" * 80 + "'…"
    assert show("a\x1b\u202e").isprintable()
