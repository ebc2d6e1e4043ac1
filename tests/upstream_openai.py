"""Which requests do OpenAI's two APIs refuse?"""

import re
from typing import Any

from upstream_rules import TEXT_MAX, Body, Refusal, encrypted

ROLES = ("system", "assistant", "user", "function", "tool", "developer")
PARTS = ("text", "image_url", "input_audio", "refusal", "audio", "file")
FIELDS = {
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "function_call",
    "refusal",
    "audio",
    "annotations",
}
ITEM_PARTS = {
    "user": ("input_text", "input_image", "input_file", "input_audio"),
    "assistant": ("output_text", "refusal"),
}
ITEM_PARTS["system"] = ITEM_PARTS["developer"] = ITEM_PARTS["user"]
PREFIXES = {"function_call": "fc", "message": "msg", "reasoning": "rs", "compaction": "cmp"}
CALLS = ("function_call", "custom_tool_call", "tool_search_call")
OUTPUTS = ("function_call_output", "custom_tool_call_output", "tool_search_output")
AGAIN = "Remove duplicate items from your input and try again."
THERE = ("previous_response_id", "conversation")


def _missing(name: str) -> Refusal:
    return Refusal(
        "G2", f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter"
    )


def _empty(rule: str, name: str) -> Refusal:
    words = f"Invalid '{name}': empty array. Expected an array with minimum length 1, "
    words += "but got an empty array instead."
    return Refusal(rule, words, param=name, code="empty_array")


def _too_long(rule: str, name: str, what: str, limit: int, length: int) -> Refusal:
    kind = {"string": "a string", "array": "an array"}[what]
    words = f"Invalid '{name}': {what} too long. Expected {kind} with maximum length {limit}, "
    words += f"but got {kind} with length {length} instead."
    return Refusal(rule, words, param=name, code=f"{what}_above_max_length")


def _unsupported(rule: str, name: str, value: Any, known: tuple[str, ...]) -> Refusal:
    *first, last = (f"'{one}'" for one in known)
    words = f"Invalid value: '{value}'. Supported values are: {', '.join(first)}, and {last}."
    return Refusal(rule, words, param=name, code="invalid_value")


def _wrong_type(rule: str, name: str, expected: str, value: Any) -> Refusal:
    names = {dict: "an object", list: "an array", int: "an integer", type(None): "null", str: "a string"}
    got = names.get(type(value), "a number")
    words = f"Invalid type for '{name}': expected {expected}, but got {got} instead."
    return Refusal(rule, words, param=name, code="invalid_type")


# Chat Completions


def check_chat(body: Body) -> None:
    messages = body.get("messages")
    if messages is None:
        raise _missing("messages")
    if not messages:
        raise _empty("G2", "messages")
    for index, message in enumerate(messages):
        _check_shape(message, f"messages[{index}]", index)
    calls: dict[str, int] = {}
    open_calls: list[str] = []
    answerable = False
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            if not answerable:
                raise Refusal(
                    "C7" if index == 0 or messages[index - 1]["role"] in ("system", "developer") else "C1",
                    "Invalid parameter: messages with role 'tool' must be a response to a preceeding message "
                    "with 'tool_calls'.",
                    param=f"messages.[{index}].role",
                )
            name = message.get("tool_call_id")
            if name not in open_calls:
                if name in calls:
                    words = f"Duplicate value for 'tool_call_id' of '{name}' in message[{index}]"
                    raise Refusal(
                        "C1", f"Invalid parameter: {words}.", param=f"messages.[{index}].tool_call_id"
                    )
                words = f"'tool_call_id' of '{name}' not found in 'tool_calls' of previous message."
                raise Refusal("C1", f"Invalid parameter: {words}", param=f"messages.[{index}].tool_call_id")
            open_calls.remove(name)
            continue
        _check_answered(open_calls, index, any(one["role"] == "tool" for one in messages[index:]))
        named = [call["id"] for call in message.get("tool_calls") or []]
        for place, name in enumerate(named):
            if name in calls:
                words = f"Duplicate value for 'tool_call_id' of '{name}' in message[{index}]"
                raise Refusal(
                    "G4", f"Invalid parameter: {words}.", param=f"messages[{index}].tool_calls[{place}].id"
                )
            calls[name] = index
        open_calls, answerable = named, bool(named)
    _check_answered(open_calls, len(messages), False)


