"""Converts between the messages of Microsoft's Agent Framework and ours, and restores recorded ones."""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from agent_framework import Content
from agent_framework import Message as FrameworkMessage

from refold.adapters.conversation import AGAIN
from refold.core.message import Media, Message, Opaque, Part, Reasoning, Role, Text, ToolCall, ToolResult

DIALECT = "agent-framework"
REFOLD = "refold"
"""Marks messages that replace others, and is the reason why those are excluded."""
ROLES: dict[str, Role] = {"user": "user", "assistant": "assistant", "tool": "tool", "system": "system"}
GENERATED_ID = re.compile(r"msg_\d{1,9}")
"""Ids that the framework makes of list indices: another message may get the same one later."""
CONTENT_ID = re.compile(r"said-[0-9a-f]{24}")
"""Ids of messages without one of their own, as `content_id` makes them."""
APPROVALS = {"function_approval_request", "function_approval_response"}
"""Contents between the user and the framework, which drops them when they are settled."""
UNRECORDED_FIELDS = ("raw_representation", "exception")


def has_content(message: FrameworkMessage) -> bool:
    return not {content.type for content in message.contents} <= APPROVALS


class AgentFrameworkConverter:
    def __init__(self) -> None:
        self.authors: WeakKeyDictionary[FrameworkMessage, str] = WeakKeyDictionary()
        """Authors of answers that are recorded before the framework names them."""

    def parse(self, message: FrameworkMessage) -> Message:
        # Results come first, except in messages of an assistant: in this order they are recorded.
        results_first = message.role != "assistant"
        contents = [content for content in message.contents if content.type not in APPROVALS]
        contents.sort(key=lambda content: (content.type == "function_result") != results_first)
        parts = tuple(map(_part, contents))
        meta = _other_fields(message, contents, parts)
        if message.author_name is None and message in self.authors:
            meta["author_name"] = self.authors[message]  # it is not sent yet, so it is not counted
        role = ROLES.get(message.role, "user")
        return Message(
            role, parts, _own_id(message), meta={DIALECT: meta} if meta else None, name=message.author_name
        )

    def render(self, message: Message, original: FrameworkMessage | None) -> FrameworkMessage:
        known = [(_part(content), content) for content in original.contents] if original else []
        contents: list[Content] = []
        for part in message.parts:
            content = next((content for one, content in known if one == part), None)
            if content is None and isinstance(part, ToolResult):
                like = next((content for _, content in known if content.call_id == part.call_id), None)
                content = _result(part, like)
            contents.append(content or _content(part))
        return FrameworkMessage(
            original.role if original else message.role,
            contents,
            author_name=original.author_name if original else message.name,
            additional_properties={REFOLD: True},
        )


def _own_id(message: FrameworkMessage) -> str | None:
    id = message.message_id
    return None if not id or GENERATED_ID.fullmatch(id) else id


def _part(content: Content) -> Any:
    match content.type:
        case "text":
            return Text(content.text or "")
        case "text_reasoning":
            return Reasoning(content.text or "")
        case "function_call":
            arguments = content.arguments
            text = arguments if isinstance(arguments, str) else json.dumps(_to_json(arguments or {}))
            return ToolCall(content.call_id or "", content.name or "", text)
        case "function_result":
            items = tuple(map(_part, content.items or ()))
            is_text = all(isinstance(item, Text) for item in items)
            output = str(content.result or "") if is_text else items
            return ToolResult(content.call_id or "", output, is_error=content.exception is not None)
        case "data" | "uri":
            kind: Any = (content.media_type or "").partition("/")[0]
            kind = kind if kind in ("image", "audio") else "file"
            return Media(kind, content.uri, mime=content.media_type, name=content.name)
    return Opaque(_to_json(content.to_dict()), DIALECT)


def _content(part: Part) -> Content:
    match part:
        case Text(text=text):
            return Content.from_text(text)
        case Reasoning(text=text):
            return Content.from_text_reasoning(text=text)
        case ToolCall(call_id=id, tool=tool, input=arguments):
            return Content.from_function_call(id, tool, arguments=arguments)
        case ToolResult():
            return _result(part, None)
        case Media(url=url, data=data, mime=mime, name=name):
            url = url or f"data:{mime};base64,{data}"
            return Content("data" if url.startswith("data:") else "uri", uri=url, media_type=mime, name=name)
        case Opaque(value=value, dialect=dialect) if dialect == DIALECT:
            return Content.from_dict(value)
    return Content.from_text("")


def _result(part: ToolResult, original: Content | None) -> Content:
    output = part.output
    return Content.from_function_result(
        part.call_id,
        id=original.id if original else None,
        result=output if isinstance(output, str) else [_content(one) for one in output],
        exception="failed" if part.is_error else None,
        additional_properties=original.additional_properties if original else None,
    )


def _other_fields(
    message: FrameworkMessage, contents: Sequence[Content], parts: Iterable[Part]
) -> dict[str, Any]:
    """What a message has that its parts do not, for `restored`."""
    fields: dict[str, Any] = {}
    more = [_other_content_fields(content, part) for content, part in zip(contents, parts, strict=True)]
    if any(more):
        fields["contents"] = more
    own = {name: value for name, value in message.additional_properties.items() if not name.startswith("_")}
    if own:
        fields["additional_properties"] = _to_json(own)
    has_results = any(content.type == "function_result" for content in contents)
    if message.role not in ROLES or (has_results and message.role != "tool"):
        fields["role"] = message.role
    return fields


def _other_content_fields(content: Content, part: Part) -> dict[str, Any]:
    rendered = vars(_content(part))
    more: dict[str, Any] = {}
    for name, value in vars(content).items():
        if rendered.get(name) != value and name not in UNRECORDED_FIELDS:
            more[name] = value
    return _to_json(more) if more else {}


def restored(stored: Sequence[Message]) -> FrameworkMessage:
    """A message as the framework passed it, from all the parts that it is stored in."""
    first = stored[0]
    meta = first.meta.get(DIALECT, {}) if isinstance(first.meta, dict) else {}
    parts = [part for message in stored for part in message.parts]
    more = [*meta.get("contents", ()), *({} for _ in parts)]
    id = str(first.id).partition(AGAIN)[0]
    return FrameworkMessage(
        meta.get("role", first.role),
        [Content.from_dict({**_content(part).to_dict(), **more[n]}) for n, part in enumerate(parts)],
        author_name=meta.get("author_name", first.name),
        message_id=None if CONTENT_ID.fullmatch(id) else id,
        additional_properties=meta.get("additional_properties"),
    )


def _to_json(value: Any) -> Any:
    def default(one: Any) -> Any:
        return one.to_dict() if isinstance(one, Content) else str(one)

    return msgspec.json.decode(json.dumps(value, default=default))
