"""Has one summarizer write one summary: in pieces, each answer checked, and asked once more if it fails."""

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from types import CodeType
from typing import Any

import msgspec

from refold.config.prompts import Template
from refold.core import codec
from refold.core.event import Certificate, Span
from refold.core.message import Message, Usage
from refold.models.count import counter
from refold.policies.evidence import Evidence, Verdict, checked
from refold.policies.expire import MessageKey
from refold.policies.extract import Written
from refold.policies.sections import SECTIONS, listed
from refold.policies.summarize import SummaryPart
from refold.policies.text import all_text
from refold.summaries.call import call, running_loop
from refold.summaries.context import SummaryContext, digest_of, price_of
from refold.summaries.prompt import (
    MIN_MESSAGE_TOKENS,
    REQUEST_OVERHEAD_TOKENS,
    USABLE_WINDOW,
    PromptContent,
    PromptSeries,
    SummaryInput,
    escape_tags,
    plan_prompts,
    shortened,
)
from refold.summaries.summarizer import Answer, Ask, Summarizer

MODEL_SHARE = 0.35
"""Of a summary: the rest is for exact values that are added by rule. Used where no limit is set."""
WITH_MODEL = 1.5
"""How much longer a summary may be with a model's text than without. Used where no limit is set."""
DEFAULT_MAX_ANSWER_TOKENS = 2_000
MIN_ANSWER_TOKENS = 80
OVERLONG = 1.5
"""Models count badly: answers up to this multiple of the limit are accepted."""
UNKNOWN_VOCABULARY = 1.25
"""Margin on token counts for models whose tokenizer is unknown."""
ATTEMPTS = 2
"""Answers per summarizer and summary, if the first is rejected."""
_REJECTED = {
    "length": "it was cut off",
    "refusal": "it was refused",
    "tool-calls": "it calls a tool",
}


class NoSummaryError(Exception):
    """No summary could be written. If `is_final`, no other summarizer is tried."""

    def __init__(self, problem: str, *, is_final: bool = False) -> None:
        super().__init__(problem)
        self.is_final = is_final


class MessageToSummarize(msgspec.Struct, frozen=True):
    """A message that is summarized by itself."""

    at: int
    message: Message
    tool: str
    prompt: str | None
    length: int
    """Characters of the summary."""
    is_own: bool = False
    """The prompt came with the message: it is a text, never the name of a local file."""
    kind: str = ""
    """Such as `action-result`."""
    step: int = 0
    """In which it was added."""

    @property
    def key(self) -> MessageKey:
        return self.at, self.prompt, self.length


class CachedAnswer(msgspec.Struct, frozen=True):
    """An answer that was paid for, and the places that its prompt named."""

    answer: Answer
    places: tuple[int, ...]

    def moved(self, verdict: Verdict, places: tuple[int, ...]) -> Verdict:
        """The verdict for a conversation that has the same content at other places."""
        if places == self.places:
            return verdict
        new_places = dict(zip(self.places, places, strict=False))
        written = verdict.written
        states = {new_places[at]: state for at, state in written.states.items() if at in new_places}
        return msgspec.structs.replace(verdict, written=msgspec.structs.replace(written, states=states))


codec.decoder(CachedAnswer)


