"""A conversation of any length, the same for the same seed: a task, then calls and results."""

import json
from collections.abc import Iterator
from random import Random
from typing import Any

VOCABULARY = """account address agent amount answer archive balance batch branch budget cache cancel change
check client commit config context count create cursor customer date delete detail error event export
field file filter flight folder format handle history id import index invoice item journal key label
length level limit line list log match member message method model module name note number object offer
order owner page parse path pattern payment place plan policy price process product query queue reason
record region report request result retry return review role route rule sample schema score search seat
section seed server session size source span start state status step store stream string summary table
task ticket time title token tool total trace type update user value version view window worker"""
WORDS = VOCABULARY.split()


def conversation(messages: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Chat messages: prose and JSON in results, most of them short and a few very long."""
    random = Random(seed)
    yield {"role": "system", "content": "You work through a task with tools. " + _prose(random, 60)}
    yield {
        "role": "user",
        "content": "Go through all records and report what is wrong. " + _prose(random, 40),
    }
    for n in range((messages - 2) // 2):
        id = f"call_{random.getrandbits(64):016x}"
        tool = random.choice(("read_file", "search", "query", "list_folder"))
        arguments = json.dumps({"path": f"/{'/'.join(random.choices(WORDS, k=3))}", "page": n})
        call = {"id": id, "type": "function", "function": {"name": tool, "arguments": arguments}}
        yield {"role": "assistant", "content": _prose(random, random.randint(0, 30)), "tool_calls": [call]}
        yield {"role": "tool", "tool_call_id": id, "content": _result(random)}


def _result(random: Random) -> str:
    size = min(4_000, int(random.lognormvariate(4.4, 1.0)))
    if random.random() < 0.5:
        return _prose(random, size)
    rows = [
        {
            "id": f"{random.getrandbits(48):012x}",
            random.choice(WORDS): random.randint(0, 99_999),
            "name": word,
        }
        for word in random.choices(WORDS, k=max(1, size // 8))
    ]
    return json.dumps(rows)


def _prose(random: Random, words: int) -> str:
    text = [f"{random.choice(WORDS)}{random.choice(('', '', '', '.', ',', f' {random.randint(0, 9999)}'))}"]
    text += [random.choice(WORDS) for _ in range(words)]
    for i in range(0, len(text), 9):
        text[i] += f" {random.getrandbits(24):06x}"
    return " ".join(text)
