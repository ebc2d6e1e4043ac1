"""How Microsoft's Agent Framework says things, and how it gets back what it gave."""

import json
import re
from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from agent_framework import Content
from agent_framework import Message as Given

from refold.adapters.synced_history import AGAIN
from refold.core.message import Media, Message, Opaque, Part, Reasoning, Role, Text, ToolCall, ToolResult

DIALECT = "agent-framework"
REFOLD = "refold"
"""Marks messages that stand for others, and why those are left out."""
ROLES: dict[str, Role] = {"user": "user", "assistant": "assistant", "tool": "tool", "system": "system"}
NUMBERED = re.compile(r"msg_\d{1,9}")
"""Ids that the framework makes up from places in a list: another message may have the same one day."""
DIGEST = re.compile(r"said-[0-9a-f]{24}")
"""Ids of messages that have none of their own."""
APPROVALS = {"function_approval_request", "function_approval_response"}
"""Between the user and the framework, which drops them when they are settled."""
PASSING = ("raw_representation", "exception")
"""What is not kept of a content: of a failure, only that it was one."""


class Words:
    content_of = attrgetter("contents")

    def __init__(self) -> None:
        self.authors: WeakKeyDictionary[Given, str] = WeakKeyDictionary()
        """Of answers that are stored before the framework names their authors."""

    def mark(self, message: Given) -> Hashable:
        said = [_glance(content) for content in message.contents if content.type not in APPROVALS]
        return (_id(message), message.role, *said)

    def read(self, message: Given) -> Message:
        said = [content for content in message.contents if content.type not in APPROVALS]
        contents = sorted(said, key=partial(_is_last, message.role))
        parts = tuple(map(_part, contents))
        meta = _beyond(message, contents, parts)
        if message.author_name is None and message in self.authors:
            meta["author_name"] = self.authors[message]  # it is not sent yet, and takes no room
        about = {DIALECT: meta} if meta else None
        role = ROLES.get(message.role, "user")
        return Message(role, parts, _id(message), meta=about, name=message.author_name)

    def write(self, message: Message, original: Given | None) -> Given:
        known = [(_part(content), content) for content in original.contents] if original else []

        def content(part: Part) -> Content:
            same = next((one for other, one in known if other == part), None)
            if same is not None or not isinstance(part, ToolResult):
                return same or _content(part)
            return _result(part, next((one for _, one in known if one.call_id == part.call_id), None))

        return Given(
            original.role if original else message.role,
            [content(part) for part in message.parts],
            author_name=original.author_name if original else message.name,
            additional_properties={REFOLD: True},
        )


def says(message: Given) -> bool:
    """Something, and not only to the framework itself."""
    return not {content.type for content in message.contents} <= APPROVALS


def _id(message: Given) -> str | None:
    id = message.message_id
    return None if not id or NUMBERED.fullmatch(id) else id


def _is_last(role: str, content: Content) -> bool:
    """Results come first, but after what an assistant says: so they are stored."""
    return _is_result(content) == (role == "assistant")


def _is_result(content: Content) -> bool:
    return bool(content.type == "function_result")


def _glance(content: Content) -> Hashable:
    seen: Hashable
    match content.type:
        case "text":
            seen = content.text
        case "function_result":
            seen = (content.call_id, str(content.result), len(content.items or ()))
        case "function_call":
            seen = (content.call_id, str(content.arguments))
        case "data" | "uri":
            seen = content.uri
        case _:
            seen = repr(content.to_dict())
    return seen


def _part(content: Content) -> Any:
    match content.type:
        case "text":
            return Text(content.text or "")
        case "text_reasoning":
            return Reasoning(content.text or "")
        case "function_call":
            arguments = content.arguments
            text = arguments if isinstance(arguments, str) else json.dumps(_plain(arguments or {}))
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
    return Opaque(_plain(content.to_dict()), DIALECT)


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


def _result(part: ToolResult, like: Content | None) -> Content:
    output = part.output
    return Content.from_function_result(
        part.call_id,
        id=like.id if like else None,
        result=output if isinstance(output, str) else [_content(one) for one in output],
        exception="failed" if part.is_error else None,
        additional_properties=like.additional_properties if like else None,
    )


# What only the framework understands


def _beyond(message: Given, contents: Sequence[Content], parts: Iterable[Part]) -> dict[str, Any]:
    """What a message has that its parts do not say."""
    more = [_more(content, part) for content, part in zip(contents, parts, strict=True)]
    own = {name: value for name, value in message.additional_properties.items() if not name.startswith("_")}
    is_plain = message.role == "tool" or (message.role in ROLES and not any(map(_is_result, contents)))
    found = {
        "contents": more if any(more) else None,
        "additional_properties": _plain(own),
        "role": None if is_plain else message.role,
    }
    return {name: value for name, value in found.items() if value}


def _more(content: Content, part: Part) -> dict[str, Any]:
    said = vars(_content(part))
    more = {name: value for name, value in vars(content).items() if said.get(name) != value}
    return _plain({name: value for name, value in more.items() if name not in PASSING}) if more else {}


def told(said: Sequence[Message]) -> Given:
    """A message as it was given, from all the parts that it is stored in."""
    first = said[0]
    meta = first.meta.get(DIALECT, {}) if isinstance(first.meta, dict) else {}
    parts = [part for message in said for part in message.parts]
    more = [*meta.get("contents", ()), *({} for _ in parts)]
    id = str(first.id).partition(AGAIN)[0]
    return Given(
        meta.get("role", first.role),
        [Content.from_dict({**_content(part).to_dict(), **more[n]}) for n, part in enumerate(parts)],
        author_name=meta.get("author_name", first.name),
        message_id=None if DIGEST.fullmatch(id) else id,
        additional_properties=meta.get("additional_properties"),
    )


def _plain(value: Any) -> Any:
    def inner(one: Any) -> Any:
        return one.to_dict() if isinstance(one, Content) else str(one)

    return msgspec.json.decode(json.dumps(value, default=inner))
