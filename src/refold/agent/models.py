"""Models for agents: any callable from a request to a reply, and those of OpenAI and Anthropic."""

import os
from collections.abc import AsyncIterator, Awaitable
from typing import Any, Protocol

from refold.core.errors import SettingError
from refold.summaries.providers import SDK_TIMEOUT_S, missing_sdk, parse_reply


class Model(Protocol):
    """Any callable, sync or async.

    It may have a `name`, by which its window and prices are found, a `dialect`, if that does not follow from
    the name, and `extra`, more fields for the request such as `max_tokens`.
    """

    def __call__(self, request: dict[str, Any], /) -> Any:
        """The reply: of its SDK or API, a message, a text, or an iterator over the chunks of a stream.

        An exception ends the run after `max_retries` retries; one with a `status_code` of 4xx other than 408,
        409 and 429 ends it at once.
        """


class OpenAIModel:
    """OpenAI's chat completions, and any server that speaks them.

    Unless given, `base_url` and `api_key` are those of OPENAI_BASE_URL and OPENAI_API_KEY. `extra` are more
    fields for every request, such as `temperature` or `max_completion_tokens`.
    """

    dialect = "openai-chat"

    def __init__(
        self,
        name: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        stream: bool = False,
        **extra: Any,
    ) -> None:
        self.name, self.extra, self._stream = name, extra, stream
        self._base_url, self._api_key = base_url, api_key

    def __call__(self, request: dict[str, Any], /) -> Awaitable[Any] | AsyncIterator[Any]:
        return self._chunks(request) if self._stream else self._reply(request)

    def _client(self) -> Any:
        try:
            from openai import AsyncOpenAI, OpenAIError
        except ImportError as error:
            raise missing_sdk("openai") from error
        url = self._base_url or os.environ.get("OPENAI_BASE_URL") or None
        try:
            return AsyncOpenAI(base_url=url, api_key=self._api_key, max_retries=0, timeout=SDK_TIMEOUT_S)
        except OpenAIError as error:
            raise SettingError(self.name, f"set OPENAI_API_KEY or pass api_key: {error}") from error

    async def _reply(self, request: dict[str, Any]) -> Any:
        async with self._client() as client:
            response = await client.chat.completions.with_raw_response.create(**request)
            return parse_reply(response.http_response.content, self.name)

    async def _chunks(self, request: dict[str, Any]) -> AsyncIterator[Any]:
        usage = {"stream_options": {"include_usage": True}}
        async with self._client() as client:
            async for chunk in await client.chat.completions.create(**usage, **request, stream=True):
                yield chunk


class AnthropicModel:
    """Anthropic's messages, and any server that speaks them.

    Unless given, `base_url` and `api_key` are those of ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY. `extra` are
    more fields for every request, such as `temperature` or `thinking`.
    """

    dialect = "anthropic"

    def __init__(
        self,
        name: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        stream: bool = False,
        max_tokens: int = 4_096,
        **extra: Any,
    ) -> None:
        self.name, self.extra, self._stream = name, {"max_tokens": max_tokens, **extra}, stream
        self._base_url, self._api_key = base_url, api_key

    def __call__(self, request: dict[str, Any], /) -> Awaitable[Any] | AsyncIterator[Any]:
        return self._chunks(request) if self._stream else self._reply(request)

    def _client(self) -> Any:
        try:
            from anthropic import AsyncAnthropic
        except ImportError as error:
            raise missing_sdk("anthropic") from error
        return AsyncAnthropic(
            base_url=self._base_url,
            api_key=self._api_key,
            max_retries=0,
            timeout=SDK_TIMEOUT_S,
            open_telemetry=False,  # the loop traces it
        )

    async def _reply(self, request: dict[str, Any]) -> Any:
        async with self._client() as client:
            try:
                response = await client.messages.with_raw_response.create(**request)
            except TypeError as error:  # the SDK has no credentials
                raise SettingError(self.name, f"set ANTHROPIC_API_KEY or pass api_key: {error}") from error
            return parse_reply(response.http_response.content, self.name)

    async def _chunks(self, request: dict[str, Any]) -> AsyncIterator[Any]:
        async with self._client() as client:
            async for event in await client.messages.create(**request, stream=True):
                yield event


def model_by_name(model: str) -> Model:
    """`openai/MODEL` or `anthropic/MODEL`; a bare `claude-…` is Anthropic's, any other bare name OpenAI's.

    Raises:
        SettingError: the provider is unknown, or no model follows it.
    """
    provider, slash, name = model.partition("/")
    if not slash:
        provider, name = "anthropic" if "claude" in model.lower() else "openai", model
    if provider not in ("openai", "anthropic") or not name:
        raise SettingError(f"model {model!r}", "write openai/MODEL or anthropic/MODEL, or pass a callable")
    return AnthropicModel(name) if provider == "anthropic" else OpenAIModel(name)