def _check_answered(open_calls: list[str], index: int, more_results: bool) -> None:
    if open_calls:
        raise Refusal(
            "C3" if more_results else "C2",
            "An assistant message with 'tool_calls' must be followed by tool messages responding to each "
            "'tool_call_id'. The following tool_call_ids did not have response messages: "
            + ", ".join(open_calls),
            param=f"messages.[{index}].role",
        )


def _check_shape(message: Body, name: str, index: int) -> None:
    if message.get("role") not in ROLES:
        raise _unsupported("C8", f"{name}.role", message.get("role"), ROLES)
    for field in message:
        if field not in FIELDS:
            where = f"{name}.{field}"
            raise Refusal("C8", f"Unknown parameter: '{where}'.", param=where, code="unknown_parameter")
    calls = message.get("tool_calls")
    if calls is not None:
        _check_calls(calls, f"{name}.tool_calls")
    content = message.get("content")
    if content is None:
        if message["role"] == "assistant" and (
            calls or message.get("function_call") or message.get("refusal")
        ):
            return
        words = "Invalid value for 'content': expected a string, got null."
        raise Refusal("C8", words, param=f"messages.[{index}].content")
    if isinstance(content, list):
        if not content:
            raise _empty("C8", f"{name}.content")
        for place, part in enumerate(content):
            if part.get("type") not in PARTS:
                raise _unsupported("C8", f"{name}.content[{place}].type", part.get("type"), PARTS)
    elif not isinstance(content, str):
        raise _wrong_type("C8", f"{name}.content", "one of a string or array of objects", content)
    for text in [content] if isinstance(content, str) else [part.get("text") or "" for part in content]:
        if len(text) > TEXT_MAX:
            raise _too_long("C5", f"{name}.content", "string", TEXT_MAX, len(text))


def _check_calls(calls: list[Body], name: str) -> None:
    if not calls:
        raise _empty("C9", name)
    if len(calls) > 128:
        raise _too_long("C4", name, "array", 128, len(calls))
    for place, call in enumerate(calls):
        where = f"{name}[{place}]"
        if not isinstance(call.get("id"), str):
            raise _missing(f"{where}.id")
        if len(call["id"]) > 40:
            raise _too_long("C6", f"{where}.id", "string", 40, len(call["id"]))
        function = call.get("function") or call.get("custom") or {}
        arguments = function.get("arguments", function.get("input"))
        if not isinstance(arguments, str):
            raise _wrong_type("C10", f"{where}.function.arguments", "a string", arguments)


# Responses


def check_responses(body: Body, own: bool = True) -> None:
    items = body.get("input")
    if isinstance(items, str) or (items is None and body.get("prompt")):
        return
    if items is None:
        raise _missing("input")
    if not items and not any(body.get(name) for name in THERE):
        raise _empty("G2", "input")
    seen: set[str] = set()
    for index, item in enumerate(items):
        _check_item(item, f"input[{index}]")
        if item.get("id") in seen and item.get("type") != "item_reference":
            words = f"Duplicate item found with id {item['id']}."
            raise Refusal("G4", f"{words} {AGAIN}", param="input")
        seen.add(item.get("id") or "")
    _check_pairs(items, any(body.get(name) for name in THERE) or any(map(_is_reference, items)))
    for index, item in enumerate(items):
        if item.get("type") in ("reasoning", "compaction"):
            _check_sealed(item, body.get("store") is not False, own)
        if item.get("type") == "reasoning":
            _check_follows(item, items[index + 1] if index + 1 < len(items) else {})
        reasoned = re.fullmatch(r"(?:fc|msg)_r([0-9a-f]{24})", item.get("id") or "")
        if reasoned and (index == 0 or items[index - 1].get("id") not in (f"rs_{reasoned[1]}", None)):
            _lost_reasoning(item, f"rs_{reasoned[1]}")
        if reasoned and items[index - 1].get("id") is None and items[index - 1].get("type") != "reasoning":
            _lost_reasoning(item, f"rs_{reasoned[1]}")


def _is_reference(item: Body) -> bool:
    return item.get("type") == "item_reference"


