"""For LiteLLM: `litellm.callbacks = [RefoldHook(store=…)]`.

LiteLLM stores nothing, so each request names its conversation: by `metadata.refold_conversation`, or by a
session id, under which the first conversation of the session is found. Otherwise its history identifies it.
"""

import asyncio
import warnings
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from hashlib import blake2b
from itertools import accumulate, takewhile
from threading import Lock
from typing import Any, NamedTuple, Unpack
from uuid import uuid4

import litellm
import msgspec
from litellm.exceptions import BadRequestError, ContextWindowExceededError
from litellm.integrations.custom_logger import CustomLogger

from refold.adapters.conversation import (
    WARM_CONVERSATIONS,
    AdapterConversation,
    AdapterConversations,
    AdapterOptions,
    ModelCall,
    declare_function,
    lookup_tools,
)
from refold.core.errors import MessageError, OverBudgetError
from refold.core.message import Message, Text, Usage
from refold.dialects import openai_chat
from refold.session.history_sync import content_digest

CHAT_CALLS = ("completion", "acompletion")
"""Other calls are not fitted."""
SYSTEM_ROLES = ("system", "developer")
MASTER_KEY = "litellm_proxy_master_key"
"""Requests with the proxy's master key belong to the default owner, like those without a proxy."""
MOST_REMEMBERED = 5_000
"""Conversations, and requests under way, that are remembered."""


class ChatMessage(NamedTuple):
    """A message, as a dict or as an object of a reply, and what it says."""

    value: Any
    message: Message
    digest: bytes

    @classmethod
    def of(cls, value: Any) -> "ChatMessage":
        fields = _as_dict(value)
        parsed = openai_chat.parse(fields)
        parts = tuple(part for part in parsed.parts if part != Text(""))
        message = msgspec.structs.replace(parsed, parts=parts, usage=_usage(fields.get("usage")))
        return cls(value, message, content_digest(message))


class ConversationId(NamedTuple):
    name: str
    owner: str | None


class _PendingRequest(NamedTuple):
    """A request that waits for its answer."""

    conversation: ConversationId
    last: ChatMessage
    message_count: int
    """Messages in the conversation when the request was made."""
    history_hash: int | None
    """Of the request's messages, if they identified the conversation."""


