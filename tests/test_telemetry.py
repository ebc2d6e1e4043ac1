"""Who traces sees what refold does, and nothing of what was said; tracing harms nothing."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import ProxyTracerProvider, SpanKind, StatusCode

import refold
from refold import telemetry
from refold.core.errors import CannotExpandError, OverBudgetError
from refold.core.message import Usage
from refold.session.session import Session
from refold.summaries.call import CallOutcome, call
from refold.summaries.providers import ModelSummarizer
from refold.summaries.summarizer import Ask
from refold.testing.model import Reply, ScriptedModel
from refold.testing.scribe import Scribe
from test_ladder import agent, output, step, user

SECRET = "a word like no other"
ASK = Ask("conversation", f"What happened? {SECRET}", "You summarize.", (), None, 1, 300, "default")
NAMES = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
EXPIRE = {"web_search": {"expire": {"after_steps": 0, "mode": "compact", "length": 40}}}


class Seen:
    """The spans that have ended."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    def all(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    def names(self) -> list[str]:
        return [span.name for span in self.all()]

    def one(self, name: str) -> ReadableSpan:
        (span,) = [span for span in self.all() if span.name == name]
        return span

    def words(self) -> str:
        return "\n".join(span.to_json() for span in self.all())


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)  # it can be set once in a process
    yield Seen(exporter)
    provider.shutdown()


def begin(window: int = 400_000, summarizer: Any = None, **settings: Any) -> Session:
    config = agent(window, **settings)
    return refold.open("c", store="memory://", model="m", config=config, summarizer=summarizer)


def facts(span: Any) -> dict[str, Any]:
    return dict(span.attributes or {})


def put(to: Any, *, timeout_s: float = 10.0) -> CallOutcome:
    return asyncio.run(call(to, ASK, timeout_s=timeout_s))


# What a session does


def test_a_fit_is_a_span_with_its_numbers(seen):
    chat = begin(tools=EXPIRE)
    chat.append([user("Go."), *step("c1", output(500, "x")), *step("c2", "ok", "other")])
    report = chat.fit().report
    span = seen.one("refold.fit")
    assert facts(span) == {
        "refold.conversation": "c",
        "gen_ai.conversation.id": "c",
        "refold.tokens.before": report.tokens.before,
        "refold.tokens.final": report.tokens.final,
        "refold.edits": 1,
        "refold.limit": 400_000,
    }
    assert (span.kind, span.status.status_code) == (SpanKind.INTERNAL, StatusCode.UNSET)


def test_what_became_of_messages_is_told_to_the_span_they_were_hidden_in(seen):
    chat = begin(tools=EXPIRE)
    chat.append([user("Go."), *step("c1", output(500, "x")), *step("c2", "ok", "other")])
    (edit,) = chat.fit().report.edits
    expired, compacted = seen.one("refold.fit").events
    assert (expired.name, compacted.name) == ("refold.message-expired", "refold.message-compacted")
    assert facts(compacted) == facts(expired)
    assert facts(compacted) == {
        "gen_ai.conversation.id": "c",
        "refold.at": 2,
        "refold.turn": 1,
        "refold.step": 2,
        "refold.role": "tool",
        "refold.tools": ("web_search",),
        "refold.reason": edit.why,
        "refold.edit": edit.place,
        "refold.tokens.saved": edit.tokens_saved,
    }


def test_a_compaction_is_a_span_from_its_start_to_its_end(seen):
    chat = begin()
    chat.append([user("Go."), *(m for n in range(9) for m in step(f"c{n}", output(300, f"v_{n}")))])
    saved = chat.compact(keep_recent=2).tokens_saved
    span = seen.one("refold.compact")
    assert facts(span)["refold.tokens.saved"] == saved > 0
    assert facts(span)["refold.strategy"] == "summarize"
    names = [event.name for event in span.events]
    assert (names[0], names[-1]) == ("refold.compaction:start", "refold.compaction:complete")
    end = facts(span.events[-1])
    assert end["refold.was_summarized"]
    assert end["refold.tokens.before"] - end["refold.tokens.after"] == saved


