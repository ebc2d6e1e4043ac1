"""How far off are the counts? Estimates against the usage that providers reported, on recorded requests.

python -m benchmarks.counting ../shared/data
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, pstdev
from typing import Any

import msgspec

from refold.core.message import Message
from refold.dialects import anthropic, openai_chat
from refold.models.calibrate import Anchor, Calibration, estimate, update
from refold.models.count import Counter, counter

CONVERSATION_MODEL = "claude-opus-4-5"
"""What the recorded conversation is taken for; its file does not say."""
SETTLED = 3
"""Calls after which a conversation counts as calibrated."""
LOW = -2.0
"""Percent; an estimate below this is too low."""
MARGINS = (1.0, 1.1, 1.15, 1.2, 1.25, 1.3, 1.4)
VOCABULARIES = ("o200k_base", "cl100k_base", "deepseek_v3", "gemma4", "kimi_k2", "mistral_v3", "qwen3")


@dataclass(frozen=True, slots=True)
class Call:
    """One request, and what the provider said it took."""

    model: str
    request: Mapping[str, Any]
    tokens: int
    kind: str = "plain"
    """`plain`; `served` where tools are offered that the provider has; `inside` where it ran them itself."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Of estimates, in percent of what was reported; low is negative."""

    name: str
    percents: Sequence[float]

    @property
    def too_low(self) -> float:
        """The share of calls that were low by more than 2 %."""
        return mean(percent < LOW for percent in self.percents)

    def cells(self) -> tuple[str, ...]:
        ordered = sorted(self.percents)
        low, high = ordered[len(ordered) // 20], ordered[-1 - len(ordered) // 20]
        numbers = (ordered[0], low, median(ordered), high, ordered[-1])
        return (self.name, f"{len(ordered)}", *(f"{n:+.1f}" for n in numbers), f"{self.too_low:.1%}")


def percent(estimated: int, reported: int) -> float:
    return 100 * (estimated - reported) / reported


# What was recorded


def claude_calls(data: Path) -> Iterator[Call]:
    """Requests to Anthropic with the usage of the answer, or with what counting tokens answered."""
    for line in _lines(data / "recordings" / "api_anthropic_count_tokens.jsonl"):
        if line["status"] == 200:
            yield Call(line["request"]["model"], line["request"], line["response"]["input_tokens"])
    for line in _lines(data / "recordings" / "api_anthropic_messages.jsonl"):
        request, usage = line["request"], _usage(line["response"])
        tokens = sum(usage.get(f"{kind}input_tokens") or 0 for kind in ("", "cache_read_", "cache_creation_"))
        inside = usage.get("server_tool_use") or len(usage.get("iterations") or ()) > 1
        served = any(tool.get("type", "custom") != "custom" for tool in request.get("tools", ()))
        yield Call(request["model"], request, tokens, "inside" if inside else "served" if served else "plain")


def openai_calls(data: Path) -> Iterator[Call]:
    """Chat requests to OpenAI without media: those take what their rules say, or what is unknown of them."""
    for line in _lines(data / "recordings" / "api_openai_chat.jsonl"):
        request, response = line["request"], line["response"]
        usage = response.get("usage") if isinstance(response, dict) else _last_usage(response)
        contents = [message.get("content") for message in request["messages"]]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        if line["status"] == 200 and usage and all(part["type"] == "text" for part in parts):
            kind = "served" if request.get("web_search_options") else "plain"
            yield Call(request["model"], request, usage["prompt_tokens"], kind)


def conversation(data: Path, count: Callable[[Message], int]) -> list[Anchor]:
    """The calls of one long conversation: what is counted for each, and what it took.

    Its agent left out answers that were broken off. System and tools are not in the file.
    """
    counted, calls = 0, list[Anchor]()
    (line,) = _lines(data / "traces" / "pi_coding_agent.jsonl")
    for message in line["messages"]:
        usage = message.get("x_usage", {})
        tokens = sum(usage.get(kind, 0) for kind in ("input", "cacheRead", "cacheWrite"))
        if tokens:
            calls.append(Anchor(counted, tokens))
        if message.get("x_stop_reason") not in ("aborted", "error"):
            plain = {key: value for key, value in message.items() if not key.startswith("x_")}
            counted += count(openai_chat.parse(plain))
    return calls


def _lines(file: Path) -> Iterator[Any]:
    return map(json.loads, file.read_text().splitlines())


def _usage(response: Any) -> dict[str, Any]:
    """Of an answer; of a stream its first, which is of the request alone."""
    if isinstance(response, dict):
        return response["usage"]  # type: ignore[no-any-return]
    events = (json.loads(line[5:]) for line in response.splitlines() if line.startswith("data:"))
    return next(event for event in events if event["type"] == "message_start")["message"]["usage"]  # type: ignore[no-any-return]


def _last_usage(stream: str) -> dict[str, Any] | None:
    lines = [line[5:].strip() for line in stream.splitlines() if line.startswith("data:")]
    found = [json.loads(line).get("usage") for line in lines if line.startswith("{")]
    return next(filter(None, reversed(found)), None)


# What is estimated


def claude_estimate(call: Call, count: Counter) -> int:
    request = call.request
    counted = sum(count.message(anthropic.parse(message)) for message in request["messages"])
    counted += count.system(request.get("system"))
    counted += count.tools(request.get("tools", ()), request.get("tool_choice"))
    counted += count.shape(request.get("output_config", {}).get("format", {}).get("schema"))
    return count.estimate(counted)


def openai_estimate(call: Call, count: Counter) -> int:
    request = call.request
    counted = sum(count.message(openai_chat.parse(message)) for message in request["messages"])
    counted += count.tools(request.get("tools") or (), request.get("tool_choice"))
    counted += count.shape((request.get("response_format") or {}).get("json_schema"))
    return count.estimate(counted)


def uncalibrated(data: Path, change: Callable[[Counter], Counter] = lambda count: count) -> Iterator[Errors]:
    """What a first request is off by, with the model's counter or a changed one."""
    calls = [(call, change(counter(call.model))) for call in claude_calls(data)]
    for kind, name in (("plain", "Claude, requests"), ("served", "Claude, its own tools offered")):
        found = [percent(claude_estimate(*call), call[0].tokens) for call in calls if call[0].kind == kind]
        yield Errors(name, found)
    first, *rest = conversation(data, change(counter(CONVERSATION_MODEL)).message)
    apart = first.tokens - first.counted  # what a caller would have given us: system and tools
    yield Errors("Claude, a conversation", [percent(apart + one.counted, one.tokens) for one in rest])


def calibrated(data: Path) -> Errors:
    """What the calls of the conversation are off by, each estimated with what the ones before it took."""
    count = counter(CONVERSATION_MODEL)
    calibration, anchor, percents = Calibration(), None, []
    for call in conversation(data, count.message):
        percents.append(percent(estimate(call.counted, count, calibration, anchor), call.tokens))
        calibration = update(calibration, call.counted, call.tokens, anchor)
        anchor = call
    return Errors("Claude, a conversation, calibrated", percents[SETTLED:])


def openai(data: Path) -> Errors:
    calls = [call for call in openai_calls(data) if call.kind == "plain"]
    return Errors(
        "OpenAI, chat requests", [percent(openai_estimate(c, counter(c.model)), c.tokens) for c in calls]
    )


def with_margin(margin: float) -> Callable[[Counter], Counter]:
    """The older models' margin changed, and the newer ones' in proportion."""
    known = counter(CONVERSATION_MODEL).margin

    def change(count: Counter) -> Counter:
        changed = count.framing.margin / known * margin
        return Counter(msgspec.structs.replace(count.framing, margin=changed))

    return change


def vocabulary_spread(data: Path, vocabulary: str) -> tuple[float, float]:
    """What a token of a vocabulary is in Claude's, and how much that varies from one step to the next."""
    framing = msgspec.structs.replace(counter(CONVERSATION_MODEL).framing, margin=1.0, vocabulary=vocabulary)
    calls = conversation(data, Counter(framing).message)
    steps = [(b.counted - a.counted, b.tokens - a.tokens) for a, b in pairwise(calls)]
    ratios = [took / counted for counted, took in steps if counted >= 300 and took > 0]
    return mean(ratios), pstdev(ratios) / mean(ratios)


# What is printed


def run(data: Path) -> None:
    titles = ("percent off", "calls", "lowest", "5 %", "median", "95 %", "highest", "low by over 2 %")
    table = [errors.cells() for errors in (*uncalibrated(data), calibrated(data), openai(data))]
    _print(titles, table)
    sweep = [(margin, list(uncalibrated(data, with_margin(margin)))) for margin in MARGINS]
    _print(
        ("margin", *(f"{errors.name}: low by over 2 %, median" for errors in sweep[0][1])),
        [(f"{m:.2f}", *(f"{e.too_low:.1%}, {median(e.percents):+.1f}" for e in found)) for m, found in sweep],
    )
    spreads = [(name, *vocabulary_spread(data, name)) for name in VOCABULARIES]
    _print(
        ("vocabulary", "Claude's tokens for one", "spread"),
        [(name, f"{ratio:.2f}", f"{spread:.1%}") for name, ratio, spread in spreads],
    )


def _print(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    for row in (titles, ("---", *("---:",) * (len(titles) - 1)), *rows):
        print(f"| {' | '.join(row)} |")
    print()


if __name__ == "__main__":
    run(Path(sys.argv[1]))
