"""One-off helpers for a request that is not stored: count its tokens, check it, look up a model's limits."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from refold.config.config import Config, Source, load_config
from refold.core.codec import loads
from refold.core.errors import MessageError, RefoldError, SettingError
from refold.core.message import Message
from refold.dialects.registry import DIALECTS, find_dialect
from refold.dialects.rules.request import Violation
from refold.dialects.rules.targets import RULES, check_request
from refold.models.limits import ModelLimits, find
from refold.session.files import RESPONSES, FileConversation
from refold.session.intake import Intake
from refold.session.meter import Meter, extras_json
from refold.session.results import RequestTokens
from refold.session.to_json import plain
from refold.session.validate import model_name, output_of, require_name


def count(
    messages: Iterable[Any],
    *,
    model: str,
    system: Any = None,
    tools: Sequence[Any] | None = None,
    dialect: str | None = None,
    config: Source = None,
) -> RequestTokens:
    """The tokens that a request takes, as the model counts them; nothing is sent or stored.

    The result is a number with the parts `system`, `tools` and `messages`, which add up to it. `messages` are
    dicts in any dialect, SDK objects or `refold.Message`; `system` and `tools` are those of the request.

    >>> tokens = count([{"role": "user", "content": "Hello"}], model="gpt-5")
    >>> tokens, tokens.messages
    (8, (8,))
    """
    request = _request(messages, system, tools, dialect)
    parts = count_parts(request, load_config(config), require_name("model", model), dialect)
    of_system, of_tools, *of_messages = (part.tokens for part in parts)
    return RequestTokens(of_system, of_tools, tuple(of_messages))


def check(
    messages: Iterable[Any],
    *,
    dialect: str | None = None,
    model: str | None = None,
    system: Any = None,
    tools: Sequence[Any] | None = None,
    strict: bool = False,
    config: Source = None,
) -> list[Violation]:
    """The rules of the provider's API that a request breaks, each with its `rule`, `index` and `message`.

    The list is empty if the API would accept the request. Without a dialect, that of the messages is used, or
    else the model's. With a model, its own rules and its window are checked, too. `strict` also reports what
    the API was seen to accept against its own rules.

    >>> [found.rule for found in check([{"role": "tool", "tool_call_id": "a", "content": "4"}])]
    ['C7']
    """
    request = _request(messages, system, tools, dialect)
    return check_given(request, load_config(config), model_name(model), dialect, strict=strict).violations


def limits(model: str, *, config: Source = None) -> ModelLimits:
    """The window, the longest answer and the prices of a model.

    A model that neither the registry nor `config` knows gets default limits and a warning.

    >>> limits("gpt-4o").window
    128000
    """
    return find(require_name("model", model), load_config(config).models).limits


def _request(
    messages: Iterable[Any], system: Any, tools: Sequence[Any] | None, dialect: str | None
) -> FileConversation:
    if dialect is not None:
        find_dialect(require_name("dialect", dialect))
    name = "input" if dialect == RESPONSES else "messages"
    request = loads(extras_json(tools, {}))
    if system is not None:
        request["instructions" if dialect == RESPONSES else "system"] = system
    given = listed(messages)
    for n, message in enumerate(given):
        if hasattr(message, "model_dump"):  # anything else stays as it is, for `check` to report
            given[n] = plain(message, f"messages[{n}]")
    request[name] = given
    return FileConversation("", request, name, None)


def listed(messages: Any) -> list[Any]:
    """Raises SettingError if the argument is not a list of messages."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        raise SettingError("messages", f"expected a list of messages, got {type(messages).__name__}")
    return list(messages)


# Also for files, for the command line


class RequestPart(NamedTuple):
    """One part of a request: its system text, its tools, or a message."""

    role: str
    tokens: int
    parsed: tuple[Message, ...] = ()


def count_parts(
    given: FileConversation, config: Config, model: str, dialect: str | None = None
) -> list[RequestPart]:
    """System text, tools and each message, in the model's tokens; they add up to the request.

    The overhead of a request, and of a message that has several items, is shared among the parts.

    Raises:
        MessageError: a message, the system text or the tools cannot be read.
    """
    if dialect is not None:
        find_dialect(dialect)
    meter = Meter(None, config, model, config.agent(None).counter)
    try:
        parts = [
            RequestPart("system", meter.separate(given.fields | given.system)),
            RequestPart("tools", meter.counter.tools(given.tools or [], given.fields.get("tool_choice"))),
        ]
    except SettingError as error:  # of the request
        raise MessageError(given.inside(error.where), error.problem) from error
    intake = Intake(meter.counter, given.dialect or meter.dialect, dialect)
    whole = sum(part.tokens for part in parts)
    whole += sum(draft.tokens for draft in intake.take(given.messages, given.place).drafts)
    for n, message in enumerate(given.messages):
        drafts = intake.take([message], lambda _: given.place(n)).drafts  # noqa: B023
        written = message.get("role") if isinstance(message, Mapping) else None
        role = written if isinstance(written, str) and written else drafts[0].message.role
        parsed = tuple(draft.message for draft in drafts)
        parts.append(RequestPart(role, sum(draft.tokens for draft in drafts), parsed))
    total = meter.estimate(whole, None) if whole else 0
    sums = list(accumulate(part.tokens for part in parts))
    ends = [0, *(total * so_far // max(1, sums[-1]) for so_far in sums)]
    return [
        part._replace(tokens=end - begin) for part, (begin, end) in zip(parts, pairwise(ends), strict=True)
    ]


class Checked(NamedTuple):
    dialect: str
    """The dialect whose rules were used."""
    violations: list[Violation]


def check_given(
    given: FileConversation, config: Config, model: str | None, dialect: str | None, *, strict: bool = False
) -> Checked:
    """Raises SettingError if no rules are known for the dialect."""
    named_model = given.fields.get("model")
    with warnings.catch_warnings():
        if model is None:  # the caller did not name the model
            warnings.simplefilter("ignore")
        meter = Meter(None, config, model or (named_model if isinstance(named_model, str) else None))
    spoken = dialect or given.dialect or meter.dialect
    if spoken not in RULES:
        raise SettingError("dialect", f"{spoken!r} is none of {', '.join(RULES)}")
    messages = list[Any]()
    for message in given.messages:
        messages += DIALECTS[spoken].render(message)[0] if isinstance(message, Message) else [message]
    request = {**given.fields, "input" if spoken == RESPONSES else "messages": messages}
    flags = meter.limits.flags
    known = {"no_prefill": "no-prefill" in flags, "system_inside": "system-inside" in flags}
    size = dict[str, int]()
    if meter.model is not None and meter.is_known:
        with suppress(RefoldError):  # what cannot be counted is not compared with the window
            tokens = sum(part.tokens for part in count_parts(given, config, meter.model, dialect))
            budget = config.budget(config.agent(None), meter.limits, output_of(given.fields))
            size = {"tokens": tokens, "room": budget.room}
    return Checked(spoken, check_request(spoken, request, strict=strict, **known, **size))
