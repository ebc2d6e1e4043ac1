"""Conversations as agents really leave them, from a seed: aborted calls, orphans, repeats, odd orders."""

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

WORDS = ("the", "flight", "Oslo", "Lisbon", "leaves at", "7:40", "costs", "129 €", "{'full': true}", "\n")


class Call(NamedTuple):
    id: str
    tool: str
    input: str

    @property
    def kind(self) -> str:
        """Which kind of call of the Responses it is, the same for the same tool."""
        return {"bash": "shell_call", "patch": "custom_tool_call"}.get(self.tool, "function_call")


class Step(NamedTuple):
    """One thing that happens: somebody says something, calls tools, or a tool answers."""

    role: str
    text: str = ""
    calls: tuple[Call, ...] = ()
    answers: tuple[str, ...] = ()
    thinking: bool = False
    image: bool = False


def steps(random: Random) -> list[Step]:
    """A conversation before it is written in any dialect."""
    told: list[Step] = []
    if random.random() < 0.5:
        told.append(Step("system", words(random, 60)))
    open_calls: list[str] = []
    known: list[str] = []
    for n in range(random.choice((1, 3, 8, 20, 40))):
        odd = random.random()
        if odd < 0.25 or not told:
            told.append(Step("user", words(random, 80), image=random.random() < 0.05))
        elif odd < 0.70:
            count = random.choice((0, 1, 1, 1, 2, 3)) if random.random() < 0.9 else 0
            calls = tuple(_call(random, f"call_{n}_{m}", known) for m in range(count))
            said = words(random, 40) if not calls or random.random() < 0.5 else ""
            told.append(Step("assistant", said, calls, thinking=random.random() < 0.3))
            open_calls += [call.id for call in calls]
            known += [call.id for call in calls]
            told += _answers(random, open_calls)
        elif odd < 0.75:
            told.append(Step("system", words(random, 20)))
        elif odd < 0.80:
            told.append(Step("tool", words(random, 40), answers=("never_called",)))
        elif odd < 0.84 and known:
            told.append(Step("tool", words(random, 40), answers=(random.choice(known),)))
        elif odd < 0.90:
            told.append(Step(random.choice(("user", "assistant")), random.choice(("", " ", "\n"))))
        else:
            told += _answers(random, open_calls)
    return told


def _call(random: Random, id: str, known: list[str]) -> Call:
    if random.random() < 0.03:
        id = id + "x" * 70
    elif random.random() < 0.03:
        id = id + "|fc:1"
    elif random.random() < 0.03 and known:
        id = random.choice(known)
    input = random.choice(("{}", '{"path":"a.py","n":1.50}', "", "[1]", '{"broken', '"text"'))
    return Call(id, random.choice(("read", "bash", "search", "patch")), input)


def _answers(random: Random, open_calls: list[str]) -> list[Step]:
    """Most are answered at once and in order; some late, in another order, together, or never."""
    if random.random() < 0.1:
        return []
    now = [id for id in open_calls if random.random() < 0.92]
    if random.random() < 0.2:
        random.shuffle(now)
    for id in now:
        open_calls.remove(id)
    long = random.choice((10, 40, 40, 400, 2_000))
    if len(now) > 1 and random.random() < 0.5:
        return [Step("tool", words(random, long), answers=tuple(now))]
    between = [Step("user", words(random, 10))] if random.random() < 0.1 else []
    return [*between, *(Step("tool", words(random, long), answers=(id,)) for id in now)]


def words(random: Random, most: int) -> str:
    count = random.randrange(most)
    return " ".join(random.choices(WORDS, k=min(count, 12)) * (1 + count // 12))


def openai_chat(told: list[Step]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for step in told:
        if step.role == "tool":
            messages += [{"role": "tool", "tool_call_id": id, "content": step.text} for id in step.answers]
            continue
        content: Any = step.text or (None if step.calls else "")
        if step.image:
            image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
            content = [{"type": "text", "text": step.text}, image]
        message: dict[str, Any] = {"role": step.role, "content": content}
        if step.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.tool, "arguments": call.input}}
                for call in step.calls
            ]
        messages.append(message)
    return messages


def anthropic(told: list[Step]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for step in told:
        if step.role == "system":
            messages.append({"role": "system", "content": step.text} if messages else {"system": step.text})
            continue
        if step.role == "tool":
            blocks: list[dict[str, Any]] = [
                {"type": "tool_result", "tool_use_id": id, "content": step.text} for id in step.answers
            ]
            beside = [{"type": "text", "text": step.text[:20]}] if len(step.answers) > 1 else []
            messages.append({"role": "user", "content": blocks + beside})
            continue
        blocks = [{"type": "thinking", "thinking": "Hm.", "signature": "c2ln"}] if step.thinking else []
        blocks += [{"type": "text", "text": step.text}] if step.text or not step.calls else []
        if step.image:
            source = {"type": "url", "url": "https://example.org/a.png"}
            blocks.append({"type": "image", "source": source})
        blocks += [
            {"type": "tool_use", "id": call.id, "name": call.tool, "input": {"asked": call.input}}
            for call in step.calls
        ]
        role = step.role
        messages.append({"role": role, "content": step.text if len(blocks) == 1 and step.text else blocks})
    return messages


def openai_responses(told: list[Step]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    kinds = {call.id: call.kind for step in told for call in step.calls}
    for n, step in enumerate(told):
        if step.role == "tool":
            items += [
                {"type": f"{kinds.get(id, 'function_call')}_output", "call_id": id, "output": step.text}
                for id in step.answers
            ]
            continue
        if step.thinking:
            items.append({"type": "reasoning", "id": f"rs_{n}", "summary": [], "encrypted_content": "abc"})
        if step.text or not step.calls:
            items.append({"role": step.role, "content": step.text})
        items += [
            {"type": call.kind, "call_id": call.id, "name": call.tool, "arguments": call.input}
            | {"input": call.input, "action": {"commands": ["ls"]}}
            | ({"id": f"fc_{n}_{m}"} if call.kind == "function_call" else {})
            for m, call in enumerate(step.calls)
        ]
    return items


def ai_sdk(told: list[Step]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    tools = {call.id: call.tool for step in told for call in step.calls}
    for step in told:
        if step.role == "tool":
            parts: list[dict[str, Any]] = [
                {"type": "tool-result", "toolCallId": id, "toolName": tools.get(id, "none")}
                | {"output": {"type": "text", "value": step.text}}
                for id in step.answers
            ]
            messages.append({"role": "tool", "content": parts})
        elif step.calls or step.thinking:
            parts = [{"type": "reasoning", "text": "Hm."}] if step.thinking else []
            parts += [{"type": "text", "text": step.text}] if step.text else []
            parts += [
                {
                    "type": "tool-call",
                    "toolCallId": call.id,
                    "toolName": call.tool,
                    "input": {"a": call.input},
                }
                for call in step.calls
            ]
            messages.append({"role": step.role, "content": parts})
        else:
            messages.append({"role": step.role, "content": step.text})
    return messages


DIALECTS: dict[str, Callable[[list[Step]], list[dict[str, Any]]]] = {
    "openai-chat": openai_chat,
    "anthropic": anthropic,
    "openai-responses": openai_responses,
    "ai-sdk": ai_sdk,
}