def test_expanding_is_a_span_and_a_model_that_does_so_executes_a_tool(seen):
    chat = begin(tools=EXPIRE)
    chat.append([user("Go."), *step("c1", output(500, SECRET)), *step("c2", "ok", "other")])
    chat.fit()
    chat.expand(2, reason=SECRET)
    (expanded,) = seen.one("refold.expand").events
    assert expanded.name == "refold.message-expanded"
    assert facts(expanded)["refold.at"] == 2
    assert SECRET in chat.call("refold_expand", {"at": 2, "match": SECRET, "reason": SECRET})
    span = seen.one("execute_tool refold_expand")
    assert facts(span) == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "refold_expand",
        "gen_ai.tool.type": "function",
        "gen_ai.conversation.id": "c",
        "refold.conversation": "c",
    }
    assert [event.name for event in span.events] == ["refold.message-expanded"]
    assert SECRET not in seen.words()


def test_an_error_is_a_kind_without_a_word_of_what_it_says(seen):
    chat = begin(2_000)
    chat.append([user(output(3_000, SECRET)), {"role": "assistant", "content": "ok"}])
    with pytest.raises(OverBudgetError):
        chat.fit()
    with pytest.raises(CannotExpandError):
        chat.expand(1, match=SECRET)
    for name, kind in (("refold.fit", "OverBudgetError"), ("refold.expand", "CannotExpandError")):
        span = seen.one(name)
        assert span.status.status_code is StatusCode.ERROR
        assert facts(span)["error.type"] == kind
        assert not span.status.description
    assert [event.name for event in seen.one("refold.fit").events][-1] == "refold.overflow"
    assert SECRET not in seen.words()


def test_spans_belong_to_what_the_program_traces_itself_also_where_it_awaits(seen):
    async def main() -> None:
        chat = await refold.aopen("c", store="memory://")
        with trace.get_tracer("mine").start_as_current_span("mine"):
            await chat.append(user("Go."))
            await chat.fit()

    asyncio.run(main())
    mine, fit = seen.one("mine"), seen.one("refold.fit")
    assert fit.parent is not None
    assert fit.parent.span_id == mine.context.span_id
    assert mine.events == ()  # a message that is added is nothing that became of one


# Models that are asked


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_a_request_to_a_model_is_one_span_with_the_names_of_the_conventions(seen, provider):
    usage = Usage(120, 30, cache_read=20)
    with ScriptedModel(Reply(f"## Work done\n- {SECRET}", usage=usage)) as model:
        url = getattr(model, f"{provider}_url")
        put(ModelSummarizer(f"{provider}/a-model", base_url=url, api_key="any"))
    span = seen.one("chat a-model")
    assert seen.all() == (span,)
    assert span.kind is SpanKind.CLIENT
    assert facts(span) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": provider,
        "gen_ai.request.model": "a-model",
        "gen_ai.request.max_tokens": 300,
        "gen_ai.response.model": "a-model",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 120,
        "gen_ai.usage.output_tokens": 30,
        "gen_ai.usage.cache_read.input_tokens": 20,
        "gen_ai.usage.cache_creation.input_tokens": 0,
        "refold.round": 1,
    }
    assert SECRET not in seen.words()


def test_a_call_that_fails_is_a_span_with_its_status(seen):
    replies = [Reply(SECRET, 429, headers={"retry-after-ms": "1"}), Reply(SECRET, 400)]
    with ScriptedModel(replies) as model:
        put(ModelSummarizer("openai/a-model", base_url=model.openai_url, api_key="any"))
    assert facts(seen.one("chat a-model"))["error.type"] == "400"
    assert seen.one("chat a-model").status.status_code is StatusCode.ERROR
    assert SECRET not in seen.words()


def test_a_request_that_takes_too_long_has_a_kind_of_its_own(seen):
    async def never(ask: Ask) -> str:
        await asyncio.Event().wait()
        return ""

    put(never, timeout_s=0.01)
    assert facts(seen.one("chat"))["error.type"] == "timeout"


def test_a_summary_is_traced_as_a_part_of_what_needed_it(seen):
    chat = begin(summarizer=Scribe())
    chat.append([user("Go."), *(m for n in range(9) for m in step(f"c{n}", output(300, SECRET)))])
    chat.compact(keep_recent=2)
    compact = seen.one("refold.compact")
    asked = [span for span in seen.all() if span.name == "chat"]
    assert asked
    assert {span.parent and span.parent.span_id for span in asked} == {compact.context.span_id}
    assert "gen_ai.request.model" not in facts(asked[0])  # nobody knows which
    assert SECRET not in seen.words()


