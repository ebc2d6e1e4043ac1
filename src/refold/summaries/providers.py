"""Summarizers by name: `openai/MODEL` and `anthropic/MODEL`, and servers that speak the same APIs."""

import os
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from refold.core.codec import loads
from refold.core.errors import MessageError, SettingError
from refold.core.message import Usage
from refold.summaries.summarizer import Answer, Ask, Summarizer

Finish: TypeAlias = Literal["stop", "length", "refusal", "tool-calls", "other"]
SDK_TIMEOUT_S = 600.0
"""Callers have shorter timeouts of their own."""
_OPENAI_FINISHES: dict[str, Finish] = {
    "stop": "stop",
    "length": "length",
    "content_filter": "refusal",
    "tool_calls": "tool-calls",
    "function_call": "tool-calls",
}
_ANTHROPIC_FINISHES: dict[str, Finish] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "refusal",
    "tool_use": "tool-calls",
}


class OpenAISummarizer:
    """`base_url` and `api_key` default to OPENAI_BASE_URL and OPENAI_API_KEY."""

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        window: int | None = None,
    ) -> None:
        self.name = f"openai/{model}"
        self.window = window
        self._model = model
        self._base_url = base_url
        self._api_key = api_key

    async def __call__(self, ask: Ask, /) -> Answer:
        try:
            from openai import AsyncOpenAI, OpenAIError
        except ImportError as error:
            raise missing_sdk("openai") from error
        url = self._base_url or os.environ.get("OPENAI_BASE_URL") or None
        try:
            client = AsyncOpenAI(base_url=url, api_key=self._api_key, max_retries=0, timeout=SDK_TIMEOUT_S)
        except OpenAIError as error:
            raise SettingError(self.name, f"set OPENAI_API_KEY or pass api_key: {error}") from error
        async with client:
            response = await client.chat.completions.with_raw_response.create(
                model=self._model,
                messages=[
                    {"role": "system", "content": without_surrogates(ask.system)},
                    {"role": "user", "content": without_surrogates(ask.prompt)},
                ],
                extra_body={output_limit_field(url): ask.max_tokens},
            )
        return _openai_answer(parse_reply(response.http_response.content, self.name))


class AnthropicSummarizer:
    """`base_url` and `api_key` default to ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY."""

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        window: int | None = None,
    ) -> None:
        self.name = f"anthropic/{model}"
        self.window = window
        self._model = model
        self._base_url = base_url
        self._api_key = api_key

    async def __call__(self, ask: Ask, /) -> Answer:
        try:
            from anthropic import AsyncAnthropic
        except ImportError as error:
            raise missing_sdk("anthropic") from error
        client = AsyncAnthropic(
            base_url=self._base_url,
            api_key=self._api_key,
            max_retries=0,
            timeout=SDK_TIMEOUT_S,
            open_telemetry=False,  # the caller traces the request
        )
        async with client:
            try:
                response = await client.messages.with_raw_response.create(
                    model=self._model,
                    system=without_surrogates(ask.system),
                    messages=[{"role": "user", "content": without_surrogates(ask.prompt)}],
                    max_tokens=ask.max_tokens,
                )
            except TypeError as error:  # how the SDK reports missing credentials
                raise SettingError(self.name, f"set ANTHROPIC_API_KEY or pass api_key: {error}") from error
        return _anthropic_answer(parse_reply(response.http_response.content, self.name))


_PROVIDERS: dict[str, type[OpenAISummarizer] | type[AnthropicSummarizer]] = {
    "openai": OpenAISummarizer,
    "anthropic": AnthropicSummarizer,
}


def summarizer_by_name(model: str, base_urls: Mapping[str, str] = {}) -> Summarizer:
    """The summarizer for `PROVIDER/MODEL`; `base_urls` are by provider. A bare `claude-…` is Anthropic's,
    any other bare name OpenAI's.

    Raises:
        SettingError: the provider is unknown, or no model is named.
    """
    provider, slash, rest = model.partition("/")
    if not slash:
        provider = "anthropic" if "claude" in model.lower() else "openai"
        rest = model
    if provider not in _PROVIDERS:
        known = ", ".join(f"{name}/MODEL" for name in _PROVIDERS)
        raise SettingError(f"model {model!r}", f"{provider!r} is not a known provider; known: {known}")
    if not rest:
        raise SettingError(f"model {model!r}", "names no model; write PROVIDER/MODEL")
    return _PROVIDERS[provider](rest, base_url=base_urls.get(provider))


def missing_sdk(name: str) -> SettingError:
    """The error for an SDK that is not installed; its extra has the same name."""
    return SettingError(name, f"its SDK is not installed: pip install refold[{name}]")


def without_surrogates(text: str) -> str:
    """Lone surrogates cannot be sent as UTF-8."""
    return text.encode("utf-8", "replace").decode()


def parse_reply(body: bytes, name: str) -> dict[str, Any]:
    """The JSON object in a body; empty if the JSON is of another kind.

    Raises:
        MessageError: it is not JSON.
    """
    try:
        reply = loads(body)
    except (ValueError, RecursionError) as error:
        raise MessageError(name, "the reply is not JSON") from error
    return reply if isinstance(reply, dict) else {}


def output_limit_field(url: str | None) -> str:
    """OpenAI's newer models refuse `max_tokens`; compatible servers may know nothing else."""
    is_openai = url is None or (urlsplit(url).hostname or "").endswith("api.openai.com")
    return "max_completion_tokens" if is_openai else "max_tokens"


def _openai_answer(reply: dict[str, Any]) -> Answer:
    text = ""
    finish: Finish = "other"
    match reply:
        case {"choices": [{"message": dict(message), **choice}, *_]}:
            text = _text_of(message.get("content"))
            finish = _finish_of(choice.get("finish_reason"), _OPENAI_FINISHES)
            if message.get("refusal"):
                finish = "refusal"
    usage = None
    match reply.get("usage"):
        case dict(counts):
            details = counts.get("prompt_tokens_details")
            cached = _tokens(details, "cached_tokens") if isinstance(details, dict) else 0
            usage = Usage(_tokens(counts, "prompt_tokens"), _tokens(counts, "completion_tokens"), cached)
    return Answer(text, _model_of(reply), usage, finish)


def _anthropic_answer(reply: dict[str, Any]) -> Answer:
    usage = None
    match reply.get("usage"):
        case dict(counts):  # cache reads and writes are not part of input_tokens
            read = _tokens(counts, "cache_read_input_tokens")
            written = _tokens(counts, "cache_creation_input_tokens")
            input = _tokens(counts, "input_tokens") + read + written
            usage = Usage(input, _tokens(counts, "output_tokens"), read, written)
    finish = _finish_of(reply.get("stop_reason"), _ANTHROPIC_FINISHES)
    return Answer(_text_of(reply.get("content")), _model_of(reply), usage, finish)


def _model_of(reply: dict[str, Any]) -> str | None:
    model = reply.get("model")
    return model if isinstance(model, str) else None


def _text_of(content: Any) -> str:
    """The text parts of a reply, without thinking and tool calls."""
    if isinstance(content, str):
        return content
    texts = list[str]()
    for part in content if isinstance(content, list) else ():
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
    return "".join(texts)


def _finish_of(reason: Any, known: Mapping[str, Finish]) -> Finish:
    return known.get(reason, "other") if isinstance(reason, str) else "other"


def _tokens(usage: Mapping[str, Any], name: str) -> int:
    count = usage.get(name)
    return count if isinstance(count, int) else 0
