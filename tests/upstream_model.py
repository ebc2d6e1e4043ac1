"""What does the scripted model answer? A pure function of the request, so that a client can drive long loops.

It reads how far the task is from `step N` in the newest tool results (never from how many messages there are,
since a history may be compacted), calls the offered tools in turn until the task's `stop after N steps`, and
then answers with text. Where the task says `use refold tools`, it opens handles like `[refold #57 …]`.

Every text ends with a check of itself, every call's id with one of its name and arguments, so that a client
can tell whether a reply came through intact: `is_intact_text`, `is_intact_call`.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

from upstream_rules import Body, Dialect, blocks

WORDS = ("ledger", "naïve café", "漢字", "Ωmega", "harbor", "𝒻unction", "👩‍🚀 crew", "señal", "मार्ग", "quota")
ODD = 'zero\u200bwidth, right\u200f-to-left, e\u0301 combining, tab\there, \u2028 line, \\u0041 "quoted"'


@dataclass(frozen=True, slots=True)
class Call:
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model says, whatever the dialect; `seed` makes all its ids."""

    seed: str
    thinking: str | None = None
    text: str | None = None
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class Question:
    """What the model looks at."""

    users: tuple[str, ...]
    results: tuple[tuple[str, str], ...]
    """Tool and text of every result, oldest first."""
    newest: int
    """How many of them came after the last word of the model."""
    everything: str
    tools: tuple[tuple[str, Body], ...]
    may_think: bool
    one_call: bool


def is_intact_text(text: str) -> bool:
    said, _, check = text.rpartition(" ⟦")
    return check == f"{_digest(said)[:8]}⟧"


def is_intact_call(call_id: str, name: str, arguments: Any) -> bool:
    """`arguments` as the object that they are."""
    return call_id.endswith(_check(name, arguments))


def answer(body: Body, dialect: Dialect, seed: str, mode: str) -> Reply:
    asked = read(body, dialect)
    if mode == "echo":
        return Reply(seed, text=asked.users[-1] if asked.users else "")
    if mode == "huge":
        return Reply(seed, text=_checked("All of it, ünabridged. " * 100_000))
    task = "\n".join(asked.users)
    step = _step(asked)
    thinking = (
        f"Step {step + 1}: {WORDS[step % len(WORDS)]} comes next. {ODD}"
        if asked.may_think and not step % 2
        else None
    )
    limits = re.findall(r"stop after (\d+) steps", task)
    is_done = not asked.tools or (limits and step >= int(limits[-1]))
    if is_done:
        last = asked.users[-1][:60] if asked.users else ""
        return Reply(seed, thinking, _checked(f"Done after {step} steps. {ODD} You asked: {last}"))
    chosen = _choose(asked, step, "use refold tools" in task)
    prefix = {"chat": "call_", "responses": "call_", "anthropic": "toolu_01T" if thinking else "toolu_01P"}[
        dialect
    ]
    calls = []
    for place, (name, given) in enumerate(chosen):
        call_id = f"{prefix}{seed[:10]}{place:02}{_check(name, given)}"
        calls.append(Call(call_id, name, json.dumps(given, ensure_ascii=False)))
    text = _checked(f"Now step {step + 1}, about {WORDS[step % len(WORDS)]}.") if step % 3 == 1 else None
    return Reply(seed, thinking, text, tuple(calls))


def _step(asked: Question) -> int:
    """The highest step in the newest results, or in the newest older one with any; no expansions."""
    own = [(at, text) for at, (tool, text) in enumerate(asked.results) if not tool.startswith("refold_")]
    steps = [(at, [int(number) for number in re.findall(r"\bstep (\d+)\b", text)]) for at, text in own]
    newest = [max(found) for at, found in steps if found and at >= len(asked.results) - asked.newest]
    return max(newest) if newest else next((max(found) for _, found in reversed(steps) if found), 0)


def _choose(asked: Question, step: int, may_refold: bool) -> list[tuple[str, Body]]:
    """Which tools, with which arguments: in turn, sometimes two or three at once."""
    offered = dict(asked.tools)
    own = [name for name in offered if not name.startswith("refold_")] or list(offered)
    many = 1 if asked.one_call else {2: 2, 7: 3}.get(step % 10, 1)
    chosen = [own[(step + place) % len(own)] for place in range(many)]
    calls = [(name, fill(offered[name], step, place)) for place, name in enumerate(chosen)]
    has_refolded = any(
        tool.startswith("refold_") for tool, _ in asked.results[len(asked.results) - asked.newest :]
    )
    if not may_refold or has_refolded:
        return calls
    handles = sorted({int(place) for place in re.findall(r"\[refold #(\d+)", asked.everything)})
    if "refold_expand" in offered and handles and step % 7 == 3:
        opened = (
            "refold_expand",
            {"at": handles[step % len(handles)], "reason": f"needed in step {step + 1}"},
        )
        return [opened] if step % 2 or asked.one_call else [opened, *calls]
    if "refold_search" in offered and step % 11 == 5:
        return [("refold_search", {"query": WORDS[step % len(WORDS)]})]
    return calls


