"""A chat template out of a model's files, rendered for a conversation by the process that the engine has for it."""
from __future__ import annotations

import re
from pathlib import Path
from random import Random

from lora_bench.engine.base_file import open_base
from lora_bench.engine.chat import prompt_ids
from lora_bench.engine.protocol import Chat, Message
from lora_bench.engine.template import ChatTemplateError
from lora_bench.engine.tokenizer import Tokenizer

from .. import tiny
from ..bench import write_files
from ..mutations import blind
from ..target import Run, Target, Wrong

NO_TOKEN = "the prompt holds no token"
CHATS = [
    Chat((Message("system", "Be brief."), Message("user", "hello <|im_end|> the\n"), Message("assistant", "he"),
          Message("user", "{{ 7*7 }} 😀"))),
    Chat((Message("user", "a"),), opening="<|im_start|>say"),
]
PIECES = [
    "{{ messages }}", "{{ messages | tojson }}", "{{ messages | tojson(indent=4) }}", "{% for m in messages %}", "{% endfor %}",
    "{{ m.content }}", "{{ m['role'] }}",
    "{{ bos_token }}", "{{ eos_token }}", "{% if add_generation_prompt %}", "{% else %}", "{% elif true %}", "{% endif %}",
    "{% set x = messages[1:] %}", "{{ x }}",
    "{% set ns = namespace(n=0) %}", "{% set ns.n = ns.n + 1 %}", "{{ raise_exception('no') }}", "{{ strftime_now('%Y') }}",
    "{{ strftime_now('%' * 500000) }}",
    "{% for i in range(1000000000) %}", "{{ 'a' * 1000000000 }}", "{{ 2 ** 2 ** 30 }}", "{{ [0] * 10 ** 9 }}", "{{ ''.__class__.__mro__ }}",
    "{{ cycler.__init__.__globals__.os.mknod('CANARY') }}", "{{ lipsum.__globals__['os'].mknod('CANARY') }}", "{{ messages.append(1) }}",
    "{{ messages.clear() }}",
    "{{ '%s' | format(1) }}", "{{ '{0.__class__}'.format(1) }}", "{{ x | attr('__class__') }}", "{% macro f(a) %}", "{% endmacro %}",
    "{{ f(1) }}", "{{ f(f(1)) }}",
    "{% include '/etc/passwd' %}", "{% import 'x' as y %}", "{% extends 'x' %}", "{% block b %}", "{% endblock %}", "{% call f(1) %}",
    "{% endcall %}",
    "{% generation %}", "{% endgeneration %}", "{% break %}", "{% continue %}", "{% filter upper %}", "{% endfilter %}", "{% raw %}",
    "{% endraw %}", "{#", "#}",
    "{{ messages | map(attribute='content') | join('\\n') }}", "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{{ loop.index0 }}", "{{ undefined.x }}",
    "{{ none + 1 }}", "{{ 1 / 0 }}", "{{ 'x' | center(100000000) }}", "{{ 'x' | indent(99999999) }}", "{{ range(10) | batch(3) | list }}",
    "{{ ((((((((((1)))))))))) }}",
    "{% for m in messages recursive %}", "{{ loop(messages) }}", "{{ 'a' | replace('', 'b' * 9999) }}", "{{ '\\ud800' }}", "\ufdd0",
    "\ufdd1", "<|im_end|>", "\x1b[2J",
    "{{ 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!' | wordwrap(1) }}", "{{ messages | pprint }}", "{{ dict(a=1) | dictsort }}",
    "{{ 9999999999999999 | string | length }}",
    "{{ messages | sum(start=[]) }}", "{{ joiner() }}", "{{ self }}", "{{ self.b() }}", "{%- -%}", "{{ '' | urlize }}",
    "{{ 'a' | random }}", "{{ caller() }}",
]
TEMPLATES = [
    tiny.TEMPLATE,
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ '<<' + message['content'] | trim + '>>' }}{% elif loop.last %}"
    "{{ message.content }}{{ eos_token }}{% else %}{{- message.content -}}{% endif %}{% endfor %}",
    "{%- set ns = namespace(found=false) %}{%- for m in messages %}{%- if m.role == 'user' and not ns.found %}"
    "{%- set ns.found = true %}{{ m.content }}"
    "{%- endif %}{%- endfor %}{%- macro show(x) %}[{{ x }}]{%- endmacro %}{{ show(messages | length) }}"
    "{% generation %}{{ messages[0].content }}{% endgeneration %}",
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m | tojson }}\n{% endfor %}{{ strftime_now('%d %b %Y') }}",
]
_PARTS = re.compile(r"(\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\})", re.DOTALL)


def mutate(data: bytes, other: bytes, random: Random) -> bytes:
    """Tags taken away, doubled, exchanged, brought from elsewhere; now and then blind changes."""
    if random.random() < 0.2:
        return blind(data, other, random)
    parts, foreign = (_PARTS.split(text.decode("utf-8", "replace")) for text in (data, other))
    for _ in range(random.choice((1, 1, 2, 4))):
        place = random.randrange(len(parts))
        chance = random.random()
        if chance < 0.2:
            del parts[place:place + random.choice((1, 1, 3))]
        elif chance < 0.3:
            parts[place:place] = parts[place:place + 3] * random.choice((1, 2, 300))
        elif chance < 0.8:
            parts.insert(place, random.choice(PIECES))
        else:
            parts[place:place + 1] = foreign[random.randrange(len(foreign)):][:5]
        parts = parts or [""]
    return "".join(parts)[:200_000].encode("utf-8", "surrogatepass")


def prepare(folder: Path) -> Run:
    tokenizer = Tokenizer(open_base(write_files(folder / "base", tiny.base_files(Random(1)))))

    def run(data: bytes) -> None:
        template = data.decode("utf-8", "replace")
        for chat in CHATS:
            try:
                ids, text = prompt_ids(tokenizer, template, chat)
            except ValueError as error:
                if not str(error).startswith(NO_TOKEN):
                    raise
                continue
            if not all(0 <= number < tokenizer.model_vocab for number in ids) or "\ufdd0" in text or "\ufdd1" in text:
                raise Wrong("ids outside of the vocabulary, or marks left in the text")

    return run


TARGET = Target(
    lambda: [template.encode() for template in TEMPLATES], mutate, prepare, (ChatTemplateError,), lambda folder: "chat template",
    seconds=15.0)
