"""The definition of a dialect: the message format of one API, and how its requests are laid out."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from refold.core.message import Message
from refold.dialects.rules.request import Facts, RequestRules
from refold.dialects.shape import OWN, kind_of, stands_apart


class Dialect(msgspec.Struct, frozen=True):
    name: str
    parse: Callable[..., Message]
    """`parse(value, where)` is the message in a value, or raises a MessageError that says where."""
    render: Callable[[Message], tuple[list[dict[str, Any]], list[str]]]
    """The messages to send for a message of another dialect, and what this dialect cannot express of it."""
    rules: type[RequestRules] | None = None
    """The rules for its requests; None if it is only read."""
    blocks: tuple[str, ...] = ()
    """Types of blocks that no other dialect has."""
    unread: Callable[[Any], list[Any]] = lambda value: []
    """What is sent with a value and takes tokens, but is in no part of the parsed message."""
    own_fields: Callable[[Any], Sequence[str]] = lambda value: OWN
    """The fields of a value that are for refold and are not sent."""
    result_type: str | None = None
    """The type of tool results, where they are blocks of a message: those of one step are sent in one."""
    repair: Callable[[Sequence[Any], list[str], Facts], list[Any]] = lambda messages, notices, facts: [
        *messages
    ]
    """`repair(messages, notices, facts)`: messages that the API accepts, and a notice for each change."""
    declare_tool: Callable[[str, str, Any], dict[str, Any]] = lambda name, about, schema: {}
    """The declaration of a tool by its name, its description and the JSON schema of its arguments."""

    list_field: str = "messages"
    """The field of a request that has the messages."""
    system_field: str | None = None
    """The field of a request that has the system text, where that is sent apart from the messages."""
    hoists_system: bool = False
    """System messages at the beginning are sent in the system field, too."""
    has_items: bool = False
    """A message is sent as one or several items; a reply is a list of them."""
    history_fields: tuple[str, ...] = ()
    """Fields of a request that continue a history at the provider."""
    signs_thinking: bool = False
    """Thinking is signed, and some models bind it to what was before it."""

    def stands_apart(self, value: Any) -> bool:
        """True for system text that is sent apart, such as `{"system": …}`."""
        return self.system_field is not None and stands_apart(value, self.system_field)

    def results(self, value: dict[str, Any]) -> list[int]:
        """Indices of the tool results in its content; those of an assistant are the provider's own."""
        content = value.get("content") if self.result_type else None
        if not isinstance(content, list) or value.get("role") == "assistant":
            return []
        return [n for n, block in enumerate(content) if kind_of(block) == self.result_type]
