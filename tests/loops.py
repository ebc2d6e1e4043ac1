"""Tool loops with the official SDKs against any base URL: an agent that keeps its whole history and sends it.

Each step is one round of tool calls. The results are made up: 1 to 3 kB of text with a few facts, and `step
N` in the first and the last line, which is how the scripted model of `upstream` knows where it is.
"""

import json
import random
from dataclasses import dataclass, field
from typing import Any

TASK = "Audit the harbor ledger file by file; stop after {steps} steps."
TOOLS = {
    "read_file": {"path": {"type": "string"}, "line": {"type": "integer", "minimum": 1, "maximum": 400}},
    "web_search": {"query": {"type": "string"}, "limit": {"type": "integer", "minimum": 1, "maximum": 50}},
    "run_command": {"command": {"type": "string"}, "shell": {"type": "boolean"}},
}
WORDS = [
    "harbor",
    "crane",
    "ledger",
    "invoice",
    "pallet",
    "customs",
    "manifest",
    "berth",
    "tide",
    "cargo",
    "permit",
    "audit",
    "vessel",
    "quay",
]


@dataclass
class Transcript:
    """What was sent and what came back; `history` is what the agent would send next."""

    history: list[Any] = field(default_factory=list)
    replies: list[Any] = field(default_factory=list)
    """Every reply as the SDK gave it; of a stream, what the SDK put together."""
    texts: list[str] = field(default_factory=list)
    calls: list[tuple[str, str, Any]] = field(default_factory=list)
    """Id, tool and arguments of every call, in order."""
    facts: dict[str, str] = field(default_factory=dict)
    """What the results said, by name."""
    steps: int = 0

    @property
    def final(self) -> str:
        return self.texts[-1] if self.texts else ""


def result(transcript: Transcript, tool: str, step: int, place: int) -> str:
    """What a tool says: told by its step and place, so that a run can be repeated."""
    dice = random.Random(f"{tool} {step} {place}")
    facts = {
        f"{tool}_{step}_{place}_{name}": f"{dice.randrange(10**9):09}" for name in ("id", "total", "ref")
    }
    transcript.facts |= facts
    lines = [f"{tool}: step {step}, result {place}"]
    size = dice.randrange(1_000, 3_000)
    while sum(map(len, lines)) < size:
        lines.append(" ".join(dice.choices(WORDS, k=12)).capitalize() + ".")
    for name, value in facts.items():
        lines.insert(dice.randrange(1, len(lines)), f"{name} = {value}")
    return "\n".join([*lines, f"end of step {step}"])


def _schema(name: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": TOOLS[name],
        "required": list(TOOLS[name]),
        "additionalProperties": False,
    }


def chat_loop(
    base_url: str,
    steps: int,
    stream: bool = False,
    *,
    key: str = "sk-test",
    model: str = "gpt-5",
    task: str = TASK,
    headers: dict[str, str] | None = None,
    **more: Any,
) -> Transcript:
    """`more` goes into every request; so for the others."""
    from openai import OpenAI

    done = Transcript(history=[{"role": "system", "content": "You audit."}, _user(task, steps)])
    tools = [
        {
            "type": "function",
            "function": {"name": name, "description": f"{name}.", "parameters": _schema(name)},
        }
        for name in TOOLS
    ]
    request = {"model": model, "tools": tools, **more}
    with OpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=60, default_headers=headers) as client:
        while True:
            if stream:
                with client.chat.completions.stream(
                    messages=done.history, stream_options={"include_usage": True}, **request
                ) as events:
                    reply = _drained(events).get_final_completion()
            else:
                reply = client.chat.completions.create(messages=done.history, **request)
            message = reply.choices[0].message
            done.replies.append(reply)
            done.history.append(_assistant(message))
            if message.content is not None:
                done.texts.append(message.content)
            if not message.tool_calls:
                return done
            done.steps += 1
            for place, call in enumerate(message.tool_calls):
                name = call.function.name
                done.calls.append((call.id, name, json.loads(call.function.arguments)))
                text = result(done, name, done.steps, place)
                done.history.append({"role": "tool", "tool_call_id": call.id, "content": text})
            _bound(done, steps)


