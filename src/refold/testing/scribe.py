"""A summarizer without a model, for tests and benchmarks: it writes as models do, forgets, makes things up.

It is honest about one thing only: what it writes has the headings that were asked for. Of the originals it
tells no more than the newest calls, and it names things that do not exist.
"""

import json
import re

from refold.config.prompts import SECTIONS
from refold.summaries.summarizer import Ask

EACH = 80
"""Tokens that it thinks a call takes, told twice."""
CALLS = 8
"""The newest calls that it tells of, and as many of the lines that it finds in the summary before."""
_REQUESTS = re.compile(r"^#(\d+) (.*)$", re.MULTILINE)


class Scribe:
    """`lies` is how many of its lines are made up."""

    def __init__(self, lies: int = 2) -> None:
        self.asked: list[Ask] = []
        """What it was asked, in order."""
        self.lies = lies

    def __call__(self, ask: Ask, /) -> str:
        self.asked.append(ask)
        if ask.kind == "message":
            return json.dumps({"summary": " ".join(ask.messages[0].text.split()[:20])})
        requests = _REQUESTS.findall(ask.prompt.partition("<requests>")[2].partition("</requests>")[0])
        most = max(1, min(CALLS, ask.max_tokens // EACH))
        calls = [call for message in ask.messages for call in message.calls][-most:]
        before = [line for line in (ask.previous or "").split("\n") if line.startswith("- Called ")]
        done = [f"Called {call.tool} with {' '.join(call.input.split())[:60]}" for call in calls]
        lies = [f"Moved {n} files to /srv/made_up_{ask.round}_{n}" for n in range(self.lies)]
        told = {
            "Requests of the user": [f"#{at} (open) {text[:40]}" for at, text in requests],
            "Work done": [line[2:] for line in before[-most:]] + done + lies,
            "Current state": done[-1:],
            "Next action": done[-1:],
        }
        return "\n".join(
            line for title in SECTIONS for line in (f"## {title}", *_listed(told.get(title, [])))
        )


def _listed(lines: list[str]) -> list[str]:
    return [f"- {line}" for line in lines] or ["- none"]
