"""Summaries by OpenAI's models, and by any server that speaks OpenAI's chat completions."""

import os
from typing import Any
from urllib.parse import urlsplit

from refold.core.errors import SettingError
from refold.core.message import Usage
from refold.summaries.models import LONGEST_S, Finish, finish_in, missing, reply_in, sendable, text_in, tokens
from refold.summaries.summarizer import Answer, Ask

_FINISHES: dict[str, Finish] = {
    "stop": "stop",
    "length": "length",
    "content_filter": "refusal",
    "tool_calls": "tool-calls",
    "function_call": "tool-calls",
}


class OpenAISummarizer:
    """Unless given, `base_url` and `api_key` are those of OPENAI_BASE_URL and OPENAI_API_KEY."""

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        window: int | None = None,
    ) -> None:
        self.name, self.window = f"openai/{model}", window
        self._model, self._base_url, self._api_key = model, base_url, api_key

    async def __call__(self, ask: Ask, /) -> Answer:
        try:
            from openai import AsyncOpenAI, OpenAIError
        except ImportError as error:
            raise missing("openai") from error
        url = self._base_url or os.environ.get("OPENAI_BASE_URL") or None
        try:
            client = AsyncOpenAI(base_url=url, api_key=self._api_key, max_retries=0, timeout=LONGEST_S)
        except OpenAIError as error:
            raise SettingError(self.name, f"set OPENAI_API_KEY or pass api_key: {error}") from error
        async with client:
            response = await client.chat.completions.with_raw_response.create(
                model=self._model,
                messages=[
                    {"role": "system", "content": sendable(ask.system)},
                    {"role": "user", "content": sendable(ask.prompt)},
                ],
                extra_body={limit_name(url): ask.max_tokens},
            )
        return _answer(reply_in(response.http_response.content, self.name))


def limit_name(url: str | None) -> str:
    """OpenAI's newer models refuse `max_tokens`; compatible servers may know nothing else."""
    is_openai = url is None or (urlsplit(url).hostname or "").endswith("api.openai.com")
    return "max_completion_tokens" if is_openai else "max_tokens"


def _answer(reply: dict[str, Any]) -> Answer:
    match reply:
        case {"choices": [{"message": dict(message), **choice}, *_]}:
            refused = bool(message.get("refusal"))
            finish = "refusal" if refused else finish_in(choice.get("finish_reason"), _FINISHES)
            text = text_in(message.get("content"))
        case _:
            text, finish = "", "other"
    model = reply.get("model")
    return Answer(text, model if isinstance(model, str) else None, _usage(reply.get("usage")), finish)


def _usage(usage: Any) -> Usage | None:
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details")
    cached = tokens(details, "cached_tokens") if isinstance(details, dict) else 0
    return Usage(tokens(usage, "prompt_tokens"), tokens(usage, "completion_tokens"), cached)
