"""Summaries by models: asked for in the background, checked, and kept until they are needed."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from threading import RLock
from typing import Any

import msgspec

from refold.asking import Briefing, Matter, briefing, fenced, matter_of, shortened
from refold.config import AgentSettings, Config
from refold.core import codec
from refold.core.errors import RefoldError, SettingError
from refold.core.event import Called, Certificate, Span
from refold.core.message import Message, Usage
from refold.core.view import View
from refold.job import Job
from refold.policies.extract import Written
from refold.policies.grounded import Source, Verdict, judged
from refold.policies.sections import SECTIONS, body, render
from refold.policies.summarize import Part, Prepared
from refold.record import Record
from refold.stores.store import Lease, Leases
from refold.stores.store import Summaries as Kept
from refold.summarize.call import call
from refold.summarize.models import named
from refold.summarize.prompts import Prompts, message_template
from refold.summarize.summarizer import Answer, Ask, Summarizer
from refold.tokens.count import counter
from refold.tokens.limits import ModelLimits, known_limits

PERIOD_S = 600.0
"""In which so many calls may be made."""
LEASE_S = 30.0
"""What a lease lasts beyond the time that a call may take."""
SHARE = 0.5
"""Of a summary, that the model is asked for where no limit is set: the rest is for what is added by rule."""
MOST_WRITTEN = 0.75
"""Of a summary, that a model's words may take at all."""
LONGEST_ANSWER = 2_000
"""Tokens that a model is asked for at most, where no limit is set."""
TOO_LONG = 1.5
"""How many times its limit an answer may take: models count badly."""
ROUGH = 1.25
"""What is added to counts for models whose vocabulary nobody here knows."""
TRIES = 2
"""How often one model may write the same summary, if the first is no good."""


class Ready(msgspec.Struct, frozen=True):
    """Summaries that wait for their moment."""

    prepared: tuple[Prepared, ...]
    lease: Lease | None
    """Whoever took it since has newer ones."""


class Told(msgspec.Struct, frozen=True):
    """A message that is to be summarized by itself."""

    at: int
    message: Message
    tool: str
    prompt: str | None
    length: int
    is_own: bool = False
    """The prompt came with the message: then it is a text, and never the name of a file here."""


