"""Which requests does Anthropic's Messages API refuse?"""

from collections.abc import Iterator
from typing import Any

from upstream_rules import (
    MARKS_MAX,
    Body,
    Refusal,
    binds_thinking,
    blocks,
    needs_user_last,
    prefixes,
    seal,
    signature,
)

FIELDS = {
    "text": {"text", "citations", "cache_control"},
    "thinking": {"thinking", "signature"},
    "tool_use": {"id", "name", "input", "cache_control", "caller"},
    "tool_result": {"tool_use_id", "content", "is_error", "cache_control"},
}
ABOUT_THINKING = "https://docs.claude.com/en/docs/build-with-claude/extended-thinking"


def check_anthropic(body: Body, own: bool = True) -> None:
    """`own`: thinking and compactions are taken only with this server's seal."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise Refusal("G2", "messages: Field required")
    if not messages:
        raise Refusal("G2", "messages: at least one message is required")
    if not isinstance(body.get("max_tokens"), int) and "max_tokens" in body:
        raise Refusal("G3", "max_tokens: Input should be a valid integer")
    for index, message in enumerate(messages):
        _check_message(message, index, is_last=index == len(messages) - 1)
    if messages[0]["role"] != "user":
        raise Refusal("A1", 'messages: first message must use the "user" role')
    _check_marks(body)
    merged = list(_merged(messages))
    _check_pairs(merged)
    for index, _, content in merged:
        _check_server_tools(index, content)
    if own:
        _check_thinking(body)
        for index, _, content in merged:
            _check_compactions(index, content)
    if messages[-1]["role"] != "user" and needs_user_last(str(body["model"])):
        words = "This model does not support assistant message prefill. "
        words += "The conversation must end with a user message."
        raise Refusal("A13", words)


def _check_message(message: Body, index: int, is_last: bool) -> None:
    where, role = f"messages.{index}", message.get("role")
    if role == "system":
        words = 'Unexpected role "system". The Messages API accepts a top-level `system` parameter, not '
        raise Refusal("A2", f'messages: {words}"system" as an input message role.')
    if role not in ("user", "assistant"):
        raise Refusal("A2", f"{where}.role: Input should be 'user' or 'assistant'")
    for field in message:
        if field not in ("role", "content"):
            raise Refusal("A2", f"{where}.{field}: Extra inputs are not permitted")
    if not isinstance(message.get("content"), str | list):
        raise Refusal("A9", f"{where}.content: Input should be a valid list")
    if not message["content"]:
        if is_last and role == "assistant":
            return
        words = "all messages must have non-empty content except for the optional final assistant message"
        raise Refusal("A9", f"{where}: {words}")
    for place, block in enumerate(blocks(message)):
        _check_block(block, f"{where}.content.{place}", role)


def _check_block(block: Body, where: str, role: str) -> None:
    kind = block.get("type")
    for field in block:
        if kind in FIELDS and field != "type" and field not in FIELDS[kind]:
            raise Refusal("A10", f"{where}.{kind}.{field}: Extra inputs are not permitted")
    if kind in ("input_text", "output_text", "image_url", "function_call", "input_image", None):
        raise Refusal(
            "A9", f"{where}: Input tag '{kind}' found using 'type' does not match any of the expected tags"
        )
    if kind == "text":
        _check_text(block, where)
    if kind in ("tool_use", "thinking", "redacted_thinking") and role != "assistant":
        raise Refusal("A3", f"{where}: `{kind}` blocks can only be in `assistant` messages")
    if kind == "tool_result" and role != "user":
        raise Refusal("A4", f"{where}: `tool_result` blocks can only be in `user` messages")
    if kind == "tool_use" and not isinstance(block.get("input"), dict):
        raise Refusal("A15", f"{where}.tool_use.input: Input should be a valid dictionary")
    if kind == "tool_use" and not str(block.get("id", "")).replace("_", "a").replace("-", "a").isalnum():
        raise Refusal("A3", f"{where}.tool_use.id: String should match pattern '^[a-zA-Z0-9_-]+$'")
    if kind == "tool_result" and isinstance(block.get("content"), list):
        for place, inner in enumerate(block["content"]):
            _check_block(inner, f"{where}.tool_result.content.{place}", "user")


def _check_text(block: Body, where: str) -> None:
    text = block.get("text")
    if not isinstance(text, str):
        raise Refusal("A9", f"{where}.text.text: Input should be a valid string")
    if not text and block.get("cache_control"):
        raise Refusal("A10", f"{where}.text: cache_control cannot be set for empty text blocks")
    if not text:
        raise Refusal("A9", "messages: text content blocks must be non-empty")
    if not text.strip():
        raise Refusal("A9", "messages: text content blocks must contain non-whitespace text")


def _check_marks(body: Body) -> None:
    system = body.get("system")
    for block in system if isinstance(system, list) else []:
        _check_text(block, "system")
    marks = sum(1 for _ in _marks([body.get("tools"), system, body["messages"]])) + bool(
        body.get("cache_control")
    )
    if marks > MARKS_MAX:
        words = f"A maximum of {MARKS_MAX} blocks with cache_control may be provided. Found {marks}."
        raise Refusal("A10", words)


def _marks(value: Any) -> Iterator[None]:
    if isinstance(value, list):
        for one in value:
            yield from _marks(one)
    elif isinstance(value, dict):
        if value.get("cache_control"):
            yield None
        yield from _marks(value.get("content"))


def _merged(messages: list[Body]) -> Iterator[tuple[int, str, list[Body]]]:
    """Messages as the API sees them: those of one role in a row are one (A2)."""
    start, role, content = 0, "", []
    for index, message in enumerate(messages):
        if message["role"] == role:
            content = content + blocks(message)
            continue
        if role:
            yield start, role, content
        start, role, content = index, message["role"], blocks(message)
    yield start, role, content


def _check_pairs(merged: list[tuple[int, str, list[Body]]]) -> None:
    used: set[str] = set()
    before: list[str] = []
    for turn, (index, role, content) in enumerate(merged):
        if role == "user":
            _check_results(index, content, before)
            before = []
            continue
        before = []
        for place, block in enumerate(content):
            if block["type"] == "tool_use":
                if block["id"] in used:
                    raise Refusal("A6", f"messages.{index}.content.{place}: `tool_use` ids must be unique")
                used.add(block["id"])
                before.append(block["id"])
            elif block["type"] == "text" and before:
                _unanswered("A7", index, before)
        if before and turn == len(merged) - 1:
            _unanswered("A3", index, before)


def _check_results(index: int, content: list[Body], before: list[str]) -> None:
    results = [(place, block) for place, block in enumerate(content) if block["type"] == "tool_result"]
    found: set[str] = set()
    for place, block in results:
        name, where = block.get("tool_use_id"), f"messages.{index}.content.{place}"
        if name not in before:
            words = (
                f"unexpected `tool_use_id` found in `tool_result` blocks: {name}. Each `tool_result` block "
            )
            words += "must have a corresponding `tool_use` block in the previous message."
            raise Refusal("A4", f"{where}: {words}")
        if name in found:
            words = "each tool_use must have a single result. Found multiple `tool_result` blocks with id"
            raise Refusal("A6", f"{where}: {words}: {name}")
        found.add(str(name))
    missing = [name for name in before if name not in found]
    if missing:
        _unanswered("A3", index - 1, missing)
    if results and results[-1][0] >= len(results):
        _unanswered(
            "A5", index - 1, [block["tool_use_id"] for place, block in results if place >= len(results)]
        )


def _unanswered(rule: str, index: int, names: list[str]) -> None:
    words = (
        f"`tool_use` ids were found without `tool_result` blocks immediately after: {', '.join(names)}. Each "
    )
    words += "`tool_use` block must have a corresponding `tool_result` block in the next message."
    raise Refusal(rule, f"messages.{index}: {words}")


def _check_server_tools(index: int, content: list[Body]) -> None:
    uses: dict[str, str] = {}
    for place, block in enumerate(content):
        kind = block["type"]
        if kind in ("server_tool_use", "mcp_tool_use"):
            uses[block["id"]] = block["name"]
        elif kind.endswith("_tool_result") and uses.pop(block["tool_use_id"], None) is None:
            words = f"unexpected `tool_use_id` found in `{kind}` blocks: {block['tool_use_id']}. "
            words += f"Each `{kind}` block must have a corresponding `server_tool_use` block before it."
            raise Refusal("A8", f"messages.{index}.content.{place}: {words}")
    for name, tool in uses.items():
        words = (
            f"`{tool}` tool use with id `{name}` was found without a corresponding `{tool}_tool_result` block"
        )
        raise Refusal("A8", f"messages.{index}: {words}")


def _check_thinking(body: Body) -> None:
    model, messages = str(body["model"]), body["messages"]
    latest = max((i for i, one in enumerate(messages) if one["role"] == "assistant"), default=-1)
    thought = False
    for index, place, block, prefix in prefixes(body):
        where = f"messages.{index}.content.{place}"
        if block.get("type") != "thinking":
            continue
        thought = thought or index == latest
        made = signature(block["thinking"], str(block.get("signature"))[28:52])
        if made != block.get("signature"):
            if index == latest and str(block.get("signature")).startswith("EqQB"):
                _modified(where)
            raise Refusal("A11", f"{where}: Invalid `signature` in `thinking` block")
        if binds_thinking(model) and made[28:52] != prefix:
            words = (
                "Invalid `signature` in `thinking` block. The block is bound to a different conversation. "
            )
            words += (
                'Remove the block, or set `thinking.block_binding.prefix_mismatch_behavior` to "drop_block".'
            )
            raise Refusal("A12", f"{where}: {words}")
    if latest < 0 or binds_thinking(model):
        return
    content = blocks(messages[latest])
    for place, block in enumerate(content):
        if block["type"] == "tool_use" and block["id"].startswith("toolu_01T"):
            if not thought:
                _modified(f"messages.{latest}.content.{place}")
            if content[0]["type"] not in ("thinking", "redacted_thinking"):
                words = f"Expected `thinking` or `redacted_thinking`, but found `{content[0]['type']}`. When "
                words += (
                    "`thinking` is enabled, a final `assistant` message must start with a thinking block "
                )
                words += (
                    "(preceeding the lastmost set of `tool_use` and `tool_result` blocks). We recommend you "
                )
                words += "include thinking blocks from previous turns. To avoid this requirement, disable "
                words += f"`thinking`. Please consult our documentation at {ABOUT_THINKING}"
                raise Refusal("A11", f"messages.{latest}.content.0.type: {words}")


def _modified(where: str) -> None:
    words = "`thinking` or `redacted_thinking` blocks in the latest assistant message cannot be modified. "
    raise Refusal("A11", f"{where}: {words}These blocks must remain as they were in the original response.")


def _check_compactions(index: int, content: list[Body]) -> None:
    for place, block in enumerate(content):
        sealed = block.get("signature")
        if (
            block["type"] == "compaction"
            and sealed
            and sealed != seal("compaction", block.get("content") or "")
        ):
            words = "Invalid `signature` in `compaction` block"
            raise Refusal("A14", f"messages.{index}.content.{place}: {words}")