def fill(schema: Body, step: int, place: int) -> Any:
    """A value that a schema allows, told by the step."""
    if schema.get("enum"):
        return schema["enum"][step % len(schema["enum"])]
    kind = schema.get("type")
    kind = next((one for one in kind if one != "null"), "null") if isinstance(kind, list) else kind
    match kind:
        case "object" | None:
            known = schema.get("properties") or {}
            return {
                name: fill(known[name], step, place)
                for name in schema.get("required") or known
                if name in known
            }
        case "array":
            return [fill(schema.get("items") or {"type": "string"}, step, place)]
        case "integer" | "number":
            low, high = int(schema.get("minimum", 0)), int(schema.get("maximum", 10**6))
            return low + step % (high - low + 1)
        case "boolean":
            return step % 2 == 0
        case "null":
            return None
    return f"{WORDS[step % len(WORDS)]} {step + 1}.{place}"


def _checked(text: str) -> str:
    return f"{text} ⟦{_digest(text)[:8]}⟧"


def _check(name: str, arguments: Any) -> str:
    return _digest(name + json.dumps(arguments, sort_keys=True))[:8]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


# What the model looks at, by dialect


def read(body: Body, dialect: Dialect) -> Question:
    users, results, newest, everything = {"chat": _chat, "responses": _responses, "anthropic": _anthropic}[
        dialect
    ](body)
    if body.get("tool_choice") in ("none", {"type": "none"}):
        tools: tuple[tuple[str, Body], ...] = ()
    else:
        tools = tuple(_tool(tool) for tool in body.get("tools") or [] if _tool(tool)[0])
    may_think = {
        "chat": False,
        "responses": bool(body.get("reasoning"))
        or "reasoning.encrypted_content" in (body.get("include") or []),
        "anthropic": (body.get("thinking") or {}).get("type") in ("enabled", "adaptive"),
    }[dialect]
    choice = body.get("tool_choice")
    one_call = body.get("parallel_tool_calls") is False
    one_call = one_call or (isinstance(choice, dict) and bool(choice.get("disable_parallel_tool_use")))
    return Question(tuple(users), tuple(results), newest, everything, tools, may_think, one_call)


Read = tuple[list[str], list[tuple[str, str]], int, str]


def _tool(tool: Body) -> tuple[str, Body]:
    function = tool.get("function") or tool
    return function.get("name") or "", function.get("parameters") or function.get("input_schema") or {}


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(_text(one.get("text") or one.get("content") or "") for one in content)
    return content if isinstance(content, str) else ""


def _chat(body: Body) -> Read:
    users, results, newest, texts = [], [], 0, []
    tools: dict[str, str] = {}
    for message in body["messages"]:
        text = _text(message.get("content"))
        texts.append(text)
        match message["role"]:
            case "user":
                users.append(text)
            case "assistant":
                newest = 0
                tools |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls") or []}
            case "tool":
                newest += 1
                results.append((tools.get(message["tool_call_id"], ""), text))
    return users, results, newest, "\n".join(texts)


def _responses(body: Body) -> Read:
    users, results, newest, texts = [], [], 0, []
    tools: dict[str, str] = {}
    items = body["input"]
    for item in [{"role": "user", "content": items}] if isinstance(items, str) else items:
        text = _text(item.get("content") or item.get("output"))
        texts.append(text)
        if item.get("role") == "user":
            users.append(text)
        elif item.get("type") == "function_call_output":
            newest += 1
            results.append((tools.get(item["call_id"], ""), text))
        else:
            newest = 0
            if item.get("type") == "function_call":
                tools[item["call_id"]] = item["name"]
    return users, results, newest, "\n".join(texts)


def _anthropic(body: Body) -> Read:
    users, results, newest, texts = [], [], 0, []
    tools: dict[str, str] = {}
    for message in body["messages"]:
        said = []
        for block in blocks(message):
            text = _text(block.get("text") or block.get("content"))
            texts.append(text)
            if message["role"] == "assistant":
                newest = 0
                if block["type"] == "tool_use":
                    tools[block["id"]] = block["name"]
            elif block["type"] == "tool_result":
                newest += 1
                results.append((tools.get(block["tool_use_id"], ""), text))
            elif block["type"] == "text":
                said.append(text)
        if said:
            users.append("\n".join(said))
    return users, results, newest, "\n".join(texts)
