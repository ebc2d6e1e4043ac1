"""Models by name: `openai/MODEL` and `anthropic/MODEL`, and servers that speak the same APIs."""

import os
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from refold.core.codec import loads
from refold.core.errors import MessageError, SettingError
from refold.dialects import replies
from refold.summaries.summarizer import Answer, Ask

Finish: TypeAlias = Literal["stop", "length", "refusal", "tool-calls", "other"]
JsonObject: TypeAlias = dict[str, Any]

PROVIDERS = ("openai", "anthropic")
RETRIES = 2
"""Of a request for a summary, by the SDK: after a broken connection, 408, 409, 429 or 5xx."""
SDK_TIMEOUT_S = 600.0
"""Callers have shorter timeouts of their own."""
_FINISHES: dict[str | None, Finish] = {
    "stop": "stop",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "length": "length",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "content_filter": "refusal",
    "refusal": "refusal",
    "tool_calls": "tool-calls",
    "function_call": "tool-calls",
    "tool_use": "tool-calls",
}


class ModelSummarizer:
    """A model of OpenAI or Anthropic. `base_url` and `api_key` default to the SDK's environment variables."""

    def __init__(
        self,
        name: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        window: int | None = None,
    ) -> None:
        """`name` is `PROVIDER/MODEL`.

        Raises:
            SettingError: the provider is unknown, or no model is named.
        """
        self._provider, self._model = split_name(name)
        self.name = f"{self._provider}/{self._model}"
        self.window = window
        self._base_url = base_url
        self._api_key = api_key

    async def __call__(self, ask: Ask, /) -> Answer:
        system = without_surrogates(ask.system)
        prompt = {"role": "user", "content": without_surrogates(ask.prompt)}
        request: JsonObject = {"model": self._model}
        client = sdk_client(self._provider, self.name, self._base_url, self._api_key, RETRIES)
        if self._provider == "openai":
            request["messages"] = [{"role": "system", "content": system}, prompt]
            request["extra_body"] = {output_limit_field(str(client.base_url)): ask.max_tokens}
        else:
            request |= {"system": system, "messages": [prompt], "max_tokens": ask.max_tokens}
        return self._answer(await sdk_reply(self._provider, client, request, self.name))

    def _answer(self, reply: JsonObject) -> Answer:
        parsed = replies.take(reply, self.name)
        if parsed is None or not parsed.messages:
            raise MessageError(self.name, "the reply has no message")
        message = parsed.messages[0]
        content = message.get("content")
        parts: list[Any] = content if isinstance(content, list) else [{"type": "text", "text": content}]
        text = "".join(part["text"] for part in parts if _is_text(part))  # no thinking, no calls
        finish = "refusal" if message.get("refusal") else _FINISHES.get(parsed.finish, "other")
        return Answer(text, parsed.model, parsed.usage, finish)


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def summarizer_by_name(model: str, base_urls: Mapping[str, str] = {}) -> ModelSummarizer:
    """The summarizer for `PROVIDER/MODEL`; `base_urls` are by provider.

    Raises:
        SettingError: the provider is unknown, or no model is named.
    """
    provider, _ = split_name(model)
    return ModelSummarizer(model, base_url=base_urls.get(provider))


def split_name(model: str) -> tuple[str, str]:
    """The provider and the model in `PROVIDER/MODEL`. A bare `claude-…` is Anthropic's, any other bare name
    OpenAI's.

    Raises:
        SettingError: the provider is unknown, or no model is named.
    """
    provider, slash, name = model.partition("/")
    if not slash:
        provider = "anthropic" if "claude" in model.lower() else "openai"
        name = model
    if provider not in PROVIDERS:
        known = ", ".join(f"{one}/MODEL" for one in PROVIDERS)
        raise SettingError(f"model {model!r}", f"{provider!r} is not a known provider; known: {known}")
    if not name:
        raise SettingError(f"model {model!r}", "names no model; write PROVIDER/MODEL")
    return provider, name


# The SDKs


def sdk_client(
    provider: str, name: str, base_url: str | None, api_key: str | None, max_retries: int = 0
) -> Any:
    """Raises SettingError if the SDK is not installed, or there is no key for OpenAI."""
    options: dict[str, Any] = {"api_key": api_key, "max_retries": max_retries, "timeout": SDK_TIMEOUT_S}
    try:
        if provider == "anthropic":
            from anthropic import AsyncAnthropic

            return AsyncAnthropic(base_url=base_url, open_telemetry=False, **options)  # the caller traces it
        from openai import AsyncOpenAI, OpenAIError
    except ImportError as error:
        raise missing_sdk(provider) from error
    try:
        return AsyncOpenAI(base_url=base_url or os.environ.get("OPENAI_BASE_URL") or None, **options)
    except OpenAIError as error:
        raise SettingError(name, f"set OPENAI_API_KEY or pass api_key: {error}") from error


def sdk_endpoint(provider: str, client: Any) -> Any:
    """The part of a client that creates replies."""
    return client.messages if provider == "anthropic" else client.chat.completions


async def sdk_reply(provider: str, client: Any, request: JsonObject, name: str) -> JsonObject:
    """Raises SettingError if there is no key for Anthropic."""
    async with client:
        try:
            response = await sdk_endpoint(provider, client).with_raw_response.create(**request)
        except TypeError as error:  # how Anthropic's SDK reports missing credentials
            if provider != "anthropic":
                raise
            raise SettingError(name, f"set ANTHROPIC_API_KEY or pass api_key: {error}") from error
    return _parse_reply(response.http_response.content, name)


def _parse_reply(body: bytes, name: str) -> JsonObject:
    """The JSON object in a body; empty if the JSON is of another kind.

    Raises:
        MessageError: it is not JSON.
    """
    try:
        reply = loads(body)
    except (ValueError, RecursionError) as error:
        raise MessageError(name, "the reply is not JSON") from error
    return reply if isinstance(reply, dict) else {}


def missing_sdk(name: str) -> SettingError:
    """The error for an SDK that is not installed; its extra has the same name."""
    return SettingError(name, f"its SDK is not installed: pip install refold[{name}]")


def without_surrogates(text: str) -> str:
    """Lone surrogates cannot be sent as UTF-8."""
    return text.encode("utf-8", "replace").decode()


def output_limit_field(url: str) -> str:
    """OpenAI's newer models refuse `max_tokens`; compatible servers may know nothing else."""
    host = urlsplit(url).hostname or ""
    return "max_completion_tokens" if host.endswith("api.openai.com") else "max_tokens"
