"""The child process in which chat templates run: `python -m lora_bench.engine.template_process`.

A template is code out of a downloaded file. The immutable sandbox keeps it from Python's objects; the
process keeps its loops and strings from the engine: memory has a limit, and so has the processor time
of each rendering, after which the system ends the process (SIGPROF) whatever it is doing.
One JSON line in ({template, variables}), one JSON line out ({text} or {error}).
"""
from __future__ import annotations

import json
import re
import signal
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 2.0
MEMORY_BYTES = 512 << 20
MAX_OWN_TEXT = 1 << 18
"""characters of a rendered prompt beside those of its messages: what is tokenised takes a hundred times the memory of the text"""
MAX_REPEATS = 4
"""times that a template may write what the messages hold"""
MAX_ERROR = 300
"""characters of what a template says in an error"""


class _Generation(Extension):
    """`{% generation %}` marks what a model says, for training; here its body is plain."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Refused(TemplateError):
    """The template called raise_exception."""


def environment() -> ImmutableSandboxedEnvironment:
    """Filters, globals and white space as Hugging Face's chat templates expect them."""
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise Refused(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    return environment().from_string(template)


def render(template: str, variables: dict[str, Any]) -> str:
    """The rendered text. Raises what the template raises, ValueError for a text out of proportion to the messages."""
    limit = MAX_OWN_TEXT + MAX_REPEATS * sum(len(text) for message in variables.get("messages", ()) for text in message.values())
    pieces, size = [], 0
    for piece in _compiled(template).generate(**variables):
        size += len(piece)
        if size > limit:
            raise ValueError(f"the template writes more than the limit of {limit:,} characters for these messages")
        pieces.append(piece)
    return "".join(pieces)


def _answer(line: bytes) -> dict[str, str]:
    try:
        request = json.loads(line)
        return {"text": render(request["template"], request["variables"])}
    except MemoryError:
        return {"error": f"takes more than the memory limit of {MEMORY_BYTES >> 20} MB"}
    except RecursionError:
        return {"error": "is nested too deeply or calls itself without end"}
    except Refused as error:
        return {"error": f"says: {str(error)[:MAX_ERROR]}"}
    except TemplateSyntaxError as error:
        return {"error": f"cannot be rendered: syntax error in line {error.lineno}: {_first_sentence(error)}"}
    except Exception as error:
        return {"error": f"cannot be rendered: {type(error).__name__}: {_first_sentence(error)}"}


def _first_sentence(error: Exception) -> str:
    """What is wrong; the advice that follows is for whoever writes templates."""
    text = str(getattr(error, "message", None) or error)
    return re.split(r"[.!?]\s+(?=[A-Z])", text, maxsplit=1)[0].rstrip(".")[:MAX_ERROR]


def _limit_memory() -> None:
    import resource

    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def main() -> None:
    """Answer lines until the engine closes the pipe."""
    _limit_memory()
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        answer = json.dumps(_answer(line)).encode() + b"\n"
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
