"""OpenTelemetry spans with the `gen_ai` attribute names.

OpenTelemetry is not imported here: spans are recorded if the program has loaded it and set a tracer provider.
Spans have names, numbers and places, never what was said. A failure of tracing never reaches the caller.

>>> with span("refold.fit", {"refold.conversation": "task-42"}) as here:
...     here.note({"refold.edits": 3})
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from refold.models.limits import PROVIDERS

if TYPE_CHECKING:
    from opentelemetry import trace

Value: TypeAlias = str | bool | int | float | Sequence[str] | None
"""None is left out."""
Facts: TypeAlias = Mapping[str, Value]


class TraceSpan:
    """A span that is being recorded; does nothing if the program does not trace."""

    def __init__(self, recorded: "trace.Span | None") -> None:
        self._recorded = recorded
        self.has_failed = False

    def note(self, facts: Facts) -> None:
        if self._recorded is not None:
            with _failing_silently():
                self._recorded.set_attributes(_without_none(facts))

    def fail(self, kind: str) -> None:
        """Marks the span as failed; `kind` is an exception class, a status, or a word such as timeout.

        The error message is left out: it may quote what was said.
        """
        if self._recorded is not None:
            self.has_failed = True
            with _failing_silently():
                self._recorded.set_attribute("error.type", kind)
                self._recorded.set_status(_api().StatusCode.ERROR)


@contextmanager
def span(name: str, facts: Facts, *, is_call: bool = False) -> Iterator[TraceSpan]:
    """`is_call` marks work that waits for another process. An exception that leaves the block is recorded."""
    tracer = _tracer()
    here = TraceSpan(None)
    if tracer is None:
        yield here
        return
    with ExitStack() as stack:
        with _failing_silently():
            api = _api()
            kind = api.SpanKind.CLIENT if is_call else api.SpanKind.INTERNAL
            recorded = tracer.start_span(name, kind=kind, attributes=_without_none(facts))
            silent = {"record_exception": False, "set_status_on_exception": False}
            manager = api.use_span(recorded, end_on_exit=True, **silent)
            manager.__enter__()
            stack.callback(_end, manager)
            here = TraceSpan(recorded)
        try:
            yield here
        except BaseException as error:
            if not here.has_failed:
                here.fail(_kind_of(error))
            raise


def _end(manager: AbstractContextManager[Any]) -> None:
    with _failing_silently():
        manager.__exit__(None, None, None)


def chat(name: str | None, facts: Facts) -> AbstractContextManager[TraceSpan]:
    """A request to a model, named `PROVIDER/MODEL` or otherwise."""
    model = name
    known: dict[str, Value] = {"gen_ai.operation.name": "chat"}
    provider, slash, rest = (name or "").partition("/")
    if slash and provider in PROVIDERS:
        model = rest
        known["gen_ai.provider.name"] = provider
    known["gen_ai.request.model"] = model
    return span(f"chat {model}" if model else "chat", {**known, **facts}, is_call=True)


def agent(name: str, conversation: str) -> AbstractContextManager[TraceSpan]:
    facts = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": name,
        **_conversation_facts(conversation),
    }
    return span(f"invoke_agent {name}", facts)


def tool(name: str, conversation: str, call_id: str | None = None) -> AbstractContextManager[TraceSpan]:
    facts: Facts = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": name,
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": call_id,
        **_conversation_facts(conversation),
    }
    return span(f"execute_tool {name}", facts)


def work(verb: str, conversation: str) -> AbstractContextManager[TraceSpan]:
    """An operation of refold on a conversation, such as `fit`."""
    return span(f"refold.{verb}", _conversation_facts(conversation))


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