# What a loop of one's own can use


def test_agents_and_their_tools_have_spans_to_work_in(seen):
    with telemetry.agent("scout", "c"), telemetry.tool("look", "c", "call_1") as tool:
        tool.fail("Refused")
    agent_, tool_ = seen.one("invoke_agent scout"), seen.one("execute_tool look")
    assert facts(agent_)["gen_ai.agent.name"] == "scout"
    assert facts(tool_)["gen_ai.tool.call.id"] == "call_1"
    assert facts(tool_)["error.type"] == "Refused"
    assert tool_.parent is not None
    assert tool_.parent.span_id == agent_.context.span_id


def test_every_name_that_is_not_refolds_own_is_one_of_the_conventions(seen):
    with telemetry.agent("scout", "c"), telemetry.tool("look", "c", "call_1"):
        chat = begin(8_000, summarizer=Scribe())
        chat.append(user("The task."))
        for n in range(30):
            chat.append(step(f"c{n}", output(400, f"value_{n}")))
            chat.fit()
        chat.close()
    used = {name for span in seen.all() for name in facts(span)}
    used |= {name for span in seen.all() for event in span.events for name in facts(event)}
    assert {name for name in used if not name.startswith("refold.")} - {"error.type"} <= NAMES
    assert {"refold.close", "refold.fit", "chat", "invoke_agent scout"} <= set(seen.names())
    page = (Path(__file__).parents[1] / "docs" / "events.md").read_text()
    assert {name for name in used if f"`{name}`" not in page} <= {"gen_ai.agent.name"}


# What tracing may not do


class Broken(SpanProcessor):
    """One that somebody has not tried out."""

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        raise RuntimeError("at the start")

    def on_end(self, span: Any) -> None:
        raise RuntimeError("at the end")


class Useless(TracerProvider):
    def get_tracer(self, *args: Any, **more: Any) -> Any:
        return None


class AtTheEnd(Broken):
    def on_start(self, span: Any, parent_context: Any = None) -> None:
        pass


@pytest.mark.parametrize("broken", [Broken, AtTheEnd, None])
def test_a_tracer_that_breaks_harms_nothing(monkeypatch, broken):
    def view() -> Any:
        chat = begin(tools=EXPIRE, summarizer=Scribe())
        chat.append([user("Go."), *step("c1", output(500, "x")), *step("c2", "ok", "other")])
        told = [chat.fit().messages, chat.expand(2), chat.call("refold_expand", {"at": 2})]
        return told, chat.compact(keep_recent=0).summary_messages

    expected = view()
    provider = TracerProvider() if broken else Useless()
    if broken:
        provider.add_span_processor(broken())
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    assert view() == expected
    assert trace.get_current_span() is trace.INVALID_SPAN


def test_where_opentelemetry_is_loaded_but_not_used_nothing_is_traced(monkeypatch):
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.delenv("OTEL_PYTHON_TRACER_PROVIDER", raising=False)
    assert isinstance(trace.get_tracer_provider(), ProxyTracerProvider)
    assert not telemetry.is_on()
    with telemetry.work("fit", "c") as span:
        span.note({"refold.edits": 1})


def test_refold_never_loads_opentelemetry(tmp_path: Path):
    program = (
        "import refold, sys\n"
        "chat = refold.open('c', store='memory://')\n"
        "chat.append({'role': 'user', 'content': 'Go.'})\n"
        "chat.fit(), chat.close()\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)


def test_a_run_of_an_agent_is_a_span_with_its_requests_and_tools_in_it(seen):
    from refold.agent import Agent
    from refold.testing.stand_in import StandIn

    def price(city: str) -> int:
        """What a city costs."""
        return len(city)

    model = StandIn([Reply(calls=(("price", {"city": SECRET}),)), f"It costs 4, {SECRET}."])
    Agent("buyer", model, [price], config=model.config, store="memory://").run(f"What does {SECRET} cost?")
    run = seen.one("invoke_agent buyer")
    assert run.attributes["gen_ai.agent.name"] == "buyer"
    for name in ("chat stand-in", "execute_tool price", "refold.fit"):
        inside = [span for span in seen.all() if span.name == name]
        assert inside
        assert {span.parent.span_id for span in inside} == {run.context.span_id}, name
    assert SECRET not in seen.words()
