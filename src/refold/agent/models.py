"""Models for agents: any callable from a request to a reply, and those of OpenAI and Anthropic."""

from collections.abc import AsyncIterator, Awaitable
from typing import Any, Protocol

from refold.summaries.providers import sdk_client, sdk_endpoint, sdk_reply, split_name


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
    _provider = "openai"

    def __init__(
        self,
        name: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        stream: bool = False,
        **extra: Any,
    ) -> None:
        self.name = name
        self.extra = extra
        self._base_url = base_url
        self._api_key = api_key
        self._stream = stream

    def __call__(self, request: dict[str, Any], /) -> Awaitable[Any] | AsyncIterator[Any]:
        return self._chunks(request) if self._stream else self._reply(request)

    async def _reply(self, request: dict[str, Any]) -> Any:
        return await sdk_reply(self._provider, self._client(), request, self.name)

    async def _chunks(self, request: dict[str, Any]) -> AsyncIterator[Any]:
        if self._provider == "openai":
            request = {"stream_options": {"include_usage": True}, **request}
        async with self._client() as client:
            async for chunk in await sdk_endpoint(self._provider, client).create(**request, stream=True):
                yield chunk

    def _client(self) -> Any:
        return sdk_client(self._provider, self.name, self._base_url, self._api_key)


class AnthropicModel(OpenAIModel):
    """Anthropic's messages, and any server that speaks them.

    Unless given, `base_url` and `api_key` are those of ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY. `extra` are
    more fields for every request, such as `temperature` or `thinking`.
    """

    dialect = "anthropic"
    _provider = "anthropic"

    def __init__(self, name: str, *, max_tokens: int = 4_096, **extra: Any) -> None:
        super().__init__(name, max_tokens=max_tokens, **extra)


def model_by_name(model: str) -> Model:
    """`openai/MODEL` or `anthropic/MODEL`; a bare `claude-…` is Anthropic's, any other bare name OpenAI's.

    Raises:
        SettingError: the provider is unknown, or no model is named.
    """
    provider, name = split_name(model)
    return AnthropicModel(name) if provider == "anthropic" else OpenAIModel(name)
