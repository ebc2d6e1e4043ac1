"""For LiteLLM: `litellm.callbacks = [RefoldHook(store=…)]`.

LiteLLM keeps nothing, so a request says to which conversation it belongs: `metadata.refold_conversation` is
its name; a session id is the name of what is said first in the session; else it is known by what was said.
"""

import asyncio
import warnings
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import accumulate, takewhile
from threading import Lock
from typing import Any, NamedTuple
from uuid import uuid4

import litellm
import msgspec
from litellm.exceptions import BadRequestError, ContextWindowExceededError
from litellm.integrations.custom_logger import CustomLogger

from refold.adapters.conversation import WARM, Ask, Talk, Talks, tools
from refold.config.config import Source
from refold.core.codec import read_json
from refold.core.errors import MessageError, OverBudgetError
from refold.core.message import Message, Text, Usage
from refold.dialects import openai_chat
from refold.session.api import open as opened
from refold.stores.store import Store

CHAT = ("completion", "acompletion")
"""Calls of this kind are fitted; all others pass."""
LEAD = ("system", "developer")
APART = "\x1f"
"""Between an owner and the name of a conversation."""
MASTER = "litellm_proxy_master_key"
"""Who comes to the proxy with its master key owns what everybody owns where there is no proxy."""
KEPT = 5_000
"""Conversations, and requests that wait for an answer, of which something is remembered."""


class _Asked(NamedTuple):
    """A request that is being answered."""

    name: str
    last: "Given"
    said: int
    """Messages in the conversation when it was made."""
    mark: int | None
    """Of its history, where that is how the conversation was found."""


