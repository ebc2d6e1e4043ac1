"""One summarizer at work on one summary: asked in pieces, checked, asked once more if it must be."""

from collections.abc import Callable, Mapping, Sequence
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
from refold.models.limits import ModelLimits
from refold.policies.evidence import Evidence, Verdict, checked
from refold.policies.expire import MessageKey
from refold.policies.extract import Written
from refold.policies.importance import all_text
from refold.policies.sections import SECTIONS, listed
from refold.policies.summarize import PreparedSummary
from refold.summaries.call import call
from refold.summaries.context import SummaryContext, digest_of
from refold.summaries.home import home
from refold.summaries.prompt import (
    FRAME,
    LEAST,
    SAFE,
    PromptContent,
    PromptSeries,
    SummaryInput,
    briefing,
    fenced,
    shortened,
)
from refold.summaries.summarizer import Answer, Ask, Summarizer

SHARE = 0.35
"""Of a summary, that the model is asked for where no limit is set: the rest is for what is added by rule."""
BESIDE = 1.5
"""How long a summary may be with a model's words in it, for one by rule alone, where no limit is set."""
LONGEST_ANSWER = 2_000
"""Tokens that a model is asked for at most, where no limit is set."""
SHORTEST_ANSWER = 80
"""What is less than that is not worth asking for."""
TOO_LONG = 1.5
"""How many times its limit an answer may take at least: models count badly."""
ROUGH = 1.25
"""What is added to counts for models whose vocabulary nobody here knows."""
TRIES = 2
"""How often one model may write the same summary, if the first is no good."""
_UNFIT = {"length": "it was cut off", "refusal": "it was refused", "tool-calls": "it calls a tool"}


class NoSummaryError(Exception):
    """There is none, and why. `is_final`: another model need not be asked."""

    def __init__(self, problem: str, *, is_final: bool = False) -> None:
        super().__init__(problem)
        self.is_final = is_final


class MessageToSummarize(msgspec.Struct, frozen=True):
    """A message that is to be summarized by itself."""

    at: int
    message: Message
    tool: str
    prompt: str | None
    length: int
    """Characters of the summary."""
    is_own: bool = False
    """The prompt came with the message: then it is a text, and never the name of a file here."""
    kind: str = ""
    """Such as `action-result`."""
    step: int = 0
    """In which it was added."""

    @property
    def key(self) -> MessageKey:
        return self.at, self.prompt, self.length


class CachedAnswer(msgspec.Struct, frozen=True):
    """An answer that was paid for, and the places that were in what was asked."""

    answer: Answer
    places: tuple[int, ...]

    def moved(self, verdict: Verdict, places: tuple[int, ...]) -> Verdict:
        """What it says, for a conversation that has the same content in other places; where a request is that
        was not in what was asked, nobody knows."""
        if places == self.places:
            return verdict
        new, written = dict(zip(self.places, places, strict=False)), verdict.written
        states = {new[at]: state for at, state in written.states.items() if at in new}
        moved = msgspec.structs.replace(written, states=states)
        return msgspec.structs.replace(verdict, written=moved)


codec.decoder(CachedAnswer)