def _check_item(item: Body, name: str) -> None:
    kind = item.get("type") or "message"
    if item.get("id") and kind in PREFIXES and not item["id"].startswith(PREFIXES[kind]):
        words = f"Invalid '{name}.id': '{item['id']}'. Expected an ID that begins with '{PREFIXES[kind]}'."
        raise Refusal("R6", words, param=f"{name}.id", code="invalid_value")
    if len(item.get("id") or "") > 64:
        raise _too_long("R6", f"{name}.id", "string", 64, len(item["id"]))
    if len(item.get("call_id") or "") > 64:
        raise _too_long("R7", f"{name}.call_id", "string", 64, len(item["call_id"]))
    if kind == "function_call" and not isinstance(item.get("arguments"), str):
        raise _wrong_type("R1", f"{name}.arguments", "a string", item.get("arguments"))
    if kind == "message":
        known = ITEM_PARTS.get(item.get("role", ""))
        if known is None:
            raise _unsupported("G2", f"{name}.role", item.get("role"), tuple(ITEM_PARTS))
        for place, part in enumerate(item["content"] if isinstance(item.get("content"), list) else []):
            if part.get("type") not in known:
                raise _unsupported("G2", f"{name}.content[{place}]", part.get("type"), known)


def _check_pairs(items: list[Body], at_provider: bool) -> None:
    open_calls: list[str] = []
    named: set[str] = set()
    is_answering = False
    for item in items:
        kind, name = item.get("type"), item.get("call_id")
        if kind in OUTPUTS:
            if name in open_calls:
                open_calls.remove(name)
            elif name is not None and not at_provider:
                words = f"No tool call found for function call output with call_id {name}."
                raise Refusal("R1", words, param="input")
            is_answering = True
        elif kind == "reasoning" or kind in CALLS or item.get("role") == "assistant":
            if is_answering and open_calls:
                _no_output(open_calls[0])
            is_answering = False
            if kind in CALLS and name is not None:
                if name in named:
                    words = f"Duplicate function call found with call_id {name}."
                    raise Refusal("G4", f"{words} {AGAIN}", param="input")
                named.add(name)
                open_calls.append(name)
        elif item.get("role") in ("user", "system", "developer") and is_answering and open_calls:
            _no_output(open_calls[0])
    if open_calls:
        _no_output(open_calls[0])


def _no_output(name: str) -> None:
    raise Refusal("R2", f"No tool output found for function call {name}.", param="input")


def _check_sealed(item: Body, is_stored: bool, own: bool) -> None:
    rule = "R9" if item["type"] == "compaction" else "R5"
    sealed, item_id = item.get("encrypted_content"), item.get("id")
    if sealed is None:
        if not is_stored or item_id is None:
            words = (
                f"Item with id '{item_id}' not found. Items are not persisted when `store` is set to false. "
            )
            words += "Try again with `store` set to true, or remove this item from your input."
            raise Refusal(rule, words, status=404, param="input")
        return
    if not own:
        return
    made = re.fullmatch(r"gAAAAAB([^_]*)_[0-9a-f]{24}==", sealed)
    if not made or sealed != encrypted(f"_{made[1]}", item["type"]):
        words = f"The encrypted content {sealed[:4]}...{sealed[-4:]} could not be verified."
        words += " Reason: Encrypted content could not be decrypted or parsed."
        raise Refusal(rule, words, code="invalid_encrypted_content")
    if item_id is not None and item_id.partition("_")[2] != made[1]:
        words = f"The encrypted content for item {item_id} could not be verified."
        words += " Reason: Encrypted content item_id did not match the target item id."
        raise Refusal(rule, words, code="invalid_encrypted_content")


def _check_follows(item: Body, following: Body) -> None:
    made = following.get("role") == "assistant" or (following.get("type") or "").endswith(
        ("_call", "reasoning")
    )
    other = re.fullmatch(r"(?:fc|msg)_[rp]([0-9a-f]{24})", following.get("id") or "")
    name = item.get("id") or "rs_unknown"
    if not made or (other and item.get("id") and following["id"][-25:] != f"r{name[3:]}"):
        words = f"Item '{name}' of type 'reasoning' was provided without its required following item."
        raise Refusal("R3", words, param="input")


def _lost_reasoning(item: Body, name: str) -> None:
    kind = item.get("type") or "message"
    words = (
        f"Item '{item['id']}' of type '{kind}' was provided without its required 'reasoning' item: '{name}'."
    )
    raise Refusal("R4", words, param="input")
