"""OpenTelemetry spans with the `gen_ai` attribute names.

OpenTelemetry is not imported here: spans are recorded if the program has loaded it and set a tracer provider.
Spans have names, numbers and places, never what was said. A failure of tracing never reaches the caller.

>>> with span("refold.fit", {"refold.conversation": "task-42"}) as here:
...     here.note({"refold.edits": 3})
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from refold.models.limits import PROVIDERS

if TYPE_CHECKING:
    from opentelemetry import trace

Value: TypeAlias = str | bool | int | float | Sequence[str] | None
"""None is left out."""
Facts: TypeAlias = Mapping[str, Value]


class TraceSpan:
    """A span for a `with` block; does nothing if the program does not trace."""

    __slots__ = ("_given", "_has_failed", "_manager", "_span")

    def __init__(self, given: "tuple[trace.Tracer, str, Facts, bool] | None") -> None:
        self._given = given
        self._has_failed = False
        self._span: trace.Span | None = None
        self._manager: AbstractContextManager[Any] | None = None

    def note(self, facts: Facts) -> None:
        if self._span is not None:
            with _failing_silently():
                self._span.set_attributes(_without_none(facts))

    def fail(self, kind: str) -> None:
        """Marks the span as failed; `kind` is an exception class, a status, or a word such as timeout.

        The error message is left out: it may quote what was said.
        """
        if self._span is not None:
            self._has_failed = True
            with _failing_silently():
                self._span.set_attribute("error.type", kind)
                self._span.set_status(_api().StatusCode.ERROR)

    def __enter__(self) -> Self:
        if self._given is not None:
            tracer, name, facts, is_call = self._given
            with _failing_silently():
                api = _api()
                kind = api.SpanKind.CLIENT if is_call else api.SpanKind.INTERNAL
                self._span = tracer.start_span(name, kind=kind, attributes=_without_none(facts))
                silent = {"record_exception": False, "set_status_on_exception": False}
                self._manager = api.use_span(self._span, end_on_exit=True, **silent)
                self._manager.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._manager is None:
            return
        with _failing_silently():
            if error is not None and not self._has_failed:
                self.fail(_kind_of(error))
        with _failing_silently():
            self._manager.__exit__(None, None, None)


NO_SPAN = TraceSpan(None)


def span(name: str, facts: Facts, *, is_call: bool = False) -> TraceSpan:
    """`is_call` marks work that waits for another process. An exception that leaves the block is recorded."""
    tracer = _tracer()
    return NO_SPAN if tracer is None else TraceSpan((tracer, name, facts, is_call))


def chat(name: str | None, facts: Facts) -> TraceSpan:
    """A request to a model, named `PROVIDER/MODEL` or otherwise."""
    model = name
    known: dict[str, Value] = {"gen_ai.operation.name": "chat"}
    provider, slash, rest = (name or "").partition("/")
    if slash and provider in PROVIDERS:
        model = rest
        known["gen_ai.provider.name"] = provider
    known["gen_ai.request.model"] = model
    return span(f"chat {model}" if model else "chat", {**known, **facts}, is_call=True)


def agent(name: str, conversation: str) -> TraceSpan:
    facts = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": name,
        **_conversation_facts(conversation),
    }
    return span(f"invoke_agent {name}", facts)


def tool(name: str, conversation: str, call_id: str | None = None) -> TraceSpan:
    facts: Facts = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": name,
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": call_id,
        **_conversation_facts(conversation),
    }
    return span(f"execute_tool {name}", facts)


def work(verb: str, conversation: str) -> TraceSpan:
    """An operation of refold on a conversation, such as `fit`."""
    return span(f"refold.{verb}", _conversation_facts(conversation)) if is_on() else NO_SPAN


def event(name: str, facts: Facts) -> None:
    """Adds an event to the current span, whoever started it."""
    if is_on():
        with _failing_silently():
            _api().get_current_span().add_event(name, _without_none(facts))


def is_on() -> bool:
    return _tracer() is not None


def _tracer() -> "trace.Tracer | None":
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    try:
        provider = api.get_tracer_provider()
        is_set = not isinstance(provider, api.ProxyTracerProvider)  # the default, until one is set
        return _tracer_of(provider) if is_set else None
    except Exception:
        _report()
        return None


@lru_cache(maxsize=1)
def _tracer_of(provider: "trace.TracerProvider") -> "trace.Tracer":
    return provider.get_tracer("refold")


def _api() -> Any:
    return sys.modules["opentelemetry.trace"]


def _conversation_facts(conversation: str) -> dict[str, str]:
    return {"refold.conversation": conversation, "gen_ai.conversation.id": conversation}


def _without_none(facts: Facts) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value is not None}


def _kind_of(error: BaseException) -> str:
    status = getattr(error, "status_code", None)  # errors of the providers' SDKs have it
    return str(status) if isinstance(status, int) else type(error).__qualname__


@contextmanager
def _failing_silently() -> Iterator[None]:
    try:
        yield
    except Exception:
        _report()


def _report() -> None:
    import logging

    logging.getLogger("refold").debug("tracing failed", exc_info=True)
