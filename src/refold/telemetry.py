"""What refold does, as OpenTelemetry spans with the `gen_ai` names, in programs that trace.

Nothing is imported here: a program traces if it has loaded OpenTelemetry and set a tracer provider. Spans
have names, numbers and places, never what was said. Whatever goes wrong with tracing stays in this file.

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
    """A piece of work in a `with` block; where nobody traces, nothing at all."""

    __slots__ = ("_given", "_has_failed", "_manager", "_span")

    def __init__(self, given: "tuple[trace.Tracer, str, Facts, bool] | None") -> None:
        self._given, self._has_failed = given, False
        self._span: trace.Span | None = None
        self._manager: AbstractContextManager[Any] | None = None

    def note(self, facts: Facts) -> None:
        if self._span is not None:
            with _unharmed():
                self._span.set_attributes(_known(facts))

    def fail(self, kind: str) -> None:
        """It came to nothing; the kind of error is a class, a status, or a word such as timeout.

        What the error says is left out: it may quote what was said.
        """
        if self._span is not None:
            self._has_failed = True
            with _unharmed():
                self._span.set_attribute("error.type", kind)
                self._span.set_status(_api().StatusCode.ERROR)

    def __enter__(self) -> Self:
        if self._given is not None:
            tracer, name, facts, is_call = self._given
            with _unharmed():
                api = _api()
                kind = api.SpanKind.CLIENT if is_call else api.SpanKind.INTERNAL
                self._span = tracer.start_span(name, kind=kind, attributes=_known(facts))
                silent = {"record_exception": False, "set_status_on_exception": False}
                self._manager = api.use_span(self._span, end_on_exit=True, **silent)
                self._manager.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._manager is None:
            return
        with _unharmed():
            if error is not None and not self._has_failed:
                self.fail(_kind_of(error))
        with _unharmed():
            self._manager.__exit__(None, None, None)


NOWHERE = TraceSpan(None)


def span(name: str, facts: Facts, *, is_call: bool = False) -> TraceSpan:
    """`is_call`: it waits for something outside of this process. An error that leaves the block is noted."""
    tracer = _tracer()
    return NOWHERE if tracer is None else TraceSpan((tracer, name, facts, is_call))


def chat(name: str | None, facts: Facts) -> TraceSpan:
    """A request to a model, named `PROVIDER/MODEL` or as it likes."""
    provider, slash, rest = (name or "").partition("/")
    is_known = bool(slash) and provider in PROVIDERS
    model = rest if is_known else name
    named: Facts = {"gen_ai.provider.name": provider if is_known else None, "gen_ai.request.model": model}
    facts = {"gen_ai.operation.name": "chat", **named, **facts}
    return span(f"chat {model}" if model else "chat", facts, is_call=True)


def agent(name: str, conversation: str) -> TraceSpan:
    """A run of an agent."""
    facts = {"gen_ai.agent.name": name, **_of(conversation)}
    return span(f"invoke_agent {name}", {"gen_ai.operation.name": "invoke_agent", **facts})


def tool(name: str, conversation: str, call_id: str | None = None) -> TraceSpan:
    """A tool at work, in this process."""
    facts: Facts = {"gen_ai.tool.name": name, "gen_ai.tool.type": "function", "gen_ai.tool.call.id": call_id}
    known = {"gen_ai.operation.name": "execute_tool", **facts, **_of(conversation)}
    return span(f"execute_tool {name}", known)


def work(verb: str, conversation: str) -> TraceSpan:
    """Something that refold does with a conversation."""
    return span(f"refold.{verb}", _of(conversation)) if is_on() else NOWHERE


def event(name: str, facts: Facts) -> None:
    """Something that happened, told to the span that is under way here, whoever made it."""
    if is_on():
        with _unharmed():
            _api().get_current_span().add_event(name, _known(facts))


def is_on() -> bool:
    return _tracer() is not None


def _tracer() -> "trace.Tracer | None":
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    try:
        provider = api.get_tracer_provider()
        is_set = not isinstance(provider, api.ProxyTracerProvider)  # some SDKs load only that
        return _tracer_of(provider) if is_set else None
    except Exception:
        _report()
        return None


@lru_cache(maxsize=1)
def _tracer_of(provider: "trace.TracerProvider") -> "trace.Tracer":
    return provider.get_tracer("refold")


def _api() -> Any:
    return sys.modules["opentelemetry.trace"]


def _of(conversation: str) -> dict[str, str]:
    return {"refold.conversation": conversation, "gen_ai.conversation.id": conversation}


def _known(facts: Facts) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value is not None}


def _kind_of(error: BaseException) -> str:
    status = getattr(error, "status_code", None)  # as the errors of the SDKs have it
    return str(status) if isinstance(status, int) else type(error).__qualname__


@contextmanager
def _unharmed() -> Iterator[None]:
    try:
        yield
    except Exception:
        _report()


def _report() -> None:
    import logging

    logging.getLogger("refold").debug("tracing failed", exc_info=True)