class Summaries:
    """Of one view, for one session. What others hand in is used by their own threads only."""

    def __init__(
        self,
        record: Record,
        config: Config,
        agent: str | None,
        summarizers: Sequence[Summarizer],
        holder: str,
        lock: RLock,
        window: Callable[[], int],
    ) -> None:
        self.record, self.config = record, config
        self.agent: AgentSettings = config.agent(agent)
        self.settings = self.agent.summarizer
        self.loop: asyncio.AbstractEventLoop | None = None
        """Where coroutines of the user's are at home."""
        self.progress: Callable[[int, int], None] | None = None
        """Is told how many requests were answered, of how many."""
        self.told: dict[int, str] = {}
        """What was written about single messages, by their places."""
        self.problems: list[str] = []
        """Why models were done without, since somebody last looked."""
        self._own, self._prompts = tuple(summarizers), config.prompts(agent)
        self._models = _models((*self._prompts.conversation.models, *self.settings.models), self.settings)
        self._lock, self._window = lock, window
        self._job: Job | None = None
        self._ready: Ready | None = None
        self._hung: Callable[[], bool] | None = None
        self._made, self._owed = 0, 0.0
        """Calls and USD of the job under way, which the record does not have yet."""
        self._holder = holder
        self._tried, self._looked = 0, False
        """The round that was written for already, and whether others may have written for it."""

    @property
    def prompts(self) -> Prompts:
        return self._prompts

    @property
    def candidates(self) -> tuple[Summarizer, ...]:
        """Who is asked, in this order."""
        return self._own or self._models

    # Making ahead

    @property
    def job(self) -> Job | None:
        """What is under way."""
        return self._job if self._job is not None and self._job.is_running else None

    def prepare(
        self,
        view: View,
        parts: Callable[[], Sequence[Part]],
        messages: Sequence[Told] = (),
        focus: str | None = None,
    ) -> Job | None:
        """Begins to write summaries of messages, and of the parts that are found then, unless it is at it.

        `view` must have its words at hand: it is read by another thread.
        """
        if self.job is not None or (self._hung is not None and self._hung()):
            return self.job
        round = self.record.live.state.round + 1

        async def work() -> None:
            found = parts()
            if found:
                self._tried = round
            elif not messages:
                return
            lease = self._acquire()
            if lease is None and isinstance(self.record.store, Leases):
                return  # somebody else is at it
            try:
                for one in messages:
                    await self._tell(one, view)
                done = [await self._write(matter_of(part, view, self.record, round, focus)) for part in found]
                self._keep(Ready(tuple(one for one in done if one), lease))
            finally:
                self._made, self._owed = 0, 0.0
                self._end(lease)

        self._job = Job(work, f"refold-summaries-{self.record.key.conversation}")
        return self._job

    @property
    def was_tried(self) -> bool:
        """Summaries for the next compaction were asked for, whatever came of it."""
        return self._tried == self.record.live.state.round + 1

    def ready(self, view: View) -> Ready | None:
        """What can stand in the view now, written by this process or another."""
        found = self._ready or (None if self._looked else self._stored())
        self._looked = True
        if found is None:
            return None
        fresh = tuple(one for one in found.prepared if self._is_as_it_was(one, view))
        self._ready = Ready(fresh, found.lease) if fresh else None
        return self._ready

    def used(self, ready: Ready) -> None:
        """They stand in the view, or never will."""
        self._ready, self._looked = None, False
        if ready.lease is not None and isinstance(self.record.store, Leases):
            with suppress(RefoldError):
                self.record.store.release(self.record.key, ready.lease)

    def close(self) -> None:
        if self._job is not None:
            self._job.cancel()
            self._job.wait(1.0)

    def _is_as_it_was(self, one: Prepared, view: View) -> bool:
        known = one.certificate.digest == self.record.digest_before(one.brief.span.end)
        return known and one.brief.part(view) is not None

    # Writing one

    async def _write(self, matter: Matter) -> Prepared | None:
        for summarizer in self.candidates:
            work = _Work(self, summarizer, matter.brief.span)
            try:
                prepared = await work.prepared(matter)
            except _NoSummaryError as error:
                self._tell_called(work, str(error))
                if error.is_final:
                    break
            else:
                self._tell_called(work, None)
                return prepared
        return None

    async def _tell(self, one: Told, view: View) -> None:
        prompt = f"{one.prompt}\n" if one.is_own and one.prompt else one.prompt
        try:
            template = message_template(prompt, _folder(self.settings.prompts))
        except SettingError as error:
            self.problems.append(str(error))
            return
        candidates = _models(template.models, self.settings) if template.models and not self._own else ()
        task = next((item.words(line).text for item in view.items for line in item.lines if line.asks), "")
        for summarizer in candidates or self.candidates:
            work = _Work(self, summarizer, Span(one.at, one.at + 1))
            try:
                self.told[one.at] = await work.told(one, template.render, task)
            except _NoSummaryError as error:
                self._tell_called(work, str(error))
                if error.is_final:
                    break
            else:
                self._tell_called(work, None)
                return

    def _tell_called(self, work: "_Work", problem: str | None) -> None:
        """What came of it, in the record."""
        if problem is not None:
            self.problems.append(f"{work.name} wrote no summary of {_places(work.span)}: {problem}")
        if not work.calls and problem is None:
            return  # somebody had paid for it before
        with suppress(RefoldError), self._lock:
            view = self.record.view
            facts = (work.name, problem, work.calls, work.usage, work.cost or 0.0, time.time())
            self.record.catch_up()
            self.record.append(lambda: [Called(self.record.live.state.next, view, work.span, *facts)])
            self._made, self._owed = self._made - work.calls, self._owed - (work.cost or 0.0)

    # What it may cost

    def spend(self, cost: float) -> bool:
        """Whether one more call may be made, that may cost so many USD; if so, it is counted."""
        if self._left() <= 0 or not self._can_pay(cost):
            return False
        self._made += 1
        return True

    def owe(self, cost: float) -> None:
        self._owed += cost

    def refuse(self, calls: int, cost: float) -> str | None:
        """Why so many calls may not be made now."""
        left = self._left()
        if calls > left:
            most = self.settings.max_calls
            return f"it would take {calls} calls; {max(0, left)} of {most} in ten minutes are left"
        if not self._can_pay(cost):
            return f"it may cost ${cost:.4f}; ${self._spent():.4f} of ${self.settings.max_cost} is spent"
        return None

    def _left(self) -> int:
        since = time.time() - PERIOD_S
        called = self.record.live.state.called
        return self.settings.max_calls - self._made - sum(n for at, n in called if at > since)

    def _spent(self) -> float:
        return self.record.live.state.spent + self._owed

    def _can_pay(self, cost: float) -> bool:
        most = self.settings.max_cost
        return most is None or self._spent() + cost <= most

    # What is kept in the store

    def cached(self, digest: bytes) -> Answer | None:
        store = self.record.store
        with suppress(RefoldError, msgspec.DecodeError):  # it is no more than money
            found = store.summary(self.record.key, digest) if isinstance(store, Kept) else None
            return msgspec.json.decode(found, type=Answer) if found else None
        return None

    def cache(self, digest: bytes, value: msgspec.Struct) -> None:
        store = self.record.store
        if isinstance(store, Kept):
            with suppress(RefoldError):
                store.keep_summary(self.record.key, digest, codec.dumps(value))

    @property
    def _place(self) -> bytes:
        """Where what is ready is kept for others."""
        return digest_of("ready", *self.record.key, self.record.view)

    def _keep(self, ready: Ready) -> None:
        if ready.prepared:
            self._ready = ready
            self.cache(self._place, ready)

    def _stored(self) -> Ready | None:
        store = self.record.store
        with suppress(RefoldError, msgspec.DecodeError):
            found = store.summary(self.record.key, self._place) if isinstance(store, Kept) else None
            return msgspec.json.decode(found, type=Ready) if found else None
        return None

    # Who may write

    @property
    def lease(self) -> str:
        return f"compaction:{self.record.view}"

    def _acquire(self) -> Lease | None:
        store = self.record.store
        if not isinstance(store, Leases):
            return None
        with suppress(RefoldError):
            seconds = self.settings.timeout_s + LEASE_S
            return store.acquire(self.record.key, self.lease, self._holder, time.time(), seconds)
        return None

    def renew(self) -> None:
        """Another call is about to be made."""
        self._acquire()

    def _end(self, lease: Lease | None) -> None:
        """Others may go on, but whoever does not knows that this one's summary is the newest."""
        if lease is not None and isinstance(self.record.store, Leases):
            with suppress(RefoldError):
                self.record.store.acquire(self.record.key, self.lease, self._holder, time.time(), 0.0)

    # What models take

    def window(self, summarizer: Summarizer) -> int:
        own = getattr(summarizer, "window", None) or self.settings.window
        known = self.limits(summarizer)
        return own or (known.window if known else self._window())

    def limits(self, summarizer: Summarizer, model: str | None = None) -> ModelLimits | None:
        name = model or getattr(summarizer, "name", None)
        return known_limits(name, self.config.models) if isinstance(name, str) else None

    def gave_up(self, still_running: Callable[[], bool] | None) -> None:
        self._hung = still_running or self._hung

    def answered(self, n: int, of: int) -> None:
        if self.progress is not None:
            self.progress(n, of)


