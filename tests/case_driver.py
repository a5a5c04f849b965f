"""Our engine behind the JSON-lines protocol of a bank of cases: one step a line in, one answer a line out.

`python tests/case_driver.py` prints {"ready": true} and then answers each step object ("do" and its arguments) with
{"result": "ok" | "error" | "unsupported", "message": ..., "warnings": [...], "logits": ..., "text": ..., "ids": ..., ...}.
Everything is computed in fp32 on the CPU. `make cases CASES=folder` runs the judge of a bank with it.
"""
from __future__ import annotations

import json
import os
import random
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "100")

import case_chats
import torch

from lora_bench.engine.chat import prompt_ids
from lora_bench.engine.engine import Engine
from lora_bench.engine.failures import sentence
from lora_bench.engine.mix import resolve_mix
from lora_bench.engine.protocol import (
    AdapterUse,
    Chat,
    Event,
    Generate,
    LoadModel,
    Message,
    Mix,
    RawText,
    RequestFailed,
    RequestFinished,
    RequestStarted,
    Sampling,
    TextDelta,
    TokenIds,
)

Step = dict[str, Any]
Answer = dict[str, Any]
UNSUPPORTED: Answer = {"result": "unsupported"}


class Driver:
    """Carries out steps. What a step cannot do is an answer, and so is every exception."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._engine = Engine(self._events.append)
        self._tiers: Step = {}
        self._requests = 0

    def answer(self, step: Step) -> Answer:
        """ValueError and OSError are sentences for the person; anything else that escapes is a fault, told by its traceback."""
        act = _STEPS.get(step["do"])
        if act is None:
            return UNSUPPORTED
        try:
            return {"result": "ok"} | (act(self, step) or {})
        except (ValueError, OSError) as error:
            return {"result": "error", "message": sentence(error)}
        except Exception:
            return {"result": "error", "message": traceback.format_exc()}

    # -- what is loaded --------------------------------------------------------------------------
    def configure(self, step: Step) -> None:
        self._tiers = step

    def load_base(self, step: Step) -> Answer:
        tiers = {"slots": self._tiers["gpu_slots"], "host_cache_bytes": _host_bytes(self._tiers["host_slots"])} if self._tiers else {}
        info = self._engine.load_model(LoadModel(step["path"], "cpu", "fp32", **tiers))
        return {"warnings": list(info.notes)}

    def unload_base(self, step: Step) -> None:
        """A base goes when another comes; an engine without one is a new engine."""
        self._engine = Engine(self._events.append)

    def load_adapter(self, step: Step) -> Answer:
        info = self._engine.load_adapter(step["path"], step["as"])
        missing = f"{info.matched} of {info.total} modules are in the base, the others are missing there"
        return {"warnings": [*info.notes, *([missing] if info.matched < info.total else [])]}

    def unload_adapter(self, step: Step) -> None:
        self._engine.unload_adapter(step["as"])

    # -- what it computes ------------------------------------------------------------------------
    def logits(self, step: Step) -> Answer:
        mix = _mix(step)
        return {"logits": self._engine.logits(step["ids"], mix).tolist(), "warnings": self._inactive(step["ids"], mix)}

    def logits_batch(self, step: Step) -> Answer:
        prompts = [(request["ids"], _mix(request)) for request in step["requests"]]
        return {"each": [row.tolist() for row in self._engine.batch_logits(prompts)]}

    def generate(self, step: Step) -> Answer:
        request = self._submit(step)
        while self._engine.step():
            pass
        return self._reply(request)

    def generate_during(self, step: Step) -> Answer:
        """The mix is changed once the reply has `at_token` tokens."""
        request = self._submit(step)
        due = True
        while self._engine.step():
            if due and self._tokens(request) >= step["at_token"]:
                due = False
                self._engine.set_mix(tuple(AdapterUse(*use) for use in step["change"]), (request,))
        return self._reply(request)

    def parallel(self, step: Step) -> Answer:
        """Lists of steps side by side: each gives its next step to the engine between two steps of the engine itself."""
        tasks = [deque(task) for task in step["tasks"]]
        answers: list[Answer] = []
        replies: list[int] = []
        while True:
            running = self._engine.step()
            for task in tasks:
                if not task or task[0]["do"] == "wait_tokens" and running and not self._told(replies, task[0]["n"]):
                    continue
                current = task.popleft()
                if current["do"] == "generate":
                    replies.append(self._submit(current))
                elif current["do"] != "wait_tokens":
                    answers.append(self.answer(current))
            if not running and not any(tasks) and not self._engine.step():
                return {"each": answers + [self._reply(request) for request in replies]}

    def _submit(self, step: Step) -> int:
        self._requests += 1
        sampling = Sampling(max_tokens=step["max_tokens"], temperature=step.get("temperature", 0.0), seed=step.get("seed") or 0,
                            stop=tuple(step.get("stop") or ()))
        self._engine.submit(Generate(self._requests, TokenIds(tuple(step["ids"])), _mix(step), sampling))
        return self._requests

    def _of(self, kind: type, request: int) -> Iterable[Any]:
        return (event for event in self._events if isinstance(event, kind) and event.request_id == request)

    def _tokens(self, request: int) -> int:
        return max((delta.tokens for delta in self._of(TextDelta, request)), default=0)

    def _told(self, replies: list[int], tokens: int) -> bool:
        return any(self._tokens(request) >= tokens for request in replies)

    def _reply(self, request: int) -> Answer:
        activations = (activation for started in self._of(RequestStarted, request) for activation in started.activations)
        warnings = [activation.detail for activation in activations if not activation.found]
        for failed in self._of(RequestFailed, request):
            return {"result": "error", "message": failed.message, "warnings": warnings}
        (finished,) = self._of(RequestFinished, request)
        chunks = [delta.text for delta in self._of(TextDelta, request) if delta.text]
        ids, reason = list(finished.ids), finished.reason
        if reason == "stop" and ids and ids[-1] in self._engine.model.base.end_tokens:
            ids, reason = ids[:-1], "eos"
        return {"result": "ok", "text": "".join(chunks), "chunks": chunks, "ids": ids, "finish": reason, "warnings": warnings}

    def _inactive(self, ids: list[int], mix: Mix) -> list[str]:
        store = self._engine.model.store
        return [found.detail for found in resolve_mix(mix, ids, store.infos, store.text).activations if not found.found]

    # -- chats on disk ---------------------------------------------------------------------------
    def save_session(self, step: Step) -> None:
        """Two chats: the one that is asked for, and another that must stay as it is."""
        for words in (f"another than {step['name']}", step["name"]):
            case_chats.put_down(words)

    def corrupt_saved(self, step: Step) -> None:
        case_chats.spoil(step["how"])

    def restart(self, _: Step) -> None:
        """What a new process would know: nothing but what is on disk."""

    def list_sessions(self, _: Step) -> Answer:
        warnings, left = case_chats.found()
        return {"warnings": warnings, "text": "\n".join(left)}

    def kill_during_save(self, step: Step) -> Answer:
        low, high = step["delay_ms"]
        lost = [case_chats.kill_writer(random.uniform(low, high) / 1e3, step["messages_between"]) for _ in range(step["times"])]
        if max(lost) > case_chats.MOST_LOST_S:
            raise ValueError(f"a kill lost {max(lost):.2f} s of the chat")
        return {"warnings": [f"{step['times']} kills, at most {max(lost):.2f} s were lost"]}

    # -- text ------------------------------------------------------------------------------------
    def render_chat(self, step: Step) -> Answer:
        """The engine always asks for the generation prompt; without it only templates that know of none give the same."""
        base = self._engine.model.base
        if not step.get("add_generation_prompt", True) and "add_generation_prompt" in (base.chat_template or "add_generation_prompt"):
            return UNSUPPORTED
        messages = tuple(Message(message["role"], message["content"]) for message in step["messages"])
        ids, text = prompt_ids(self._engine.model.tokenizer, base.chat_template, Chat(messages))
        return {"ids": ids, "text": text, "warnings": list(base.notes)}

    def tokenize(self, step: Step) -> Answer:
        return {"ids": self._engine.model.tokenizer.encode(step["text"], special=True)}

    def tokenize_raw(self, step: Step) -> Answer:
        return {"ids": prompt_ids(self._engine.model.tokenizer, None, RawText(step["text"]))[0]}

    def detokenize(self, step: Step) -> Answer:
        return {"text": self._engine.model.tokenizer.decode(step["ids"], special=True)}


_STEPS: dict[str, Callable[[Driver, Step], Answer | None]] = {
    name: act for name, act in vars(Driver).items() if name[0] != "_" and name != "answer"
}


def _mix(step: Step) -> Mix:
    return tuple(AdapterUse(name, float(scale)) for name, scale in step.get("adapters") or ())


def _host_bytes(slots: int) -> int:
    """Our host tier is bounded by bytes: room for the `slots` smallest adapters of the case, and for the largest one alone."""
    sizes = sorted(file.stat().st_size for file in Path().glob("*/adapter_model.*") if file.is_file())
    return max(sum(sizes[:slots]), sizes[-1]) if sizes else 1 << 30


def main() -> None:
    """Answer until the input ends. Standard output is the protocol's alone; whatever else is printed goes to standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    driver = Driver()
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(driver.answer(json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()
