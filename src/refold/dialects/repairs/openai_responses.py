"""OpenAI Responses: items that its API would refuse, mended one by one."""

from collections.abc import Callable, Sequence
from typing import Any

from refold.dialects.openai_responses import parse, role_of, tool_id
from refold.dialects.repairs.repair import EMPTY, RepairedMessages, is_blank
from refold.dialects.shape import kind_of

RESULTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "function_call": lambda text: {"type": "function_call_output", "output": text},
    "custom_tool_call": lambda text: {"type": "custom_tool_call_output", "output": text},
    "local_shell_call": lambda text: {"type": "local_shell_call_output", "output": text},
    "apply_patch_call": lambda text: {
        "type": "apply_patch_call_output",
        "status": "failed",
        "output": text,
    },
    "shell_call": lambda text: {
        "type": "shell_call_output",
        "output": [{"stdout": "", "stderr": text, "outcome": {"type": "exit", "exit_code": 1}}],
    },
}
"""What a result says of a call that never returned one."""
PREFIXES = {"function_call": "fc_", "message": "msg_", "reasoning": "rs_"}


def repair(messages: Sequence[dict[str, Any]], *, store: bool | None = None, **_: Any) -> RepairedMessages:
    """The same with every item as the API takes it, and a notice for each repair."""
    notices: list[str] = []
    items = [_item(item, f"input[{n}]", notices) for n, item in enumerate(messages)]
    items = _answered_in_kind(_once(items, notices), notices)
    return RepairedMessages(_with_reasoning(items, store, notices), notices)


def unique_ids(value: Any, ids: Sequence[str]) -> Any:
    """An item, or those of one answer, with these ids for its calls, or for the call that it answers."""
    own = map(tool_id, ids)
    items = [
        {**item, "call_id": next(own)} if (said := parse(item)).calls or said.results else item
        for item in (value if isinstance(value, list) else [value])
    ]
    return items if isinstance(value, list) else items[0]


def _item(item: dict[str, Any], where: str, notices: list[str]) -> dict[str, Any]:
    new = dict(item)
    id, call = item.get("id"), item.get("call_id")
    prefix = PREFIXES.get(kind_of(item) or "message")
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
        kind, call = kind_of(item) or "", _call_id(item)
        if kind.endswith("_call") and call is not None and call in open:
            notices.append(f"a second call with the id {call!r} is left out")
            continue
        (open.add if kind.endswith("_call") else open.discard)(call)
        kept.append(item)
    return kept


def _answered_in_kind(items: list[dict[str, Any]], notices: list[str]) -> list[dict[str, Any]]:
    """Each kind of call has its own kind of result. A picture of a screen cannot be made up: both go."""
    made: dict[str | None, int] = {}
    new: list[dict[str, Any] | None] = list(items)
    for n, item in enumerate(items):
        kind, id = kind_of(item) or "", _call_id(item)
        if kind.endswith("_call"):
            made[id] = n
        if not kind.endswith("_output") or id is None or id not in made:
            continue
        asked = kind_of(items[made[id]]) or ""
        if kind == f"{asked}_output" or asked == "tool_search_call":
            continue
        notices.append(f"input[{n}]: a {kind} is no result of a {asked}")
        text = item.get("output")
        new[n] = None
        if asked in RESULTS:
            new[n] = {**RESULTS[asked](text if isinstance(text, str) else str(text)), "call_id": id}
        else:
            new[made[id]] = None
    return [item for item in new if item is not None]


def _call_id(item: dict[str, Any]) -> str | None:
    id = item.get("call_id")
    return id if isinstance(id, str) else None


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