class RefoldHook(CustomLogger):
    """Fits the requests of `acompletion`, routers and the proxy. Serves many conversations at once."""

    def __init__(self, **options: Unpack[AdapterOptions]) -> None:
        super().__init__()
        self._conversations = AdapterConversations(LiteLLMConverter(), **options)
        self._pending: OrderedDict[str, _PendingRequest] = OrderedDict()
        """By LiteLLM's id of the call."""
        self._by_history: OrderedDict[int, ConversationId] = OrderedDict()
        """Conversations by the hash of their newest history."""
        self._read: OrderedDict[bytes, tuple[list[Any], list[ChatMessage]]] = OrderedDict()
        """The last request's messages, and what they say, by the digest of the first one."""
        self._lock = Lock()

    # For the caller's own loop

    def tools(self) -> list[dict[str, Any]]:
        """refold_expand and refold_search, for `tools=[…]`. `call` runs them."""
        return [declare_function(**about) for about in lookup_tools()]

    def call(self, name: str, arguments: Any, *, conversation: str) -> str:
        """The result of refold_expand or refold_search; a wrong call gets a sentence for the model."""
        return self._conversations.get(conversation).call(name, arguments)

    def completion(self, model: str, messages: Sequence[Any], **request: Any) -> Any:
        """A fitted `litellm.completion`, which calls no callback before it sends a request."""
        id = request.setdefault("litellm_call_id", str(uuid4()))
        response = litellm.completion(**self._fit({**request, "model": model, "messages": messages}))
        if not request.get("stream"):
            self._record_answer(id, response)
        return response

    # What LiteLLM calls

    async def async_pre_call_deployment_hook(
        self, kwargs: dict[str, Any], call_type: Any
    ) -> dict[str, Any] | None:
        """Before each attempt, when the deployment and so the model is known."""
        return await asyncio.to_thread(self._fit, kwargs) if call_type in CHAT_CALLS else None

    async def async_pre_call_hook(
        self, user_api_key_dict: Any, cache: Any, data: dict[str, Any], call_type: Any
    ) -> dict[str, Any] | None:
        """For calls by hand: requests through the proxy are fitted when their deployment is known."""
        if "proxy_server_request" in data or call_type not in CHAT_CALLS:
            return None
        return await asyncio.to_thread(self._fit, data)

    async def async_post_call_success_deployment_hook(
        self, request_data: Any, response: Any, call_type: Any
    ) -> None:
        await asyncio.to_thread(self._record_answer, request_data.get("litellm_call_id"), response)

    async def async_log_success_event(
        self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any
    ) -> None:
        """After a stream, or if the answer came from LiteLLM's cache."""
        await asyncio.to_thread(self._record_answer, kwargs.get("litellm_call_id"), response_obj)

    def log_success_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
        """In another thread; without a stream, `completion` records the answer before it returns."""
        if kwargs.get("stream"):
            self._record_answer(kwargs.get("litellm_call_id"), response_obj)

    def log_pre_api_call(self, model: Any, messages: Any, kwargs: Any) -> None:
        if kwargs.get("call_type") == "completion" and kwargs.get("litellm_call_id") not in self._pending:
            _warn("litellm.completion was not fitted: call RefoldHook.completion instead")

    # Requests and answers

    def _fit(self, request: dict[str, Any]) -> dict[str, Any]:
        messages = request.get("messages")
        if messages is None:
            _warn("acompletion was not fitted: give `messages` by keyword")
            return request
        system = list(takewhile(lambda message: _field(message, "role") in SYSTEM_ROLES, messages))
        call = ModelCall(
            "\n\n".join(_text(_field(message, "content")) for message in system) or None,
            request.get("tools") or (),
            request.get("model"),
            request.get("max_completion_tokens") or request.get("max_tokens"),
        )
        try:
            body = self._parsed(list(messages)[len(system) :])
            if not body:
                return request
            id, history_hash = self._identify(request, system, body)
            conversation = self._conversations.get(*id)
            with conversation.lock:
                shown = conversation.fit(body, call)
                count = conversation.session.inspect.state.index
        except MessageError as error:
            raise BadRequestError(str(error), call.model or "", "refold") from error
        except OverBudgetError as error:  # routers fall back to a model with a larger window
            raise ContextWindowExceededError(str(error), call.model or "", "refold") from error
        pending = _PendingRequest(id, body[-1], count, history_hash)
        self._remember(self._pending, request.get("litellm_call_id"), pending)
        return {**request, "messages": [*system, *(one.value for one in shown)]}

    def _parsed(self, messages: list[Any]) -> list[ChatMessage]:
        """Reads only the messages that the request before did not have."""
        if not messages:
            return []
        first = ChatMessage.of(messages[0]).digest
        with self._lock:
            known, parsed = self._read.pop(first, ([], []))
        if messages[: len(known)] != known:
            known = []
            parsed = []
        new = messages[len(known) :]
        parsed = [*parsed, *map(ChatMessage.of, new)]
        copies = [dict(message) if isinstance(message, dict) else message for message in new]
        self._remember(self._read, first, ([*known, *copies], parsed), WARM_CONVERSATIONS)
        return parsed

    def _record_answer(self, id: Any, response: Any) -> None:
        """Unless the conversation went on meanwhile: then the answer is recorded when it is sent back."""
        pending = self._pending.pop(id, None)
        choices: Any = getattr(response, "choices", None) or ()
        answer = getattr(choices[0], "message", None) if len(choices) == 1 else None
        if pending is None or answer is None:
            return
        message = ChatMessage.of({**_as_dict(answer), "usage": _field(response, "usage")})
        conversation = self._conversations.get(*pending.conversation)
        with conversation.lock:
            if conversation.session.inspect.state.index != pending.message_count:
                return
            conversation.record([pending.last, message])
        before = pending.history_hash
        if before is not None and self._by_history.pop(before, None) is not None:
            self._remember(self._by_history, hash((before, message.digest)), pending.conversation)

    def _remember(
        self, where: OrderedDict[Any, Any], key: Hashable, value: Any, most: int = MOST_REMEMBERED
    ) -> None:
        with self._lock:
            where[key] = value
            while len(where) > most:
                where.popitem(last=False)

    # Which conversation a request belongs to

    def _identify(
        self, request: dict[str, Any], system: Sequence[Any], body: Sequence[ChatMessage]
    ) -> tuple[ConversationId, int | None]:
        """The conversation, and the hash of the history if that identified it."""
        given = [request.get("metadata"), request.get("litellm_metadata")]
        given += [_field(one, "requester_metadata") for one in given]
        metadata = [one for one in given if isinstance(one, dict)]

        def first(field: str) -> Any:
            return next(filter(None, (one.get(field) for one in metadata)), None)

        key = first("user_api_key") or MASTER_KEY
        owner = None if key == MASTER_KEY else f"key-{_digest(key)}"
        if name := first("refold_conversation"):
            return ConversationId(str(name), owner), None
        session = request.get("litellm_session_id") or first("session_id")
        seed = hash((owner or "", session))
        hashes = [*accumulate((one.digest for one in body), lambda *two: hash(two), initial=seed)][1:]
        with self._lock:
            newest = next((one for one in reversed(hashes) if one in self._by_history), None)
            found = None if newest is None else self._by_history.pop(newest)
        found = found or self._begin(owner, session, system, body)
        self._remember(self._by_history, hashes[-1], found)
        return found, hashes[-1]

    def _begin(
        self, owner: str | None, session: Any, system: Sequence[Any], body: Sequence[ChatMessage]
    ) -> ConversationId:
        """A conversation without other messages: several may share a session, or begin with the same text."""

        def get(name: str) -> AdapterConversation[ChatMessage]:
            return self._conversations.get(name, owner)

        before_user = [*takewhile(lambda one: one.message.role != "user", body)]
        beginning = [*map(ChatMessage.of, system), *body[: len(before_user) + 1]]
        digest = _digest([one.digest for one in beginning])
        name = f"chat-{digest}"
        if session:
            if get(str(session)).continues(body, may_be_trimmed=True):
                return ConversationId(str(session), owner)
            name = f"{session}~h{digest}"
        if not get(name).continues(body):
            name = f"{name}-{uuid4().hex[:8]}"
        return ConversationId(name, owner)


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)


