"""Is a request valid for the API it goes to?

>>> [v.rule for v in check("openai-chat", [{"role": "tool", "tool_call_id": "a", "content": "4"}])]
['C7']
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from refold.core.check import Violation
from refold.core.lazy import Lazy
from refold.dialects.rules.judge import Facts, Judge, quote, unfit

JUDGES: Lazy[type[Judge]] = Lazy(
    {
        "openai-chat": "refold.dialects.rules.openai_chat:ChatRules",
        "openai-responses": "refold.dialects.rules.openai_responses:ResponsesRules",
        "anthropic": "refold.dialects.rules.anthropic:AnthropicRules",
        "ai-sdk": "refold.dialects.rules.ai_sdk:AiSdkRules",
    }
)
NOTHING_KNOWN = Facts()


def check(dialect: str, messages: Iterable[Any], facts: Facts = NOTHING_KNOWN) -> list[Violation]:
    """Which rules of the dialect's API the messages break, and where."""
    judge = JUDGES[dialect](facts)
    judge.feed(messages)
    return judge.violations


def check_request(dialect: str, request: Mapping[str, Any], **known: Any) -> list[Violation]:
    """The same for a whole request body, which tells the facts, except for those that are `known` otherwise.

    >>> check_request("openai-responses", {"model": "gpt-5", "input": "Hello"}, tokens=9, room=100)
    []
    """
    facts = msgspec.structs.replace(facts_of(request), **known)
    field = "input" if dialect == "openai-responses" else "messages"
    messages = request.get(field)
    if field == "input" and isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if messages is not None and not isinstance(messages, list):
        problem = f"Not shaped like a request of this API: `{field}` is {quote(messages)}, not a list"
        return [Violation("S1", 0, problem)]
    found = check(dialect, messages or [], facts)
    rest = {name: value for name, value in request.items() if name != field}
    if flaw := unfit(rest):
        found.insert(0, Violation("G1", 0, f"The request has {flaw}; it must be JSON in UTF-8"))
    return found


def facts_of(request: Mapping[str, Any]) -> Facts:
    """What the fields of a request tell besides its messages."""
    store, thinking = request.get("store"), request.get("thinking")
    return Facts(
        store=store if isinstance(store, bool) else None,
        stored_elsewhere=any(request.get(name) for name in ("previous_response_id", "conversation")),
        marks=sum(map(marked, [request, *_list(request.get("system")), *_list(request.get("tools"))])),
        thinking_anywhere=isinstance(thinking, Mapping) and thinking.get("type") == "adaptive",
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def marked(value: Any) -> bool:
    """It has a cache mark of its own."""
    return isinstance(value, Mapping) and value.get("cache_control") is not None