class RefoldHook(CustomLogger):
    """Fits all that `acompletion`, routers and the proxy ask. Serves many conversations at once."""

    def __init__(
        self,
        *,
        store: str | Store | None = None,
        model: str | None = None,
        config: Source = None,
        agent: str | None = None,
    ) -> None:
        super().__init__()
        self._talks = _Owned(Words(), store=store, model=model, config=config, agent=agent)
        self._asked: OrderedDict[str, _Asked] = OrderedDict()
        self._newest: OrderedDict[int, str] = OrderedDict()
        """Conversations by the mark of all that was said in them."""
        self._sent: OrderedDict[int, tuple[list[Any], list[int]]] = OrderedDict()
        """What was sent last, and its marks, by the mark of its first message."""
        self._lock = Lock()

    # For the loop around it

    def tools(self) -> list[dict[str, Any]]:
        """Expand and search, for `tools=[…]`; `call` answers them."""
        return [{"type": "function", "function": one} for one in tools()]

    def call(self, name: str, arguments: Any, *, conversation: str) -> str:
        """What expand or search answer; what is asked wrongly is answered with a sentence."""
        return self._talks.call(APART + conversation, name, arguments)

    def completion(self, model: str, messages: Sequence[Any], **request: Any) -> Any:
        """`litellm.completion`, fitted: before it, LiteLLM asks no callback."""
        id = request.setdefault("litellm_call_id", str(uuid4()))
        response = litellm.completion(**self._fitted({**request, "model": model, "messages": messages}))
        if not request.get("stream"):
            self._answered(id, response)
        return response

    # What LiteLLM calls

    async def async_pre_call_deployment_hook(
        self, kwargs: dict[str, Any], call_type: Any
    ) -> dict[str, Any] | None:
        """Before each attempt: the deployment is chosen by now, and its model known."""
        return await asyncio.to_thread(self._fitted, kwargs) if call_type in CHAT else None

    async def async_pre_call_hook(
        self, user_api_key_dict: Any, cache: Any, data: dict[str, Any], call_type: Any
    ) -> dict[str, Any] | None:
        """For who calls it by hand: what comes through the proxy is fitted once its deployment is known."""
        is_later = "proxy_server_request" in data or call_type not in CHAT
        return None if is_later else await asyncio.to_thread(self._fitted, data)

    async def async_post_call_success_deployment_hook(
        self, request_data: Any, response: Any, call_type: Any
    ) -> None:
        await asyncio.to_thread(self._answered, request_data.get("litellm_call_id"), response)

    async def async_log_success_event(
        self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any
    ) -> None:
        """After a stream, or where LiteLLM's cache had the answer."""
        await asyncio.to_thread(self._answered, kwargs.get("litellm_call_id"), response_obj)

    def log_success_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
        self._answered(kwargs.get("litellm_call_id"), response_obj)

    def log_pre_api_call(self, model: Any, messages: Any, kwargs: Any) -> None:
        if kwargs.get("call_type") == CHAT[0] and kwargs.get("litellm_call_id") not in self._asked:
            _warn("litellm.completion was not fitted: call RefoldHook.completion instead")

    # What comes of it

    def _fitted(self, request: dict[str, Any]) -> dict[str, Any]:
        messages = request.get("messages")
        if messages is None:
            _warn("acompletion was not fitted: give `messages` by keyword")
        lead = list(takewhile(lambda one: _of(one, "role") in LEAD, messages or ()))
        body = self._body(list(messages or ())[len(lead) :])
        if not body:
            return request
        ask = Ask(
            "\n\n".join(_text(_of(one, "content")) for one in lead) or None,
            request.get("tools") or (),
            request.get("model"),
            request.get("max_completion_tokens") or request.get("max_tokens"),
        )
        try:
            name, mark = self._named(request, lead, body)
            talk = self._talks.talk(name)
            with talk.lock:
                shown = self._talks.fit(name, body, ask)
                said = talk.session.record.live.state.index
        except (MessageError, OverBudgetError) as error:
            raise _refused(error, ask.model) from error
        self._remember(self._asked, request.get("litellm_call_id"), _Asked(name, body[-1], said, mark))
        return {**request, "messages": [*lead, *(one.message for one in shown)]}

    def _body(self, messages: list[Any]) -> "list[Given]":
        """With their marks, which are taken once of what a client sends again and again."""
        first = given(messages[0]).mark if messages else 0
        with self._lock:
            known, marks = self._sent.pop(first, ([], []))
        if messages[: len(known)] != known:
            known, marks = [], []
        new = messages[len(known) :]
        marks = [*marks, *(given(one).mark for one in new)]
        known = [*known, *(dict(one) if isinstance(one, dict) else one for one in new)]
        self._remember(self._sent, first, (known, marks), WARM)
        return [*map(Given, messages, marks)]

    def _answered(self, id: Any, response: Any) -> None:
        """Keeps an answer, unless something else was said since: then it is kept when it is sent back."""
        asked = self._asked.pop(id, None)
        choices: Any = getattr(response, "choices", None) or ()
        answer = getattr(choices[0], "message", None) if len(choices) == 1 else None
        if asked is None or answer is None:
            return
        said = given({**_dict(answer), "usage": _of(response, "usage")})
        talk = self._talks.talk(asked.name)
        with talk.lock:
            if talk.session.record.live.state.index != asked.said:
                return
            talk.keep([asked.last, said])
        if asked.mark is not None and self._newest.pop(asked.mark, None) is not None:
            self._remember(self._newest, hash((asked.mark, said.mark)), asked.name)

    def _remember(self, where: OrderedDict[Any, Any], key: Hashable, value: Any, most: int = KEPT) -> None:
        with self._lock:
            where[key] = value
            while len(where) > most:
                where.popitem(last=False)

    # Which conversation

    def _named(
        self, request: dict[str, Any], lead: Sequence[Any], body: "Sequence[Given]"
    ) -> tuple[str, int | None]:
        """The conversation that these messages go on with, and the mark of their history."""
        told = [one for one in map(request.get, ("metadata", "litellm_metadata")) if isinstance(one, dict)]
        told += [one["requester_metadata"] for one in told if isinstance(one.get("requester_metadata"), dict)]
        key = next(filter(None, (one.get("user_api_key") for one in told)), MASTER)
        owner = "" if key == MASTER else f"key-{_digest(key)}"
        name = next(filter(None, (one.get("refold_conversation") for one in told)), None)
        if name is not None:
            return f"{owner}{APART}{name}", None
        ids = (request.get("litellm_session_id"), *(one.get("session_id") for one in told))
        session = next(filter(None, ids), None)
        seed = hash((owner, session))
        marks = [*accumulate((one.mark for one in body), lambda *two: hash(two), initial=seed)][1:]
        with self._lock:
            found = next((self._newest.pop(one) for one in reversed(marks) if one in self._newest), None)
        found = found or self._begun(owner, session, lead, body)
        self._remember(self._newest, marks[-1], found)
        return found, marks[-1]

    def _begun(self, owner: str, session: Any, lead: Sequence[Any], body: "Sequence[Given]") -> str:
        """One that has said nothing else: several may have the same session, or the same beginning."""
        said = [one.message for one in body]
        first = [*takewhile(lambda one: _of(one, "role") != "user", said)]
        tag = _digest([_essence(one) for one in (*lead, *said[: len(first) + 1])])
        own = f"{owner}{APART}{session}"
        if session and self._talks.talk(own).goes_on(body, may_be_trimmed=True):
            return own
        name = f"{own}~h{tag}" if session else f"{owner}{APART}chat-{tag}"
        return name if self._talks.talk(name).goes_on(body) else f"{name}-{uuid4().hex[:8]}"


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def _refused(error: Exception, model: str | None) -> Exception:
    """As LiteLLM says it: nothing is tried again, and routers fall back to a larger window."""
    is_long = isinstance(error, OverBudgetError)
    kind: type[Exception] = ContextWindowExceededError if is_long else BadRequestError
    return kind(str(error), model or "", "refold")