class LiteLLMConverter:
    """LiteLLM's messages are those of OpenAI's chat completions, without ids."""

    def parse(self, message: ChatMessage) -> Message:
        return message.message

    def render(self, message: Message, original: ChatMessage | None) -> ChatMessage:
        rendered = openai_chat.render(message)[0][0]
        if message.results:  # the calls have the same ids, however long they are
            rendered["tool_call_id"] = message.results[0].call_id
        for call, part in zip(rendered.get("tool_calls", ()), message.calls, strict=False):
            call["id"] = part.call_id
        if original is not None:
            rendered = _with_other_fields(rendered, _as_dict(original.value))
        return ChatMessage(rendered, message, b"")


def _with_other_fields(rendered: dict[str, Any], original: dict[str, Any]) -> dict[str, Any]:
    """With those fields of the original that are not rendered, and its calls if they are the same."""
    if original.get("role") != rendered["role"]:
        return rendered
    calls = original.get("tool_calls") or ()
    merged = {name: value for name, value in original.items() if name != "tool_calls"} | rendered
    if calls and openai_chat.parse(original).calls == openai_chat.parse(rendered).calls:
        merged["tool_calls"] = calls
    return merged


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def _as_dict(message: Any) -> Any:
    return message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else message


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(_field(block, "text") or "" for block in content or ())


def _digest(value: Any) -> str:
    return blake2b(repr(value).encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


def _usage(usage: Any) -> Usage | None:
    if not _field(usage, "prompt_tokens"):
        return None
    cached = _field(_field(usage, "prompt_tokens_details"), "cached_tokens") or 0
    return Usage(_field(usage, "prompt_tokens"), _field(usage, "completion_tokens") or 0, cached)
