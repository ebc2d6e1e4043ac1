"""Models by name, `openai/MODEL` or `anthropic/MODEL`, and what asking either of them takes."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from refold.core.codec import loads
from refold.core.errors import MessageError, SettingError
from refold.core.lazy import LazyImports
from refold.summaries.summarizer import Summarizer

Finish: TypeAlias = Literal["stop", "length", "refusal", "tool-calls", "other"]
SUMMARIZERS: LazyImports[Callable[..., Summarizer]] = LazyImports(
    {
        "openai": "refold.summaries.openai:OpenAISummarizer",
        "anthropic": "refold.summaries.anthropic:AnthropicSummarizer",
    }
)
LONGEST_S = 600.0
"""When the SDKs give up by themselves; whoever asks gives up sooner."""


def named(model: str, base_urls: Mapping[str, str] = {}) -> Summarizer:
    """The summarizer that a name stands for; `base_urls` are by provider. A bare `claude-…` is Anthropic's,
    any other bare name OpenAI's.

    Raises:
        SettingError: there is no such provider, or no model after it.
    """
    provider, slash, rest = model.partition("/")
    if not slash:
        provider, rest = "anthropic" if "claude" in model.lower() else "openai", model
    if provider not in SUMMARIZERS:
        known = ", ".join(f"{name}/MODEL" for name in SUMMARIZERS)
        raise SettingError(f"model {model!r}", f"{provider!r} is not a known provider; known are {known}")
    if not rest:
        raise SettingError(f"model {model!r}", "names no model; write PROVIDER/MODEL")
    return SUMMARIZERS[provider](rest, base_url=base_urls.get(provider))


def missing(name: str) -> SettingError:
    """What to say where an SDK is not installed; its extra is called as it is."""
    return SettingError(name, f"its SDK is not installed: pip install refold[{name}]")


def sendable(text: str) -> str:
    """The same without lone surrogates, which no API takes."""
    return text.encode("utf-8", "replace").decode()


def reply_in(body: bytes, name: str) -> dict[str, Any]:
    """The JSON object in a body; empty where it is JSON of another kind.

    Raises:
        MessageError: it is not JSON.
    """
    try:
        reply = loads(body)
    except (ValueError, RecursionError) as error:
        raise MessageError(name, "the reply is not JSON") from error
    return reply if isinstance(reply, dict) else {}


def text_in(content: Any) -> str:
    """What a reply says, without what was thought or called meanwhile."""
    if isinstance(content, list):
        return "".join(text for part in content if (text := _text(part)))
    return content if isinstance(content, str) else ""


def finish_in(reason: Any, known: Mapping[str, Finish]) -> Finish:
    return known.get(reason, "other") if isinstance(reason, str) else "other"


def tokens(usage: Mapping[str, Any], name: str) -> int:
    count = usage.get(name)
    return count if isinstance(count, int) else 0


def _text(part: Any) -> str | None:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
    return None