class Given(NamedTuple):
    """A message, as a dict or as the object of a reply, with the mark that is looked at more than once."""

    message: Any
    mark: int


def given(message: Any) -> Given:
    return Given(message, hash(_essence(message)))


class _Owned(Talks[Given]):
    """Conversations of several owners, the keys of a proxy: a name is an owner and a conversation."""

    def talk(self, name: str) -> Talk[Given]:
        owner, _, conversation = name.partition(APART)
        how = {"store": self.store, "owner": owner or None, **self._how}
        with self._lock:
            if name not in self._open:
                self._open[name] = Talk(self._tongue, conversation, partial(opened, **how))
            return super().talk(name)


class Words:
    """How LiteLLM says things: as OpenAI's chat.

    There are no ids, and an answer may come back written otherwise: it is known by what it says.
    """

    def mark(self, given: Given) -> int:
        return given.mark

    def read(self, given: Given) -> Message:
        value = _dict(given.message)
        said, id = openai_chat.parse(value), f"said-{_digest(_essence(value))}"
        parts = tuple(part for part in said.parts if part != Text(""))
        return msgspec.structs.replace(said, parts=parts, id=id, usage=_usage(value.get("usage")))

    def write(self, message: Message, original: Given | None) -> Given:
        said = openai_chat.render(message)[0][0]
        if message.results:  # ids as they came, however long: the calls have them, too
            said["tool_call_id"] = message.results[0].call_id
        for call, part in zip(said.get("tool_calls", ()), message.calls, strict=False):
            call["id"] = part.call_id
        return Given(_like(_dict(original.message), said) if original else said, 0)


def _like(known: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """With all that stood beside, where it is said by the same."""
    if known.get("role") != said["role"]:
        return said
    calls = known.get("tool_calls") or ()
    is_same = [*map(_call, calls)] == [*map(_call, said.get("tool_calls", ()))]
    rest = {name: value for name, value in known.items() if name != "tool_calls"}
    return {**rest, **said, **({"tool_calls": calls} if is_same and calls else {})}


def _fields(value: Any) -> Mapping[str, Any]:
    """Of a dict or of an object, also those that its class does not name."""
    if isinstance(value, dict):
        return value
    named, more = getattr(value, "__dict__", {}), getattr(value, "__pydantic_extra__", None)
    return {**named, **more} if more else named


def _of(value: Any, field: str) -> Any:
    return _fields(value).get(field)


def _dict(message: Any) -> Any:
    """The same as a dict; what is no message stays what it is."""
    return message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else message


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(_of(block, "text") or "" for block in content or ())


def _essence(message: Any) -> tuple[Any, ...]:
    """What a message says, however it is written."""
    fields = _fields(message)
    content, calls = fields.get("content"), fields.get("tool_calls")
    if not isinstance(content, str):
        is_text = all(_of(block, "type") == "text" for block in content or ())
        content = _text(content) if is_text else _frozen(content)
    said = content.strip() if isinstance(content, str) else content
    return (fields.get("role"), said, fields.get("tool_call_id"), tuple(map(_call, calls)) if calls else ())


def _call(call: Any) -> tuple[Any, ...]:
    fields = _fields(call)
    asked = _fields(fields.get("function") or fields.get("custom") or {})
    text = asked.get("arguments") or asked.get("input") or ""
    return (fields.get("id"), asked.get("name"), _arguments(text) if isinstance(text, str) else _frozen(text))


@lru_cache(1_000)
def _arguments(text: str) -> Any:
    try:
        return _frozen(read_json(text))
    except (ValueError, RecursionError):
        return text


def _frozen(value: Any) -> Hashable:
    """What can be compared by its hash, in which -1 and -2 are the same as numbers."""
    match value:
        case dict():
            return tuple(sorted((str(key), _frozen(one)) for key, one in value.items()))
        case list() | tuple():
            return tuple(map(_frozen, value))
    return value if isinstance(value, str) else (repr(value),)


def _digest(value: Any) -> str:
    return blake2b(repr(value).encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


def _usage(given: Any) -> Usage | None:
    if not _of(given, "prompt_tokens"):
        return None
    cached = _of(_of(given, "prompt_tokens_details"), "cached_tokens") or 0
    return Usage(_of(given, "prompt_tokens"), _of(given, "completion_tokens") or 0, cached)