def _assistant(message: Any) -> dict[str, Any]:
    """A message as an agent sends it back; streams leave fields behind that are not the API's."""
    said = {"role": "assistant", "content": message.content}
    if message.tool_calls:
        said["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ]
    return said


def responses_loop(
    base_url: str,
    steps: int,
    stream: bool = False,
    *,
    key: str = "sk-test",
    model: str = "gpt-5",
    task: str = TASK,
    headers: dict[str, str] | None = None,
    **more: Any,
) -> Transcript:
    """Stateless (`store: false`), with the reasoning sent back encrypted."""
    from openai import OpenAI

    done = Transcript(history=[_user(task, steps)])
    tools = [
        {
            "type": "function",
            "name": name,
            "description": f"{name}.",
            "parameters": _schema(name),
            "strict": True,
        }
        for name in TOOLS
    ]
    request = {"model": model, "tools": tools, "store": False, "instructions": "You audit."}
    request |= {"include": ["reasoning.encrypted_content"], **more}
    with OpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=60, default_headers=headers) as client:
        while True:
            # as the body's own field: typed as `input`, the SDK takes seconds to look through a long history
            given = {"input": [], "extra_body": {"input": done.history}, **request}
            if stream:
                with client.responses.stream(**given) as events:
                    reply = _drained(events).get_final_response()
            else:
                reply = client.responses.create(**given)
            done.replies.append(reply)
            items = [
                item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in reply.output
            ]
            for item in items:
                for part in item.get("content") or []:
                    part.pop("parsed", None)
            done.history.extend(items)
            if reply.output_text:
                done.texts.append(reply.output_text)
            calls = [item for item in reply.output if item.type == "function_call"]
            if not calls:
                return done
            done.steps += 1
            for place, call in enumerate(calls):
                done.calls.append((call.call_id, call.name, json.loads(call.arguments)))
                text = result(done, call.name, done.steps, place)
                done.history.append({"type": "function_call_output", "call_id": call.call_id, "output": text})
            _bound(done, steps)


def anthropic_loop(
    base_url: str,
    steps: int,
    stream: bool = False,
    *,
    key: str = "sk-ant-test",
    model: str = "claude-sonnet-5",
    task: str = TASK,
    headers: dict[str, str] | None = None,
    **more: Any,
) -> Transcript:
    from anthropic import Anthropic

    done = Transcript(history=[_user(task, steps)])
    tools = [{"name": name, "description": f"{name}.", "input_schema": _schema(name)} for name in TOOLS]
    request = {"model": model, "tools": tools, "max_tokens": 500, "system": "You audit.", **more}
    with Anthropic(
        base_url=base_url, api_key=key, max_retries=0, timeout=60, default_headers=headers
    ) as client:
        while True:
            if stream:
                with client.messages.stream(messages=done.history, **request) as events:
                    reply = _drained(events).get_final_message()
            else:
                reply = client.messages.create(messages=done.history, **request)
            done.replies.append(reply)
            content = [
                block.model_dump(exclude_none=True, exclude={"parsed_output"}) for block in reply.content
            ]
            done.history.append({"role": "assistant", "content": content})
            done.texts.extend(block.text for block in reply.content if block.type == "text")
            calls = [block for block in reply.content if block.type == "tool_use"]
            if not calls:
                return done
            done.steps += 1
            results = []
            for place, call in enumerate(calls):
                done.calls.append((call.id, call.name, call.input))
                text = result(done, call.name, done.steps, place)
                results.append({"type": "tool_result", "tool_use_id": call.id, "content": text})
            done.history.append({"role": "user", "content": results})
            _bound(done, steps)


def _user(task: str, steps: int) -> dict[str, str]:
    return {"role": "user", "content": task.replace("{steps}", str(steps))}


def _drained(events: Any) -> Any:
    for _ in events:
        pass
    return events


def _bound(done: Transcript, steps: int) -> None:
    if done.steps > 2 * steps + 10:
        raise AssertionError(f"the loop did not end after {steps} steps; it is at {done.steps}")
