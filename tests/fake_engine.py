"""An engine that does what a test scripts: it records commands and puts events into the inbox."""
from __future__ import annotations

import zlib
from collections import deque

from lora_bench.engine import protocol as p

PIRATE, JSON, JUDGE = "pirate", "json", "certainty"


def model(**fields) -> p.ModelInfo:
    facts = dict(name="SmolLM2-135M-Instruct", path="/models/smol.gguf", format="gguf", architecture="llama", layers=30, hidden=576,
                 heads=9, kv_heads=3, vocab=49152, context=4096, trained_context=8192, parameters=134_515_008, file_bytes=98_362_432,
                 weight_bytes=538_060_032, weight_types={"Q4_1": 211, "F32": 61}, device="cpu", dtype="fp32", tied=True, threads=2,
                 linear_modules=210, chat_template=True, end_tokens=(2,))
    return p.ModelInfo(**{**facts, **fields})


def adapter(name: str, **fields) -> p.AdapterInfo:
    facts = dict(name=name, path=f"/adapters/{name}", format="peft", digest="3f1c9a" * 10, ranks=(16,), effective_scales=(2.0,),
                 matched=210, total=210, targets={"q_proj": 30, "v_proj": 30}, bytes=3_800_000, rslora=False, dtype="float32",
                 base_model="HuggingFaceTB/SmolLM2-135M-Instruct", norms=tuple(float(1 + i % 7) for i in range(30)))
    return p.AdapterInfo(**{**facts, **fields})


def stats(tokens: int = 23, **fields) -> p.RequestStats:
    facts = dict(prompt_tokens=31, new_tokens=tokens, ttft_ms=412.0, prefill_ms=380.0, decode_ms=tokens * 85.0,
                 decode_tokens_per_second=11.8, seed=0)
    return p.RequestStats(**{**facts, **fields})


def step(number: int, ms: float = 42.0) -> p.StepFinished:
    shares = dict(zip(p.STEP_OPS, (0.70, 0.05, 0.06, 0.10, 0.03, 0.06), strict=True))
    return p.StepFinished(number, 0, 1, 1, 2, 16, ms, {op: ms * share for op, share in shares.items()})


def report(info: p.AdapterInfo, effect: bool, **fields) -> p.CheckReport:
    facts = dict(
        path=info.path, name=info.name, model="SmolLM2-135M-Instruct", info=info, modules=("layers.0.self_attn.q_proj",),
        findings=(p.Finding("warning", "it was trained on another base: the shapes fit, the names differ"),),
        fields=(p.FieldVerdict("r", "16", "honoured", "the rank"), p.FieldVerdict("bias", '"none"', "honoured", "biases"),
                p.FieldVerdict("task_type", '"CAUSAL_LM"', "irrelevant", "the trained tensors are the same for every task")),
        tensors=420, dtypes={"F32": 420}, scales=(p.ScaleGroup(2.0, {"q_proj": 30, "v_proj": 30}),),
        deltas=tuple(p.DeltaNorm(f"layer {i}", float(1 + i % 7), 150.0) for i in range(30)),
        effect=(p.PromptEffect("chat", 77, 37, 1.501, "I", "Arr"), p.PromptEffect("code", 85, 0, 0.0)) if effect else ())
    return p.CheckReport(**{**facts, **fields})


def traced(device: str = "cpu", **fields) -> p.StepTraced:
    names = ("_decode_linear_kernel", "_decode_attention_kernel", "_draw_kernel") if device == "cuda" else (
        "aten::addmm", "aten::copy_", "aten::softmax")
    ops = tuple(p.TracedOp(name, calls, us, 120.5 if device == "cuda" and calls == 30 else 0.0)
                for name, calls, us in zip(names, (210, 30, 4), (30215.1, 8000.0, 12.5), strict=True))
    facts = dict(step=step(12), device=device, ms=48.0, busy_ms=sum(op.us for op in ops) / 1e3, cost_ms=131.4, ops=ops)
    return p.StepTraced(**{**facts, **fields})


