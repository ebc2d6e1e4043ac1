"""The ways in: open a conversation, fit a list of messages once, load what was exported."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from refold.config.config import DEFAULT, Source, load_config
from refold.core.errors import SettingError
from refold.core.message import Message, Text
from refold.core.plan import Policy
from refold.dialects.registry import TARGETS, is_row, spoken
from refold.session.export import load_lines
from refold.session.files import FileConversation
from refold.session.notify import OnEvent
from refold.session.oneoff import listed
from refold.session.results import FittedMessages
from refold.session.session import Session
from refold.session.validate import override_of, require_name
from refold.stores.store import Key, Store, open_store

DEFAULT_STORE = "sqlite:///refold.db"


def open(
    conversation: str,
    *,
    store: str | Store | None = None,
    model: str | None = None,
    agent: str | None = None,
    config: Source = None,
    owner: str | None = None,
    view: str = "main",
    policies: Sequence[Policy] = (),
    summarizer: Any = None,
    embedder: Any = None,
    on_event: OnEvent | Sequence[OnEvent] | None = None,
    override: Mapping[str, Any] | None = None,
) -> Session:
    """Opens a conversation, existing or new.

    `store` is a URL or a store; unless given, the configuration's, else `sqlite:///refold.db`. `policies`
    are stages of your own, which run before all others when a view must become smaller. `summarizer` is
    a callable from an `Ask` to a text (see `refold.summaries.summarizer`), the name of a model such as
    `openai/gpt-4o-mini`, or several of these to be tried in order; it stands in for the configuration's.
    `on_event` is a function, or several, called with what happens (see `refold.session.notify`); they may
    be coroutines. `embedder` is a callable from texts to vectors, or the name of a model (see
    `refold.session.embedding`): then `search` finds by meaning too. `override` holds for every `fit` of this
    session, which may say otherwise, field by field: `{"after_steps": 1, "mode": "remove"}` for every tool,
    `{"tools": {"web_*": {"after_steps": 1}}}` for some, `{"off": True}` to reduce nothing.
    """
    settings = load_config(config)
    asked = override_of(override)
    for name, value in (("conversation", conversation), ("view", view)):
        require_name(name, value)
    for name, given in (("owner", owner), ("model", model), ("agent", agent)):
        require_name(name, "unset" if given is None else given)
    opened = store if store is not None else settings.store or DEFAULT_STORE
    if not isinstance(opened, str) and not hasattr(opened, "append"):
        raise SettingError("store", f"a URL such as {DEFAULT_STORE}, or a store; got {type(opened).__name__}")
    owns = isinstance(opened, str)
    backend = open_store(opened) if isinstance(opened, str) else opened
    key = Key(owner or "default", conversation)
    rest: dict[str, Any] = {"view": view, "policies": policies, "summarizer": summarizer, "owns_store": owns}
    rest |= {"on_event": on_event, "embedder": embedder, "override": asked}
    return Session(backend, key, model=model, agent=agent, config=settings, **rest)


def fit(
    messages: Sequence[Any],
    *,
    model: str,
    system: Any = None,
    tools: Sequence[Any] | None = None,
    config: Source = None,
    agent: str | None = None,
    dialect: str | None = None,
    summarizer: Any = None,
) -> FittedMessages:
    """History in, history that fits out, in the same dialect; the input is left as it is, nothing is stored.

    `system` is text that is sent apart from the messages: it is counted, and not given back. The result is a
    list; its `report` says what was done and why.
    """
    settings = load_config(config)
    if settings.agent(agent).summarizer.executor == "worker":  # of what is not stored, no worker knows
        here = {"agents": {agent or DEFAULT: {"summarizer": {"executor": "thread"}}}}
        settings = load_config([settings, here])
    rest: dict[str, Any] = {"model": model, "config": settings, "agent": agent, "summarizer": summarizer}
    key = Key("default", "one-off")
    session = Session(open_store("memory://"), key, **rest, owns_store=True, is_one_off=True)
    said = listed(messages)
    plain = [message for message in said if type(message) is dict]
    known = spoken(plain)
    by_system = None
    if known is None and not any(map(is_row, plain)):
        by_system = FileConversation("", plain, "messages", None).dialect
    wanted = dialect if dialect in TARGETS else known or by_system
    session.append([_ours(message) or message for message in said], dialect=dialect or by_system)
    extra = {"system": system} if system is not None else {}
    try:
        fitted = session.fit(dialect=wanted, tools=tools, request=extra)
    finally:
        if session.chat.summaries is not None:  # nobody can use what is still being written
            session.chat.summaries.close()
    history = FittedMessages(fitted.messages, fitted.report)
    if fitted.system is not None:  # it stood in the list, though the API wants it apart
        history.insert(0, {"role": "system", "content": fitted.system})
    return history


def _ours(message: Any) -> Message | None:
    """What an earlier fit left where it hid something: nobody's task, and not what the user said last."""
    text = message.get("content") if type(message) is dict and message.get("role") == "user" else None
    if not isinstance(text, str) or not text.startswith("[refold"):
        return None
    from refold.policies.sections import is_summary
    from refold.policies.summarize import NOTE

    if text != NOTE.text and not is_summary(text):
        return None
    return Message("user", (Text(text),), summary=True)


def load(lines: Iterable[str], *, store: str | Store, conversation: str | None = None) -> Session:
    """Stores an exported conversation and opens it."""
    backend = open_store(store) if isinstance(store, str) else store
    key = load_lines(lines, backend, conversation, None)
    return Session(backend, key, owns_store=isinstance(store, str))
