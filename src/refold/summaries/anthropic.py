"""Summaries by Anthropic's models, and by any server that speaks Anthropic's messages."""

from typing import Any

from refold.core.errors import SettingError
from refold.core.message import Usage
from refold.summaries.models import LONGEST_S, Finish, finish_in, missing, reply_in, sendable, text_in, tokens
from refold.summaries.summarizer import Answer, Ask

_FINISHES: dict[str, Finish] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "refusal",
    "tool_use": "tool-calls",
}


class AnthropicSummarizer:
    """Unless given, `base_url` and `api_key` are those of ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY."""

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        window: int | None = None,
    ) -> None:
        self.name, self.window = f"anthropic/{model}", window
        self._model, self._base_url, self._api_key = model, base_url, api_key

    async def __call__(self, ask: Ask, /) -> Answer:
        try:
            from anthropic import AsyncAnthropic
        except ImportError as error:
            raise missing("anthropic") from error
        client = AsyncAnthropic(
            base_url=self._base_url,
            api_key=self._api_key,
            max_retries=0,
            timeout=LONGEST_S,
            open_telemetry=False,  # whoever asks traces it
        )
        async with client:
            try:
                response = await client.messages.with_raw_response.create(
                    model=self._model,
                    system=sendable(ask.system),
                    messages=[{"role": "user", "content": sendable(ask.prompt)}],
                    max_tokens=ask.max_tokens,
                )
            except TypeError as error:  # so the SDK says that it has no credentials
                raise SettingError(self.name, f"set ANTHROPIC_API_KEY or pass api_key: {error}") from error
        return _answer(reply_in(response.http_response.content, self.name))


def _answer(reply: dict[str, Any]) -> Answer:
    text = text_in(reply.get("content"))
    finish = finish_in(reply.get("stop_reason"), _FINISHES)
    model = reply.get("model")
    return Answer(text, model if isinstance(model, str) else None, _usage(reply.get("usage")), finish)


def _usage(usage: Any) -> Usage | None:
    """Anthropic counts apart what was read from its cache and what was written to it."""
    if not isinstance(usage, dict):
        return None
    read, written = tokens(usage, "cache_read_input_tokens"), tokens(usage, "cache_creation_input_tokens")
    input = tokens(usage, "input_tokens") + read + written
    return Usage(input, tokens(usage, "output_tokens"), read, written)
