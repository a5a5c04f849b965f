"""The state dict in a `.bin`: tensors alone, read by torch's restricted unpickler within bounds of our own."""
from __future__ import annotations

import pickle
import re
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from ..weights.files import open_regular, show
from .errors import AdapterError

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
MAX_PICKLE_BYTES = 1 << 20
"""of the description of the tensors, which the unpickler takes a step a byte for; a tensor takes about 200"""
MAX_RECORDS = 65_536
_ASK = "ask for a safetensors file"


def read_pickle(path: Path, file_bytes: int) -> Mapping[str, Tensor]:
    """Names -> tensors, mapped from a copy of the file that nobody else writes to. Nothing in the file is called.

    torch checks what a mapped file claims against its size; and a mapped file that another program cuts short would end this process.

    Raises AdapterError for anything but plain dense tensors inside, for those that claim more than `file_bytes` or is stored for them, and
    for a description without proportion; OSError.
    """
    with open_regular(path) as stream:
        if stream.read(4) == b"PK\x03\x04":
            _check_records(stream, path)
            state = _load_mapped(stream, path)
        else:
            stream.seek(0)
            state = _load(path, _Metered(stream), mapped=False)
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise AdapterError(f"{path}: holds a {type(state).__name__}, a dict from names to tensors is expected; {_ASK}")
    for name, tensor in state.items():
        _check_plain(name, tensor, path, file_bytes)
    return state


class _Metered:
    """A stream for the unpickler of torch's older format, which reads descriptions in small pieces and tensors whole."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._left = stream, MAX_PICKLE_BYTES
        self.seek, self.tell, self.readinto = stream.seek, stream.tell, stream.readinto

    def read(self, size: int = -1) -> bytes:
        return self._pay(self._stream.read(size))

    def readline(self) -> bytes:
        return self._pay(self._stream.readline(MAX_PICKLE_BYTES))

    def _pay(self, data: bytes) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise pickle.PickleError(f"its description of the tensors takes more than {MAX_PICKLE_BYTES:,} steps")
        return data


def _check_records(stream: BinaryIO, path: Path) -> None:
    """torch writes records as they are and finds them by their place: packed ones would be read as numbers, or grow without bound."""
    try:
        with zipfile.ZipFile(stream) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, OSError) as error:  # a newer zip is not implemented
        raise _unreadable(path, error) from None
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED or record.file_size != record.compress_size:
            raise AdapterError(f"{path}: its record {show(record.filename)} is compressed, torch writes none so; "
                               f"the file was packed anew, {_ASK}")
        if record.filename.endswith("data.pkl") and record.file_size > MAX_PICKLE_BYTES:
            raise AdapterError(f"{path}: its description of the tensors has {record.file_size:,} bytes, "
                               f"more than the {MAX_PICKLE_BYTES:,} that are read; {_ASK}")
    if len(records) > MAX_RECORDS:
        raise AdapterError(f"{path}: holds {len(records):,} records, more than the {MAX_RECORDS:,} that are read; {_ASK}")


def _load_mapped(stream: BinaryIO, path: Path) -> object:
    stream.seek(0)
    with tempfile.NamedTemporaryFile() as copy:
        shutil.copyfileobj(stream, copy)
        copy.flush()
        return _load(path, Path(copy.name), mapped=True)


def _load(path: Path, source: Path | _Metered, mapped: bool) -> object:
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        calls = f" (it calls {found[1]})" if found else ""
        raise AdapterError(f"{path}: refused, the pickle holds more than tensors{calls}; unsafe to load, {_ASK}") from None
    except Exception as error:  # torch.load raises many kinds for files that are none
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> AdapterError:
    why = show((str(error) or repr(error)).splitlines()[0], 120)
    return AdapterError(f"{path}: is not a file that torch.load can read ({why}); download it again or {_ASK}")


def _check_plain(name: str, tensor: object, path: Path, file_bytes: int) -> None:
    where = f"{path}: {show(name, 160)}"
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise AdapterError(f"{where} is not a plain dense tensor; unsupported, {_ASK}")
    if tensor.dtype not in DTYPES:
        raise AdapterError(f"{where} has dtype {tensor.dtype}; the weights of an adapter are float32, float16 or bfloat16, "
                           "save it again in one of these")
    stored = tensor.untyped_storage().nbytes()
    if tensor.nbytes > min(stored, file_bytes):
        raise AdapterError(f"{where} claims shape {show(list(tensor.shape))} with stride {show(list(tensor.stride()))}, more than the "
                           f"{stored:,} bytes stored for it; the file lies about its size, {_ASK}")
