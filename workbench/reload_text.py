"""What became of an adapter's file and of a reload, in words."""
from __future__ import annotations

from ..engine.protocol import AdapterFileChanged, AdapterReloaded, CheckpointAppeared, ReloadFailed, requests_text

SHOWN_DIGEST = 8
"""characters of a digest that tell two contents of one name apart"""
FILE_MARKS = {"changed": "≠", "deleted": "∅"}


def file_text(event: AdapterFileChanged) -> str:
    match event.what:
        case "changed":
            return (f"{event.name}: its file changed on disk. Replies still use what was read: "
                    f"R on it, or /reload {event.name}, reads it again")
        case "deleted":
            return f"{event.name}: its file is gone ({event.path}). What was read goes on; it cannot be read again"
        case _:
            return f"{event.name}: its file is again what was read"


def file_line(state: str) -> str:
    """For the details of an adapter whose file is not what was read any more."""
    return {
        "changed": f"{FILE_MARKS['changed']} its file changed on disk since it was read; replies use what was read. R reads it again",
        "deleted": f"{FILE_MARKS['deleted']} its file is gone; what was read goes on, but cannot be read again",
    }[state]


def checkpoint_text(event: CheckpointAppeared) -> str:
    return f"a new checkpoint lies beside {event.beside}: /load {event.path}"


def sha_text(event: AdapterReloaded) -> str:
    new = event.adapter.digest[:SHOWN_DIGEST]
    return f"sha {event.old_digest[:SHOWN_DIGEST]} → {new}" if event.changes else f"the same content (sha {new}), nothing changed"


def reloaded_text(event: AdapterReloaded) -> str:
    parts = [f"{event.adapter.name} was read again: {', '.join((sha_text(event), *event.changes))}"]
    if event.kept_for:
        finish = "finishes" if len(event.kept_for) == 1 else "finish"
        parts.append(f"{requests_text(event.kept_for)} {finish} on the old content, which holds its slot as {event.kept_as} until then")
    if event.others:
        parts.append(f"{', '.join(event.others)} came from the same file and keeps the old content")
    return "; ".join(parts)


def reload_failed_text(event: ReloadFailed) -> str:
    if event.cancelled:
        return f"{event.name} was not read again: stopped"
    return f"{event.name} was not read again: {event.message}\nWhat was loaded stays as it is."
