"""Checks whether a request is valid for the API it is sent to.

>>> [v.rule for v in check("openai-chat", [{"role": "tool", "tool_call_id": "a", "content": "4"}])]
['C7']
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from refold.dialects.registry import DIALECTS
from refold.dialects.rules.request import Facts, RequestRules, Violation, has_cache_mark, json_fault, quote

RULES: dict[str, type[RequestRules]] = {
    name: dialect.rules for name, dialect in DIALECTS.items() if dialect.rules is not None
}
NO_FACTS = Facts()


def check(dialect: str, messages: Iterable[Any], facts: Facts = NO_FACTS) -> list[Violation]:
    """Which rules of the dialect's API the messages break, and where."""
    rules = RULES[dialect](facts)
    rules.feed(messages)
    return rules.violations


def check_request(dialect: str, request: Mapping[str, Any], **known: Any) -> list[Violation]:
    """Check a whole request body. The facts are read from it, except for those that are `known` otherwise.

    >>> check_request("openai-responses", {"model": "gpt-5", "input": "Hello"}, tokens=9, room=100)
    []
    """
    facts = msgspec.structs.replace(facts_of(request), **known)
    field = DIALECTS[dialect].list_field
    messages = request.get(field)
    if field == "input" and isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if messages is not None and not isinstance(messages, list):
        problem = f"The request does not have the shape that this API expects: `{field}` is {quote(messages)}"
        return [Violation("S1", 0, f"{problem}, not a list")]
    found = check(dialect, messages or [], facts)
    rest = {name: value for name, value in request.items() if name != field}
    if fault := json_fault(rest):
        found.insert(0, Violation("G1", 0, f"The request has {fault}; a request must be JSON in UTF-8"))
    return found


def facts_of(request: Mapping[str, Any]) -> Facts:
    """The facts that the fields of a request tell besides its messages."""
    store, thinking = request.get("store"), request.get("thinking")
    marked = [request]
    for field in ("system", "tools"):
        if isinstance(values := request.get(field), list):
            marked += values
    return Facts(
        store=store if isinstance(store, bool) else None,
        stored_elsewhere=any(request.get(name) for name in ("previous_response_id", "conversation")),
        marks=sum(map(has_cache_mark, marked)),
        thinking_anywhere=isinstance(thinking, Mapping) and thinking.get("type") == "adaptive",
    )
