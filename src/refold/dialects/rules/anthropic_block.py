"""Which rules of Anthropic Messages does a block break by itself, wherever it stands?"""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from refold.dialects.rules.judge import named, quote

SERVER_USES = ("server_tool_use", "mcp_tool_use")
USES = ("tool_use", *SERVER_USES)
THINKING = {"thinking": "signature", "redacted_thinking": "data"}
"""What thinking is, and what of it shows that nobody changed it."""
Flaw: TypeAlias = tuple[str, str]
"""A rule, and what is wrong."""


def misshapen(block: Any, n: int, role: str) -> str | None:
    """Why block `n` of a message cannot be judged: what it lacks, or whose it should be."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text":
        text = block.get("text")
        return None if isinstance(text, str) else f"has {quote(text)} for the text of block {n}, not a string"
    if not named(kind):
        return f"has {quote(block)} for block {n} of its content, not an object with a type"
    if kind in USES or kind in THINKING:
        if role != "assistant":
            return f"has block {n} of the type {kind}, which only an assistant has"
        if kind in USES and not (named(block.get("id")) and named(block.get("name"))):
            return f"has block {n} of the type {kind} without an id and a name"
        if kind == "thinking" and not isinstance(block.get("thinking"), str):
            return f"has {quote(block.get('thinking'))} for the thinking of block {n}, not a string"
    elif kind.endswith("tool_result"):
        if kind == "tool_result" and role != "user":
            return f"has block {n} of the type {kind}, which only a user has"
        if not named(block.get("tool_use_id")):
            return f"has block {n} of the type {kind} without its `tool_use_id`"
    return None


def flaws(block: dict[str, Any], n: int, strict: bool) -> Sequence[Flaw]:
    """What is wrong with block `n` of a message, which has its shape."""
    kind = block["type"]
    if kind == "text":
        return () if block["text"] and not block["text"].isspace() else tuple(_blank(block, n))
    if kind in USES and not isinstance(block.get("input"), dict):
        return (("A15", f"has {quote(block.get('input'))} for the input of block {n}, not an object"),)
    if kind == "tool_result" and not isinstance(block.get("content"), str):
        return tuple(_inside(block.get("content"), n, strict))
    if kind in THINKING and not named(block.get(THINKING[kind])):
        return (("A11", f"has {kind} in block {n} that is not signed; keep it as it came, or not at all"),)
    if kind == "compaction":
        content, payload = block.get("content", ""), block.get("encrypted_content")
        if not (content is None or named(content) or (content == "" and named(payload))):
            return (("A14", f"has a compaction without its content in block {n}; keep it as it came"),)
    return ()


def marks(block: dict[str, Any]) -> int:
    """The `cache_control` marks on a block and on those inside it."""
    count = int(block.get("cache_control") is not None)
    content = block.get("content")
    if isinstance(content, list):
        count += sum(isinstance(part, dict) and part.get("cache_control") is not None for part in content)
    return count


def _blank(block: dict[str, Any], n: int) -> Iterator[Flaw]:
    yield "A9", f"has an empty text in block {n}; say something there, or leave it out"
    if block.get("cache_control") is not None:
        yield "A10", f"has a `cache_control` mark on the empty text of block {n}; mark another"


def _inside(content: Any, n: int, strict: bool) -> Iterator[Flaw]:
    if not isinstance(content, list):
        if content is not None:
            yield "S1", f"has {quote(content)} for the content of block {n}, not a string or blocks"
        return
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if kind == "text" else None
        if not named(kind) or (kind == "text" and not isinstance(text, str)):
            yield "S1", f"has {quote(part)} inside block {n}, not a block with a type and its text"
        elif text == "" or (strict and text and text.isspace()):
            yield from _blank(part, n)
