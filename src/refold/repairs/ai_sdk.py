"""The AI SDK: messages that it would refuse, mended one by one."""

from collections.abc import Sequence
from typing import Any

from refold.formats.shape import kind_of
from refold.repairs.marks import Mended


def mend(messages: Sequence[dict[str, Any]], **_: Any) -> Mended:
    """The same without a second call of the same id in a message, and a notice for each repair."""
    notices: list[str] = []
    return Mended([_once(message, n, notices) for n, message in enumerate(messages)], notices)


def _once(message: dict[str, Any], n: int, notices: list[str]) -> dict[str, Any]:
    content = message.get("content")
    seen: set[Any] = set()
    kept: list[Any] = []
    for part in content if isinstance(content, list) else ():
        id = part.get("toolCallId") if kind_of(part) == "tool-call" else None
        if id is not None and id in seen:
            notices.append(f"messages[{n}]: a second call with the id {id!r} is left out")
            continue
        seen.add(id)
        kept.append(part)
    return {**message, "content": kept} if isinstance(content, list) and kept != content else message
