"""OpenAI Responses: items that its API would refuse, mended one by one."""

from collections.abc import Sequence
from typing import Any

from refold.formats.openai_responses import role_of, tool_id
from refold.formats.shape import kind_of
from refold.repairs.marks import EMPTY, Mended, is_blank

PREFIXES = {"function_call": "fc_", "message": "msg_", "reasoning": "rs_"}


def mend(messages: Sequence[dict[str, Any]], *, store: bool | None = None, **_: Any) -> Mended:
    """The same with every item as the API takes it, and a notice for each repair."""
    notices: list[str] = []
    items = [_item(item, f"input[{n}]", notices) for n, item in enumerate(messages)]
    return Mended(_with_reasoning(_once(items, notices), store, notices), notices)


def _item(item: dict[str, Any], where: str, notices: list[str]) -> dict[str, Any]:
    new = dict(item)
    id, call = item.get("id"), item.get("call_id")
    prefix = PREFIXES.get(kind_of(item) or "")
    if prefix and id is not None and not (isinstance(id, str) and id.startswith(prefix)):
        del new["id"]
        notices.append(f"{where}: the id {id!r} is left out, since it would begin with {prefix}")
    if isinstance(call, str) and tool_id(call) != call:
        new["call_id"] = tool_id(call)
        notices.append(f"{where}: {new['call_id']!r} stands for a call id of {len(call)} characters")
    if kind_of(item) in (None, "message") and is_blank(item.get("content")):
        new["content"] = EMPTY
        notices.append(f"{where}: {EMPTY} stands where nothing was said")
    return item if new == item else new


def _once(items: list[dict[str, Any]], notices: list[str]) -> list[dict[str, Any]]:
    """Without a second call under the id of one that is not answered yet."""
    open: set[Any] = set()
    kept: list[dict[str, Any]] = []
    for item in items:
        kind, call = kind_of(item) or "", item.get("call_id")
        if kind.endswith("_call") and call is not None and call in open:
            notices.append(f"a second call with the id {call!r} is left out")
            continue
        (open.add if kind.endswith("_call") else open.discard)(call)
        kept.append(item)
    return kept


def _with_reasoning(
    items: list[dict[str, Any]], store: bool | None, notices: list[str]
) -> list[dict[str, Any]]:
    """Reasoning stays with what follows from it, or both lose each other."""
    kept: list[dict[str, Any]] = []
    follows: dict[str, Any] | None = None
    for item in reversed(items):
        if kind_of(item) == "reasoning":
            alone = follows is None or role_of(follows) != "assistant"
            if alone or (store is False and not item.get("encrypted_content")):
                notices.append(f"reasoning {item.get('id')!r} is left out: the API would refuse it")
                if not alone and follows is not None and "id" in follows:
                    kept[-1] = follows = {key: value for key, value in follows.items() if key != "id"}
                continue
        kept.append(item)
        follows = item
    return kept[::-1]