class Writer:
    def __init__(self, context: SummaryContext, summarizer: Summarizer, span: Span) -> None:
        self.context = context
        self.summarizer = summarizer
        self.span = span
        self.name = name_of(summarizer)
        self.calls = 0
        self.cost = 0.0
        self.usage: Usage | None = None
        self._model: str | None = None
        self._was_cached = False
        self._has_price = False
        self._window = context.window(summarizer)
        self._limits = context.limits(getattr(summarizer, "name", None))
        self._count = counter(self.name).text
        if self._limits is None:
            count = self._count
            self._count = lambda text: int(UNKNOWN_VOCABULARY * count(text)) + 1

    async def summarize(self, summary_input: SummaryInput) -> SummaryPart:
        """Raises NoSummaryError if no call succeeded, or every answer was rejected."""
        settings = self.context.settings
        most = summary_input.part.most
        if settings.max_tokens:
            max_tokens = min(settings.max_tokens, most)
            room = most
        else:
            max_tokens = min(DEFAULT_MAX_ANSWER_TOKENS, int(most * MODEL_SHARE))
            room = int(most * WITH_MODEL)
        if max_tokens < (1 if settings.max_tokens else MIN_ANSWER_TOKENS):
            raise NoSummaryError(f"a summary may have only {max_tokens} tokens", is_final=True)
        prompts = plan_prompts(
            summary_input,
            self.context.prompts.system.render(),
            self.context.prompts.conversation,
            settings.profile,
            window=self._window,
            max_tokens=max_tokens,
            count=self._count,
        )
        if prompts is None:
            raise self._too_small_a_window()
        self._require_budget(prompts)
        kept = 0
        struck = list[str]()
        states = dict[int, str]()
        written = Written()
        previous = summary_input.previous
        covered = 0
        for n, piece in enumerate(prompts.pieces):
            covered += len(piece)
            texts = [previous, summary_input.previous, summary_input.task, summary_input.focus]
            counts = f"{len(piece)} of {covered} messages, summary {summary_input.round}"
            places = [original.at for original in summary_input.originals[:covered]]
            evidence = Evidence.of(
                summary_input.messages[:covered],
                *dict.fromkeys(text or "" for text in texts),
                counts,
                places=places,
            )
            ask, content = prompts.ask(n, previous)
            limit = max(room, int(OVERLONG * max_tokens))
            verdict = await self._checked_answer(ask, content, evidence, limit)
            kept += verdict.kept
            struck += verdict.struck
            states |= verdict.written.states
            written = Written(verdict.written.entries, dict(states))
            previous = _as_previous(written)
            if self.context.progress is not None:
                self.context.progress(n + 1, len(prompts.pieces))
        certificate = Certificate(
            "",
            self._model or self.name,
            kept,
            tuple(struck),
            (),
            round(kept / max(1, kept + len(struck)), 3),
            self.usage,
            round(self.cost, 6) if self._has_price else None,
            self._was_cached and not self.calls,
        )
        return msgspec.structs.replace(
            summary_input.part, most=room, written=written, certificate=certificate
        )

    async def summarize_message(self, one: MessageToSummarize, template: Template, task: str) -> str:
        """Raises NoSummaryError if no call succeeded, or every answer was rejected."""
        system = self.context.prompts.system.render()
        max_tokens = min(self._window // 4, max(200, one.length))
        values: dict[str, Any] = {
            "tool": one.tool,
            "length": one.length,
            "max_tokens": max_tokens,
            "prompt": None,
            "task": escape_tags(shortened(task, 1_000)),
            "original_length": len(one.message.text),
            "message_type": one.kind,
            "turn_added": one.step,
        }
        frame = self._count(system) + self._count(template.render(**values, content=""))
        room = int(self._window * USABLE_WINDOW) - max_tokens - frame - REQUEST_OVERHEAD_TOKENS
        if room < MIN_MESSAGE_TOKENS:
            raise self._too_small_a_window()
        chars = 4 * room
        while self._count(content := escape_tags(shortened(one.message.text, chars))) > room:
            chars //= 2
        prompt = template.render(**values, content=content)
        cache_key = template.render(**values | {"turn_added": 0}, content=content)
        ask = Ask("message", prompt, system, (one.message,), None, 1, max_tokens, "message")
        verdict = await self._checked_answer(
            ask,
            PromptContent(cache_key, ()),
            Evidence.of([one.message], task),
            int(OVERLONG * max_tokens),
        )
        if len(verdict.text) >= len(one.message.text):
            raise NoSummaryError("it is not shorter than the message", is_final=True)
        return verdict.text

    def _too_small_a_window(self) -> NoSummaryError:
        return NoSummaryError(f"the request does not fit into its window of {self._window:,} tokens")

    def _require_budget(self, prompts: PromptSeries) -> None:
        tokens = 0
        for piece in prompts.pieces:
            tokens += sum(self._count(worded.text) for worded in piece)
        calls = len(prompts.pieces)
        refusal = self.context.refusal(
            calls, price_of(Usage(tokens, prompts.max_tokens * calls), self._limits)
        )
        if refusal:
            raise NoSummaryError(refusal, is_final=True)

    async def _checked_answer(
        self, ask: Ask, content: PromptContent, evidence: Evidence, max_tokens: int
    ) -> Verdict:
        """An answer of at most `max_tokens`, with sentences struck that the evidence does not support."""
        problem = ""
        objection = ""
        first_digest: bytes | None = None
        for _ in range(ATTEMPTS):
            digest = digest_of(
                identity_of(self.summarizer), ask.system, content.prompt, str(ask.max_tokens), objection
            )
            first_digest = first_digest or digest
            known = self.context.cached(digest, CachedAnswer)
            self._was_cached = self._was_cached or known is not None
            if known is None:
                answer = await self._call(msgspec.structs.replace(ask, prompt=ask.prompt + objection))
                known = CachedAnswer(answer, content.places)
            self._model = known.answer.model or self._model
            problem = self._rejection(known.answer, ask, max_tokens) or ""
            if not problem:
                verdict = checked(
                    _unwrapped(known.answer.text, ask.kind),
                    evidence,
                    is_off=not self.context.settings.checks_values,
                    is_plain=ask.kind == "message",
                )
                problem = verdict.problem or ""
                if not problem:
                    self.context.cache(first_digest, known)
                    return known.moved(verdict, content.places)
            objection = f"\n\nYour last answer was refused: {problem}."
        raise NoSummaryError(problem, is_final=True)

    def _rejection(self, answer: Answer, ask: Ask, max_tokens: int) -> str | None:
        """Why an answer is of no use, whatever it says."""
        text = answer.text
        if answer.finish in _REJECTED:
            return _REJECTED[answer.finish]
        if not text.strip():
            return "it is empty"
        if len(text) > 20 * max_tokens or self._count(text) > max_tokens:
            return f"it has more than {max_tokens:,} tokens; the limit was {ask.max_tokens:,}"
        if len(text) >= sum(map(len, (ask.previous or "", *map(all_text, ask.messages)))):
            return "it is longer than the messages it replaces"
        return None

    async def _call(self, ask: Ask) -> Answer:
        context = self.context
        tokens = self._count(ask.system) + self._count(ask.prompt)
        expected_cost = price_of(Usage(tokens, ask.max_tokens), self._limits)
        if tokens + ask.max_tokens > self._window:
            raise self._too_small_a_window()
        if context.acquire_lease() is None and context.lease.is_needed:
            raise NoSummaryError("another process is writing a summary of this view", is_final=True)
        if refusal := context.reserve_call(expected_cost):
            raise NoSummaryError(refusal)
        self.calls += 1
        try:
            outcome = await call(
                self.summarizer,
                ask,
                timeout_s=context.settings.timeout_s,
                loop=lambda: running_loop(context.loop),
            )
        except BaseException:  # canceled; the provider may bill it all the same
            self._add_cost(expected_cost)
            raise
        if outcome.abandoned is not None:
            context.abandoned[id(self.summarizer)] = outcome.abandoned
        answer = outcome.answer
        if answer is not None and answer.usage is not None:
            limits = self._limits or context.limits(answer.model)
            self.usage = answer.usage if self.usage is None else self.usage + answer.usage
            self._has_price = limits is not None
            self._add_cost(price_of(answer.usage, limits))
        elif not outcome.is_free:  # it does not say what it cost
            self._add_cost(expected_cost)
        if answer is None:
            raise NoSummaryError(outcome.problem or "it gave no answer")
        return answer

    def _add_cost(self, cost: float) -> None:
        self.cost += cost
        self.context.add_cost(cost)


def name_of(summarizer: Summarizer) -> str:
    name = getattr(summarizer, "name", None) or getattr(summarizer, "__name__", None)
    return name if isinstance(name, str) else type(summarizer).__name__


def identity_of(summarizer: Any) -> str:
    """Its `name`, or else what it is made of, the same in every process.

    Functions that differ only in their closure are the same: give them a `name`.
    """
    name = getattr(summarizer, "name", None)
    if isinstance(name, str):
        return name
    if isinstance(summarizer, partial):
        arguments = (*summarizer.args, *sorted(summarizer.keywords.items()))
        return f"{identity_of(summarizer.func)} with {_stable_repr(arguments)}"
    code = getattr(summarizer, "__code__", None)
    kind: Any = summarizer if code else type(summarizer)
    return f"{kind.__module__}.{kind.__qualname__} {_stable_repr(code) if code else ''}"


def _stable_repr(value: Any) -> str:
    """Plain values as they are, others as their type: no addresses in memory."""
    match value:
        case CodeType():
            return _stable_repr((value.co_code, value.co_consts, value.co_names))
        case tuple():
            return f"({', '.join(map(_stable_repr, value))})"
        case frozenset():
            return f"{{{', '.join(sorted(map(_stable_repr, value)))}}}"
        case None | bool() | int() | float() | complex() | str() | bytes() | slice():
            return repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _unwrapped(text: str, kind: str) -> str:
    """The summary in an answer: of one message, the `summary` of a JSON object if the model wrote one."""
    if kind == "conversation":
        return text
    start = text.find("{")
    end = text.rfind("}")
    with suppress(msgspec.DecodeError):
        value = msgspec.json.decode(text[start : end + 1])
        if isinstance(value, Mapping) and isinstance(value.get("summary"), str):
            return " ".join(value["summary"].split())
        return ""
    return " ".join(text.split())


def _as_previous(written: Written) -> str | None:
    """What was written so far, as the next prompt shows it."""
    requests = [f"- #{at} ({state})" for at, state in written.states.items()]
    states = "\n".join([f"{SECTIONS['requests']}:", *requests]) if requests else ""
    return "\n".join(filter(None, (states, listed(written.entries)))) or None
