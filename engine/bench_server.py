"""A llama-server on the base and the adapters of a loaded model, for comparison only; it listens on this machine alone."""
from __future__ import annotations

import http.client
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .bench_errors import MissingPackages, NotMeasured
from .models.names import gguf_name, permuted_heads
from .protocol import Mix

if TYPE_CHECKING:
    from .adapters.adapter import Adapter
    from .loaded import LoadedModel
    from .models.facts import ModelFacts

START_S, ANSWER_S = 120, 600
"""how long the server may take to load, and to answer"""


class LlamaServer:
    """One llama-server on the CPU, with as many threads as the engine; a context manager that ends it.

    Raises ValueError for a base that is no GGUF file, an adapter that llama.cpp cannot have and a program that does not start, and
    MissingPackages.
    """

    version: str
    """what it tells of its build"""

    def __init__(
        self, program: str, model: LoadedModel, names: Sequence[str], folder: Path, context: int, threads: int, slots: int = 1,
    ) -> None:
        """`names`: the adapters, in the order of their numbers there; their files are written into `folder`. `context`: tokens that each of
        its `slots` holds, which have a request at a time."""
        if names and importlib.util.find_spec("gguf") is None:
            raise MissingPackages(f"--server needs gguf, not installed here: {sys.executable} -m pip install gguf")
        if model.info.format != "gguf":
            raise ValueError(f"{model.info.path}: llama-server reads GGUF files only; measure with a GGUF base, or without --server")
        self._names, self._log = list(names), folder / "llama-server.log"
        paths = [write_adapter(model.store.adapter(name), model.store.infos[name].invocation_tokens, model.base.facts, folder / f"{i}.gguf")
                 for i, name in enumerate(names)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        adapters = ["--lora", ",".join(map(str, paths)), "--lora-init-without-apply"] if paths else []
        self.command = [
            program, "--model", model.info.path, *adapters, "--ctx-size", str(slots * context), "--parallel", str(slots), "--threads",
            str(threads), "--device", "none", "--offline", "--host", "127.0.0.1", "--port", str(port),
            "--slot-save-path", str(folder)]  # the last lets its cache be erased
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_ARG_")}
        with self._log.open("wb") as log:
            try:
                self._process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
            except OSError as error:
                raise ValueError(f"{program} cannot be started: {error.strerror}; --server takes the path of a llama-server") from error
        try:
            self._wait()
            self.version = str(self._ask("/props").get("build_info", "unknown"))
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> LlamaServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def forget(self) -> None:
        """Begin with nothing stored in the first slot."""
        self._ask("/slots/0?action=erase", {})

    def complete(self, ids: Sequence[int], mix: Mix, tokens: int, slot: int = 0, **more: Any) -> dict[str, Any]:
        """What it tells of a greedy reply to `ids` under `mix` of up to so many tokens; with `more` of its options. From any thread.

        Raises NotMeasured.
        """
        scales = {use.name: use.scale for use in mix}
        return self._ask("/completion", {
            "prompt": list(ids), "n_predict": tokens, "samplers": ["top_k"], "top_k": 1, "id_slot": slot,
            "lora": [{"id": i, "scale": scales.get(name, 0.0)} for i, name in enumerate(self._names)], **more})

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                self._ask("/health")
                return
            except NotMeasured:
                time.sleep(0.1)
        raise ValueError(f"{self.command[0]} did not become ready within {START_S} s; it said: {self._said()}")

    def _said(self) -> str:
        """The first error in its log, or the last line."""
        said = self._log.read_text(errors="replace").strip().splitlines()
        errors = [line.partition(" E ")[2] for line in said if " E " in line]
        return next(iter(errors or said[-1:]), "nothing")

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Raises NotMeasured with what the server refused, or said before it was gone."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        try:
            with self._open(request, timeout=ANSWER_S) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            raise NotMeasured(f"llama-server refused {path}: {error.read(500).decode(errors='replace')}") from error
        except (OSError, http.client.HTTPException) as error:
            raise NotMeasured(f"llama-server gave no answer to {path}: {error}; it said: {self._said()}") from error


def write_adapter(adapter: Adapter, invocation: Sequence[int], facts: ModelFacts, path: Path) -> Path:
    """`adapter` as a GGUF file that llama.cpp reads: its scalings folded into B, whose q and k rows are in that format's order.

    Raises ValueError for what is more than pairs of matrices: llama.cpp has no such adapters.
    """
    import gguf
    weights = adapter.weights
    if weights.embedding or weights.replaced or weights.rows or any(len(pair.tensors) > 2 for pair in weights.pairs):
        raise ValueError(f"adapter {adapter.info.name!r} is more than pairs of low-rank matrices (DoRA, biases or tensors trained whole), "
                         "which llama.cpp cannot load; give plain adapters, or leave out --server")
    writer = gguf.GGUFWriter(path, "llama" if facts.architecture == "mistral" else facts.architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 0.0)  # llama.cpp then multiplies by the scale of the request alone
    if invocation:
        writer.add_key_value("adapter.alora.invocation_tokens", list(invocation), gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT32)
    for module, pair in adapter.modules.items():
        b = pair.b.float() * pair.scaling
        if heads := permuted_heads(facts, module):
            b = b.reshape(heads, 2, -1, b.shape[1]).swapaxes(1, 2).reshape(b.shape)
        name = gguf_name(f"{module}.weight", facts)
        writer.add_tensor(f"{name}.lora_a", pair.a.float().contiguous().numpy())
        writer.add_tensor(f"{name}.lora_b", b.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