class FakeEngine:
    """A Backend whose events the test sends. With `answers` it also behaves: loads, streams one reply, sets mixes."""

    def __init__(self, inbox: deque[p.Event], answers: bool = True) -> None:
        self.inbox = inbox
        self.answers = answers
        self.sent: list[p.Command] = []
        self.starts = 0
        self.adapters: dict[str, p.AdapterInfo] = {}
        self.replies: deque[str] = deque()
        self.mix: p.Mix = ()
        self.pinned: set[str] = set()
        self.token_texts: dict[int, str] = {}

    def start(self) -> None:
        self.starts += 1
        self.adapters.clear()
        self.mix = ()
        self.emit(p.EngineStarted(4242, "2.13.0", ("cpu",)))

    def stop(self, timeout: float = 1.5) -> None:
        """Nothing runs."""

    def send(self, command: p.Command) -> None:
        self.sent.append(command)
        if self.answers:
            getattr(self, f"_do_{type(command).__name__}", lambda _: None)(command)

    def emit(self, *events: p.Event) -> None:
        self.inbox.extend(events)

    def of(self, kind: type) -> list:
        """The commands of one kind that were sent."""
        return [command for command in self.sent if isinstance(command, kind)]

    def snapshot(self, **fields) -> p.EngineSnapshot:
        views, slots = [], []
        acting = [use.name for use in self.mix]
        for name, info in self.adapters.items():
            slot = acting.index(name) if name in acting else -1
            views.append(p.AdapterView(info, "slot" if slot >= 0 else "host", slot, name in self.pinned))
        for slot in range(4):
            name = acting[slot] if slot < len(acting) else ""
            info = self.adapters.get(name)
            slots.append(p.SlotView(slot, name, info.ranks[-1], info.bytes, name in self.pinned, 0, 2.0) if info else p.SlotView(slot))
        facts = dict(model=model(), adapters=tuple(views), slots=tuple(slots), mix=self.mix, memory_bytes=900 << 20,
                     host=p.HostView(len(views) * 3_800_000, 1 << 30, tuple(self.adapters)),
                     kv=self.kv())
        return p.EngineSnapshot(**{**facts, **fields})

    def kv(self) -> p.KvView:
        """A reply that shares the base's part of its prompt with another, blocks kept under a former mix, and free ones."""
        former = (p.AdapterUse(PIRATE, 0.5),)
        runs = (p.KvRun(0, 12, 0, (1, 2)), p.KvRun(12, 8, 1, (1,)), p.KvRun(20, 3, 2), p.KvRun(23, 489, -1))
        owners = (p.KvOwner(1, 20, 312, self.mix, 12), p.KvOwner(2, 12, 190, (), 12))
        counters = p.KvCounters(1204, 1104, 9, 3, 2, 1, 300, 41, 64)
        return p.KvView(16, 512, 377 << 20, 20, 3, owners, ((), self.mix or former, former), runs, counters)

    # -- what a well-behaved engine answers -----------------------------------------------------
    def _do_LoadModel(self, _: p.LoadModel) -> None:
        self.emit(p.ModelLoading("weights", "layers.3", 50, 100), p.ModelLoaded(model(), 1200.0), self.snapshot())

    def _do_LoadAdapter(self, command: p.LoadAdapter) -> None:
        name = command.name or command.path.rstrip("/").rpartition("/")[2]
        fields = {"invocation": "<|judge|>", "invocation_tokens": (5, 6, 7)} if name == JUDGE else {}
        self.adapters[name] = adapter(name, path=command.path, **fields)
        self.emit(p.AdapterLoaded(self.adapters[name], 12.0), self.snapshot())

    def _do_UnloadAdapter(self, command: p.UnloadAdapter) -> None:
        self.adapters.pop(command.name, None)
        self.emit(p.AdapterUnloaded(command.name, 3_800_000), self.snapshot())

    def _do_PinAdapter(self, command: p.PinAdapter) -> None:
        (self.pinned.add if command.pinned else self.pinned.discard)(command.name)
        self.emit(self.snapshot())

    def _do_SetInvocation(self, command: p.SetInvocation) -> None:
        info = adapter(command.name, invocation=command.text, invocation_tokens=tuple(range(len(command.text.split()))),
                       invocation_in_reply=command.in_reply)
        self.adapters[command.name] = info
        self.emit(p.AdapterChanged(info), self.snapshot())

    def _do_Tokenize(self, command: p.Tokenize) -> None:
        words = command.invocation.split()
        said = " ".join(message.content for message in command.prompt.messages) if command.prompt else ""
        found = command.prompt is not None and command.invocation in said
        miss = "" if found or command.prompt is None else f"nearest is [0, 9] at token 4, expected {list(range(len(words)))}"
        self.emit(p.Tokenized(command.ask_id, tuple(range(len(words))), tuple(words), found, 7 if found else -1, miss))

    def _do_ClearCache(self, _: p.ClearCache) -> None:
        self.emit(p.CacheCleared(3, "you asked for it"))

    def _do_TraceStep(self, _: p.TraceStep) -> None:
        self.emit(traced())

    def _do_CheckAdapter(self, command: p.CheckAdapter) -> None:
        self.emit(p.CheckProgress(command.name, "measures layer 0"),
                  p.CheckFinished(command.name, report(self.adapters[command.name], command.effect)))

    def _do_CancelCheck(self, command: p.CancelCheck) -> None:
        self.emit(p.CheckFailed(command.name, "the check was stopped", cancelled=True))

    def _do_SetMix(self, command: p.SetMix) -> None:
        old, self.mix = {use.name for use in self.mix}, command.mix
        for slot, use in enumerate(command.mix):
            if use.name not in old:
                self.emit(p.SlotLoaded(slot, use.name, 3_800_000, 2.5, "host", "the standing mix"))
        self.emit(p.MixSet(command.mix, {}), self.snapshot())

    def _do_Generate(self, command: p.Generate) -> None:
        if not self.replies:
            return
        number, text = command.request_id, self.replies.popleft()
        self.emit(p.RequestStarted(number, 31))
        pieces = text.split(" ")
        for index, piece in enumerate(pieces):
            self.emit(p.TextDelta(number, piece if index == 0 else " " + piece, index + 1), step(index, 40.0 + index % 5))
        self.emit(p.RequestFinished(number, "stop", stats(len(pieces))), self.snapshot())

    def _do_GenerateTogether(self, command: p.GenerateTogether) -> None:
        """A reply for each row, a token of all of them in every step; without replies for all of them they wait."""
        if len(self.replies) < len(command.requests):
            return
        rows = [(request.request_id, self.replies.popleft()) for request in command.requests]
        for number, _ in rows:
            self.emit(p.RequestStarted(number, 31, cache=p.CacheUse(31, 16, 1, base_tokens=16)))
        pieces = {number: tokens_of(text) for number, text in rows}
        self.token_texts |= {token_id(token): token for tokens in pieces.values() for token in tokens}
        for index in range(max(map(len, pieces.values()), default=0)):
            for number, tokens in pieces.items():
                if index < len(tokens):
                    self.emit(p.TextDelta(number, tokens[index], index + 1))
            self.emit(step(index, 40.0 + index % 5))
        for number, tokens in pieces.items():
            self.emit(p.RequestFinished(number, "stop", stats(len(tokens)), tuple(map(token_id, tokens))))
        self.emit(self.snapshot())

    def _do_Score(self, command: p.Score) -> None:
        """Figures that only depend on the tokens and on how many rows came before."""
        texts = [self.token_texts.get(number, f"<{number}>") for number in command.reply]
        tokens = [p.TokenChance(number, texts[i], -0.25 * (i % 4)) for i, number in enumerate(command.reply)]
        rows = []
        for row, mix in enumerate(command.mixes):
            kl = tuple(0.0 if row == 0 else row * (1.5 if i % 5 == 1 else 0.01) for i in range(len(tokens)))
            logprobs = tuple(token.logprob - nats for token, nats in zip(tokens, kl, strict=True))
            best = [p.TokenChance(1, " now", -0.2) if nats > 1 else token for token, nats in zip(tokens, kl, strict=True)]
            top = tuple((chance, p.TokenChance(2, " the", -2.3)) for chance in best)
            rows.append(p.ScoredRow(mix, logprobs, kl, tuple(1 + (nats > 1) * 37 for nats in kl), top))
        self.emit(p.Scored(command.score_id, tuple(tokens), tuple(rows)))


def tokens_of(text: str) -> list[str]:
    """A token for each word, with the blank before it."""
    return [piece if i == 0 else " " + piece for i, piece in enumerate(text.split(" "))]


def token_id(text: str) -> int:
    return 10 + zlib.crc32(text.encode("utf-8", "replace")) % 40_000
