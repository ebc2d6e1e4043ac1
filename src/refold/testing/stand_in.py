"""A model that stands in for a real one in an agent: its requests are checked, its replies are a script."""

from threading import Lock
from typing import Any

import msgspec

from refold.config.config import load_config
from refold.core.codec import loads
from refold.core.errors import RefoldError, SettingError
from refold.core.message import Usage
from refold.dialects.rules.targets import check_request
from refold.models.limits import find
from refold.session.intake import Intake
from refold.session.meter import Meter, extras_json
from refold.session.validate import output_of
from refold.testing.model import Reply, Script, body, scripted_reply

__all__ = ["InvalidRequestError", "Reply", "StandIn"]

PATHS = {"openai-chat": "/v1/chat/completions", "anthropic": "/v1/messages"}
SHARED = ("provider", "input", "cache_read", "cache_write", "output")


class InvalidRequestError(Exception):
    """What a provider would have answered with status 400."""

    status_code = 400


class StandIn:
    """Handed to an `Agent` as its model; `config` says how large it is.

        model = StandIn([Reply(calls=(("add", {"a": 1}),)), "It is 3."])
        Agent("adder", model, [add], config=model.config, store="memory://").run("What is 1 + 2?")

    It gets the requests that a provider would get, and refuses those that break a rule of the provider's API
    or do not leave room for the answer in its window, by refold's own rules and refold's own count of tokens.
    Its replies look like the provider's, and so do their usages. It understands nothing. `like` names a model
    whose tokens and prices it has.
    """

    def __init__(
        self,
        script: Script,
        *,
        dialect: str = "openai-chat",
        window: int = 16_000,
        max_output: int = 1_000,
        name: str = "stand-in",
        like: str | None = None,
    ) -> None:
        if dialect not in PATHS or not script:
            raise SettingError("script", f"expected replies, in {' or '.join(PATHS)}")
        self.name = name
        self.dialect = dialect
        self._script = script
        self.extra = {"max_tokens": max_output} if dialect == "anthropic" else {}
        about = {"window": window, "max_output": max_output, **(_shared(like) if like else {})}
        self.config: dict[str, Any] = {"models": {name: about}}
        self.requests: list[dict[str, Any]] = []
        """The newest at the end; with `keep`, no more than so many."""
        self.keep: int | None = None
        self.asked = 0
        """The number of requests."""
        self.most_tokens = 0
        """The tokens of the largest request."""
        self._meter = Meter(None, load_config(self.config), name)
        self._lock = Lock()

    def __call__(self, request: dict[str, Any], /) -> dict[str, Any]:
        tokens = self._checked(request)
        with self._lock:
            place = self.asked
            self.asked += 1
            self.most_tokens = max(self.most_tokens, tokens)
            self.requests = [*self.requests, request][-self.keep if self.keep else 0 :]
        reply = scripted_reply(self._script, request, place)
        if reply.usage == Reply().usage:
            usage = Usage(tokens, self._meter.counter.counter.text(reply.text))
            reply = msgspec.structs.replace(reply, usage=usage)
        answer: dict[str, Any] = msgspec.json.decode(body(reply, {**request, "path": PATHS[self.dialect]}))
        return answer

    def _checked(self, request: dict[str, Any]) -> int:
        """Raises InvalidRequestError, which says which rules the request breaks."""
        meter = self._meter
        limits = meter.limits
        try:
            drafts = Intake(meter.counter, self.dialect, self.dialect).take(request["messages"]).drafts
            rest = {key: value for key, value in request.items() if key not in ("messages", "model")}
            extras = meter.extras(loads(extras_json(None, rest)))
        except RefoldError as error:
            raise InvalidRequestError(str(error)) from error
        tokens = meter.estimate(sum(draft.tokens for draft in drafts) + extras, None)
        room = limits.window - min(limits.max_output, output_of(request) or limits.max_output)
        if found := check_request(self.dialect, request, tokens=tokens, room=room):
            raise InvalidRequestError("; ".join(f"{fault.rule}: {fault.message}" for fault in found))
        return tokens


def _shared(like: str) -> dict[str, Any]:
    """Raises SettingError if it is not known."""
    found = find(like, {})
    if found.id is None:
        raise SettingError("like", f"{like!r} is no model that the table has")
    fields = {name: getattr(found.limits, name) for name in SHARED}
    return {name: value for name, value in fields.items() if value is not None}