class Writer:
    def __init__(self, desk: SummaryContext, summarizer: Summarizer, span: Span) -> None:
        self.desk, self.summarizer, self.span = desk, summarizer, span
        self.name = name_of(summarizer)
        self.calls, self.cost = 0, 0.0
        self.usage: Usage | None = None
        self._model: str | None = None
        self._was_cached = self._has_price = False
        self._limits = desk.limits(getattr(summarizer, "name", None))
        self._count = _counting(self.name, self._limits)

    async def summary(self, matter: SummaryInput) -> PreparedSummary:
        """
        Raises:
            NoSummaryError: it cannot be had, or is no good.
        """
        settings, template = self.desk.settings, self.desk.prompts.conversation
        share = min(LONGEST_ANSWER, int(matter.brief.most * SHARE))
        most = min(settings.max_tokens, matter.brief.most) if settings.max_tokens else share
        if most < (1 if settings.max_tokens else SHORTEST_ANSWER):
            raise NoSummaryError(f"there is room for {most} tokens only", is_final=True)
        window, system = self.desk.window(self.summarizer), self.desk.prompts.system.render()
        sizes: dict[str, Any] = {"window": window, "max_tokens": most, "count": self._count}
        asks = briefing(matter, system, template, settings.profile, **sizes)
        if asks is None:
            raise NoSummaryError(f"its window of {window:,} tokens has no room for the request")
        self._demand_budget(asks)
        room = matter.brief.most if settings.max_tokens else int(matter.brief.most * BESIDE)
        kept, struck, states = 0, list[str](), dict[int, str]()
        written, previous, said = Written(), matter.previous, 0
        for n, piece in enumerate(asks.pieces):
            said += len(piece)
            told = dict.fromkeys((previous or "", matter.previous or "", matter.task, matter.focus or ""))
            counts = f"{len(piece)} of {said} messages, summary {matter.round}"
            places = [one.at for one in matter.originals[:said]]
            evidence = Evidence.of(matter.messages[:said], *told, counts, places=places)
            ask, content = asks.ask(n, previous), asks.content(n, previous)
            verdict = await self._checked(ask, content, evidence, max(room, int(TOO_LONG * most)))
            kept, struck = kept + verdict.kept, [*struck, *verdict.struck]
            states |= verdict.written.states
            written = Written(verdict.written.entries, dict(states))
            previous = _text(written)
            self.desk.answered(n + 1, len(asks.pieces))
        brief = msgspec.structs.replace(matter.brief, most=room)
        return PreparedSummary(brief, written, self._certificate(kept, struck), matter.made, matter.tip)

    def _certificate(self, kept: int, struck: Sequence[str]) -> Certificate:
        score = round(kept / max(1, kept + len(struck)), 3)
        cost = round(self.cost, 6) if self._has_price else None
        paid = (self.usage, cost, self._was_cached and not self.calls)
        return Certificate("", self._model or self.name, kept, tuple(struck), (), score, *paid)

    async def about(self, one: MessageToSummarize, template: Template, task: str) -> str:
        """What a message says, in few words.

        Raises:
            NoSummaryError: it cannot be had, or is no good.
        """
        window, system = self.desk.window(self.summarizer), self.desk.prompts.system.render()
        answer = min(window // 4, max(200, one.length))
        facts: dict[str, Any] = {"tool": one.tool, "length": one.length, "max_tokens": answer, "prompt": None}
        facts |= {"task": fenced(shortened(task, 1_000)), "original_length": len(one.message.text)}
        facts |= {"message_type": one.kind, "turn_added": one.step}
        frame = self._count(system) + self._count(template.render(**facts, content=""))
        room = int(window * SAFE) - answer - frame - FRAME
        if room < LEAST:
            raise NoSummaryError(f"its window of {window:,} tokens has no room for the request")
        chars = 4 * room
        while self._count(content := fenced(shortened(one.message.text, chars))) > room:
            chars //= 2
        prompt = template.render(**facts, content=content)
        same = template.render(**facts | {"turn_added": 0}, content=content)  # whenever it was added
        ask = Ask("message", prompt, system, (one.message,), None, 1, answer, "message")
        evidence, longest = Evidence.of([one.message], task), int(TOO_LONG * answer)
        verdict = await self._checked(ask, PromptContent(same, ()), evidence, longest)
        text = verdict.text
        if len(text) >= len(one.message.text):
            raise NoSummaryError("it is not shorter than the message", is_final=True)
        return text

    def _demand_budget(self, asks: PromptSeries) -> None:
        texts = sum(self._count(one.text) for piece in asks.pieces for one in piece)
        cost = self.desk.price(Usage(texts, asks.max_tokens * len(asks.pieces)), self._limits)
        refused = self.desk.refuse(len(asks.pieces), cost)
        if refused:
            raise NoSummaryError(refused, is_final=True)

    async def _checked(self, ask: Ask, content: PromptContent, evidence: Evidence, longest: int) -> Verdict:
        """The answer as far as it can be used; one of more than the `longest` tokens cannot."""
        is_off, is_plain = not self.desk.settings.checks_values, ask.kind == "message"
        problem, again, digests = "", "", list[bytes]()
        for _ in range(TRIES):
            digest = digest_of(
                identity_of(self.summarizer), ask.system, content.prompt, str(ask.max_tokens), again
            )
            digests.append(digest)
            known = self.desk.kept(digest, CachedAnswer)
            self._was_cached = self._was_cached or known is not None
            asked = msgspec.structs.replace(ask, prompt=ask.prompt + again)
            kept = known or CachedAnswer(await self._answer(asked), content.places)
            answer = kept.answer
            self._model = answer.model or self._model
            problem = self._flaw(answer, ask, longest) or ""
            if not problem:
                text = _unwrapped(answer.text, ask.kind)
                verdict = checked(text, evidence, is_off=is_off, is_plain=is_plain)
                problem = verdict.problem or ""
                if not problem:
                    self.desk.keep(digests[0], kept)
                    return kept.moved(verdict, content.places)
            again = f"\n\nYour last answer was refused: {problem}."
        raise NoSummaryError(problem, is_final=True)

    def _flaw(self, answer: Answer, ask: Ask, most: int) -> str | None:
        """What is wrong with an answer before anybody reads it."""
        text = answer.text
        if answer.finish in _UNFIT:
            return _UNFIT[answer.finish]
        if not text.strip():
            return "it is empty"
        if len(text) > 20 * most or self._count(text) > most:
            return f"it has more than {most:,} tokens, {ask.max_tokens:,} were wanted"
        if len(text) >= sum(map(len, (ask.previous or "", *map(all_text, ask.messages)))):
            return "it is longer than what it stands for"
        return None

    async def _answer(self, ask: Ask) -> Answer:
        desk, tokens = self.desk, self._count(ask.system) + self._count(ask.prompt)
        expected = desk.price(Usage(tokens, ask.max_tokens), self._limits)
        window = desk.window(self.summarizer)
        if tokens + ask.max_tokens > window:
            raise NoSummaryError(f"the request would not fit its window of {window:,} tokens")
        if desk.acquire() is None and desk.lease.is_needed:
            raise NoSummaryError("somebody else writes now", is_final=True)
        made = self.calls
        try:
            outcome = await call(
                self.summarizer,
                ask,
                timeout_s=desk.settings.timeout_s,
                spend=lambda: self._spend(expected),
                home=lambda: home(desk.loop),
            )
        except BaseException:  # ended in the middle
            self._pay(expected if self.calls > made else 0.0)
            raise
        desk.gave_up(self.summarizer, outcome.still_running)
        answer = outcome.answer
        if answer is not None and answer.usage is not None:
            limits = self._limits or desk.limits(answer.model)
            self.usage = answer.usage if self.usage is None else self.usage + answer.usage
            self._has_price = limits is not None
            self._pay(desk.price(answer.usage, limits))
        elif not outcome.is_free:  # nobody says what it cost
            self._pay(expected)
        if answer is None:
            raise NoSummaryError(outcome.problem or "it said nothing")
        return answer

    def _spend(self, cost: float) -> str | None:
        """Why not, if not."""
        refused = self.desk.spend(cost)
        self.calls += refused is None
        return refused

    def _pay(self, cost: float) -> None:
        self.cost += cost
        self.desk.owe(cost)


def name_of(summarizer: Summarizer) -> str:
    name = getattr(summarizer, "name", None) or getattr(summarizer, "__name__", None)
    return name if isinstance(name, str) else type(summarizer).__name__


def identity_of(summarizer: Any) -> str:
    """Who was asked: by name, or else by what it is made of, alike in every process. Functions that differ
    only in what they hold on to are one; give them a `name`."""
    name = getattr(summarizer, "name", None)
    if isinstance(name, str):
        return name
    if isinstance(summarizer, partial):
        given = (*summarizer.args, *sorted(summarizer.keywords.items()))
        return f"{identity_of(summarizer.func)} with {_made(given)}"
    code = getattr(summarizer, "__code__", None)
    kind: Any = summarizer if code else type(summarizer)
    return f"{kind.__module__}.{kind.__qualname__} {_made(code) if code else ''}"


def _made(of: Any) -> str:
    """What a value is; where it is no plain one, of what kind: an address in memory tells nothing."""
    match of:
        case CodeType():
            return _made((of.co_code, of.co_consts, of.co_names))
        case tuple():
            return f"({', '.join(map(_made, of))})"
        case frozenset():
            return f"{{{', '.join(sorted(map(_made, of)))}}}"
        case None | bool() | int() | float() | complex() | str() | bytes() | slice():
            return repr(of)
    return f"{type(of).__module__}.{type(of).__qualname__}"


def _counting(name: str, limits: ModelLimits | None) -> Callable[[str], int]:
    count = counter(name).text
    return count if limits is not None else lambda text: int(ROUGH * count(text)) + 1


def _unwrapped(text: str, kind: str) -> str:
    """The summary in an answer; of one message it is JSON, if the model did as it was told."""
    if kind == "conversation":
        return text
    start, end = text.find("{"), text.rfind("}")
    with suppress(msgspec.DecodeError):
        value = msgspec.json.decode(text[start : end + 1])
        if isinstance(value, Mapping) and isinstance(value.get("summary"), str):
            return " ".join(value["summary"].split())
        return ""
    return " ".join(text.split())  # it is a summary all the same


def _text(written: Written) -> str | None:
    """What was written, as the next request has it."""
    requests = [f"- #{at} ({state})" for at, state in written.states.items()]
    states = "\n".join([f"{SECTIONS['requests']}:", *requests]) if requests else ""
    return "\n".join(filter(None, (states, listed(written.entries)))) or None