class _NoSummaryError(Exception):
    """`is_final`: the answers were no good; another model is not asked."""

    def __init__(self, problem: str, *, is_final: bool = False) -> None:
        super().__init__(problem)
        self.is_final = is_final


class _Work:
    """One summarizer at work on one summary."""

    def __init__(self, summaries: Summaries, summarizer: Summarizer, span: Span) -> None:
        self.summaries, self.summarizer, self.span = summaries, summarizer, span
        self.name = name_of(summarizer)
        self.model: str | None = None
        self.calls, self.cost = 0, 0.0
        self.usage: Usage | None = None
        self.was_cached = False
        self._limits = summaries.limits(summarizer)
        self._count = _counting(self.name, self._limits)

    async def prepared(self, matter: Matter) -> Prepared:
        """
        Raises:
            _NoSummaryError: it cannot be had, or is no good.
        """
        settings, prompts = self.summaries.settings, self.summaries.prompts
        most = settings.max_tokens or min(LONGEST_ANSWER, int(matter.brief.most * SHARE))
        window = self.summaries.window(self.summarizer)
        system, template = prompts.system.render(), prompts.conversation
        asks = briefing(
            matter, system, template, settings.profile, window=window, max_tokens=most, count=self._count
        )
        if asks is None:
            raise _NoSummaryError(f"its window of {window:,} tokens has no room for the request")
        self._demand_budget(asks)
        wanted = [name for name, title in SECTIONS.items() if title in template.sections]
        kept, struck, states = 0, list[str](), dict[int, str]()
        written, previous, said = Written(), matter.previous, 0
        for n, piece in enumerate(asks.pieces):
            said += len(piece)
            told = (matter.previous or "", matter.task, matter.focus or "")
            source = Source.of(matter.messages[:said], previous, *told)
            verdict = await self._judged(asks.ask(n, previous), source, wanted)
            kept, struck = kept + verdict.kept, [*struck, *verdict.struck]
            states |= verdict.written.states
            written = Written(verdict.written.entries, dict(states))
            previous = _text(written)
            self.summaries.answered(n + 1, len(asks.pieces))
        digest = self.summaries.record.digest_before(matter.brief.span.end)
        score = kept / max(1, kept + len(struck))
        model, cost = self.model or self.name, round(self.cost, 6) if self.usage else None
        facts = (digest, model, kept, tuple(struck), (), round(score, 3))
        certificate = Certificate(*facts, self.usage, cost, self.was_cached and not self.calls)
        short = _within(written, int(matter.brief.most * MOST_WRITTEN), self._count)
        return Prepared(matter.brief, short, certificate)

    async def told(self, one: Told, render: Callable[..., str], task: str) -> str:
        """
        Raises:
            _NoSummaryError: it cannot be had, or is no good.
        """
        window = self.summaries.window(self.summarizer)
        answer = min(window // 4, max(200, one.length))
        system = self.summaries.prompts.system.render()
        about: dict[str, Any] = {"tool": one.tool, "length": one.length, "max_tokens": answer, "prompt": None}
        about |= {"task": fenced(shortened(task, 1_000)), "original_length": len(one.message.text)}
        room = int(window * 0.9) - answer - self._count(system) - self._count(render(**about, content=""))
        if room < 100:
            raise _NoSummaryError(f"its window of {window:,} tokens has no room for the request")
        chars = 4 * room
        while self._count(content := fenced(shortened(one.message.text, chars))) > room:
            chars //= 2
        ask = Ask(
            "message", render(**about, content=content), system, (one.message,), None, 1, answer, "message"
        )
        verdict = await self._judged(ask, Source.of([one.message], None, task), ())
        text = " ".join(entry.text for entry in verdict.written.entries)
        if len(text) >= len(one.message.text):
            raise _NoSummaryError("it is not shorter than the message", is_final=True)
        return text

    def _demand_budget(self, asks: Briefing) -> None:
        calls = len(asks.pieces)
        cost = self._price(
            sum(self._count(one.text) for piece in asks.pieces for one in piece), asks.max_tokens
        )
        refused = self.summaries.refuse(calls, cost)
        if refused:
            raise _NoSummaryError(refused, is_final=True)

    async def _judged(self, ask: Ask, source: Source, wanted: Sequence[str]) -> Verdict:
        problem, first = "", ask.prompt
        for _ in range(TRIES):
            digest = digest_of(self.name, ask.system, ask.prompt, str(ask.max_tokens))
            answer = self.summaries.cached(digest)
            self.was_cached = self.was_cached or answer is not None
            answer = answer or await self._answer(ask)
            self.model = answer.model or self.model
            problem = self._flaw(answer, ask, source) or ""
            if not problem:
                verdict = judged(_unwrapped(answer.text, ask.kind), source, wanted)
                problem = verdict.problem or ""
                if not problem:
                    self.summaries.cache(digest, answer)
                    return verdict
            ask = msgspec.structs.replace(ask, prompt=f"{first}\n\nYour last answer was refused: {problem}.")
        raise _NoSummaryError(problem, is_final=True)

    def _flaw(self, answer: Answer, ask: Ask, source: Source) -> str | None:
        """What is wrong with an answer before anybody reads it."""
        text, most = answer.text, int(TOO_LONG * ask.max_tokens)
        if answer.finish in ("length", "refusal", "tool-calls"):
            return {"length": "it was cut off", "refusal": "it was refused"}.get(
                answer.finish, "it calls a tool"
            )
        if not text.strip():
            return "it is empty"
        if len(text) > 20 * most or self._count(text) > most:
            return f"it has more than {most:,} tokens, {ask.max_tokens:,} were wanted"
        if len(text) >= len(source.text):
            return "it is longer than what it stands for"
        return None

    async def _answer(self, ask: Ask) -> Answer:
        summaries, settings = self.summaries, self.summaries.settings
        expected = self._price(self._count(ask.system) + self._count(ask.prompt), ask.max_tokens)
        summaries.renew()
        outcome = await call(
            self.summarizer,
            ask,
            timeout_s=settings.timeout_s,
            spend=lambda: summaries.spend(expected),
            loop=summaries.loop,
        )
        self.calls += outcome.calls
        summaries.gave_up(outcome.still_running)
        if outcome.answer is None:
            raise _NoSummaryError(outcome.problem or "it said nothing")
        usage = outcome.answer.usage
        if usage is not None:
            self.usage = _sum(self.usage, usage)
            cost = self._paid(usage, outcome.answer.model)
            self.cost += cost
            summaries.owe(cost)
        return outcome.answer

    def _price(self, input: int, output: int) -> float:
        return self._paid(Usage(input, output), None)

    def _paid(self, usage: Usage, model: str | None) -> float:
        """USD, as far as prices are known."""
        limits = self._limits or (self.summaries.limits(self.summarizer, model) if model else None)
        if limits is None:
            return 0.0
        each, fresh = limits.input or 0.0, usage.input - usage.cache_read - usage.cache_write
        read = each if limits.cache_read is None else limits.cache_read
        write = each if limits.cache_write is None else limits.cache_write
        sums = (fresh * each, usage.cache_read * read, usage.cache_write * write)
        return (sum(sums) + usage.output * (limits.output or 0.0)) / 1_000_000


def summarizers_of(given: Any, where: str = "summarizer") -> tuple[Summarizer, ...]:
    """What a user hands in: a callable, the name of a model, or several of these.

    Raises:
        SettingError: it is none of these.
    """
    if given is None:
        return ()
    several = given if isinstance(given, list | tuple) else [given]
    found = [named(one) if isinstance(one, str) else one for one in several]
    for one in found:
        if not callable(one):
            raise SettingError(where, f"expected a callable or the name of a model, got {type(one).__name__}")
    return tuple(found)


def name_of(summarizer: Summarizer) -> str:
    name = getattr(summarizer, "name", None) or getattr(summarizer, "__name__", None)
    return name if isinstance(name, str) else type(summarizer).__name__


def digest_of(*texts: str) -> bytes:
    """Of what was asked, and of whom."""
    return blake2b(codec.dumps(texts), digest_size=16).digest()


def _models(names: Sequence[str], settings: Any) -> tuple[Summarizer, ...]:
    return tuple(named(name, settings.base_urls) for name in dict.fromkeys(names))


def _folder(name: str | None) -> Any:
    from pathlib import Path

    return None if name is None else Path(name)


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
    return "\n".join(filter(None, (states, body(render("", written.entries))))) or None


def _within(written: Written, tokens: int, count: Callable[[str], int]) -> Written:
    """The most valuable of it that fits."""
    ranked = sorted(written.entries, key=lambda entry: -entry.worth)
    left, chosen = tokens, set[int]()
    for entry in ranked:
        left -= count(entry.text) + 2
        if left < 0:
            break
        chosen.add(id(entry))
    return Written(tuple(one for one in written.entries if id(one) in chosen), written.states)


def _sum(one: Usage | None, other: Usage) -> Usage:
    if one is None:
        return other
    names = Usage.__struct_fields__
    return Usage(**{name: getattr(one, name) + getattr(other, name) for name in names})


def _places(span: Span) -> str:
    return f"#{span.start}" if len(span) == 1 else f"#{span.start}-{span.end - 1}"
