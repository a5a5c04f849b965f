"""Calls of the tokenizers library with data that nobody vouches for."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..weights.files import FormatError, show


@contextmanager
def library(where: object, what: str) -> Iterator[None]:
    """Failures inside become FormatError "where: what (why)".

    The library raises bare Exceptions and, where it panics, a BaseException of its own, which would end a thread or process.
    """
    try:
        yield
    except (FormatError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        raise FormatError(f"{where}: {what} ({show(str(error), 200)})") from None
