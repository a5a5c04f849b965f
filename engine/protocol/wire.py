"""The wire form, the same in both directions: one msgpack message behind a 4-byte little-endian length."""
from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO

import msgspec

from .commands import Command
from .events import Event

MAX_FRAME_BYTES = 64 << 20

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Command)
_events = msgspec.msgpack.Decoder(Event)


def write_frame(stream: BinaryIO, item: Command | Event) -> None:
    """Write one item and flush; text that is no Unicode (lone surrogates) goes as "?".

    Raises OSError when the other side is gone; ValueError, with nothing written, for an item that no frame holds.
    """
    kind = type(item).__name__
    try:
        payload = _encoder.encode(item)
    except UnicodeEncodeError:
        payload = _encoder.encode(_unicode(msgspec.to_builtins(item)))
    except OverflowError as error:
        raise ValueError(f"{kind} holds a whole number of more than 64 bits; give a smaller one") from error
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"{kind} takes {len(payload):,} bytes, over the limit of {MAX_FRAME_BYTES:,}; send a shorter text")
    stream.write(struct.pack("<I", len(payload)) + payload)
    stream.flush()


def read_commands(stream: BinaryIO) -> Iterator[Command]:
    """Commands until the stream ends. Raises ValueError for a frame that is none."""
    return map(_commands.decode, _frames(stream))


def read_events(stream: BinaryIO) -> Iterator[Event]:
    """Events until the stream ends. Raises ValueError for a frame that is none."""
    return map(_events.decode, _frames(stream))


def _unicode(value: object) -> object:
    """`value` (plain data) with every lone surrogate replaced."""
    match value:
        case str():
            return value.encode("utf-8", "replace").decode()
        case dict():
            return {_unicode(key): _unicode(item) for key, item in value.items()}
        case list() | tuple():
            return [_unicode(item) for item in value]
        case _:
            return value


def _frames(stream: BinaryIO) -> Iterator[bytes]:
    while len(head := stream.read(4)) == 4:
        (size,) = struct.unpack("<I", head)
        if size > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
        payload = stream.read(size)
        if len(payload) < size:
            return
        yield payload
