"""All of a request but its messages: what it takes, and what it tells of the rest."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from refold.config.validate import brief_repr
from refold.core.codec import dumps, json_problem, loads
from refold.core.errors import LargePart, SettingError
from refold.dialects.rules.targets import Facts, facts_of
from refold.session.meter import Meter
from refold.session.validate import output_of


class RequestExtras(NamedTuple):
    text: bytes = b"{}"
    """Its JSON, by which it is known again: tools are counted once."""
    meter: Meter | None = None
    counted: int = 0
    output: int | None = None
    """How long an answer it asks for."""
    facts: Facts = Facts()
    system: Any = None
    tools: Any = None

    @classmethod
    def of(cls, text: bytes, meter: Meter) -> "RequestExtras":
        request = loads(text)
        tools, system = request.get("tools"), request.get("system", request.get("instructions"))
        try:
            counted = meter.counter.tools(tools, request.get("tool_choice")) if tools else 0
            counted += meter.apart(request)
        except (TypeError, ValueError, AttributeError, RecursionError) as error:
            raise SettingError(
                "request", f"its tools or system text are not as the API wants them: {error}"
            ) from error
        return cls(text, meter, counted, output_of(request), facts_of(request), system, tools)

    def large_parts(self, ratio: float) -> list[LargePart]:
        """System text and tools, for an `OverBudgetError`; `ratio` is model tokens per counted token."""
        if self.meter is None:
            return []
        system = round(self.meter.counter.system(self.system) * ratio)
        tools = round(self.counted * ratio) - system
        found = [
            LargePart("the system text", "system", system, "shorten it, or let the agent read details"),
            LargePart(
                f"{len(self.tools or ())} in all", "tools", tools, "offer fewer, or shorter descriptions"
            ),
        ]
        return [part for part in found if part.tokens]


NOTHING = RequestExtras()


def beside_text(tools: Sequence[Any] | None, request: Mapping[str, Any]) -> bytes:
    """
    Raises:
        SettingError: they cannot be sent as JSON.
    """
    if not isinstance(tools, list | tuple | None):
        raise SettingError("tools", f"expected a list, got {brief_repr(tools)}")
    given = list(map(_plain, tools)) if tools is not None else request.get("tools")
    for name, value in (("tools", given), ("request", dict(request))):
        problem = json_problem(value)
        if problem and "surrogate" not in problem:
            raise SettingError(name, f"cannot be sent: there is {problem.rstrip(',')} in it")
    return dumps({**request, "tools": given} if given is not None else dict(request))


def _plain(tool: Any) -> Any:
    if not hasattr(tool, "model_dump"):
        return tool
    try:
        return tool.model_dump(mode="json", exclude_unset=True)
    except Exception as error:  # whatever an SDK may raise
        raise SettingError("tools", f"{type(tool).__name__}.model_dump() failed: {error}") from error
