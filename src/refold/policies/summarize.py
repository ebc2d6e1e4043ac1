"""The oldest messages, put together into one record of what was in them."""

import re

import msgspec

from refold.core.budget import Budget
from refold.core.event import Line
from refold.core.message import Message
from refold.core.plan import Count, Edit, Plan
from refold.core.regex import regex
from refold.core.view import View
from refold.policies.extract import summary
from refold.policies.importance import Reading
from refold.policies.oldest import Oldest, oldest
from refold.policies.outline import vocabulary

SHARE = 1 / 3
"""Of what compaction comes down to, that a summary may take where no limit is set."""
WORTH_IT = 0.9
"""Of what it stands for, that a summary takes at most."""
DEEPER = 0.9
"""Of the same, that is filled: what is summarized at once need not be summarized again so soon."""
LONGEST = 8_000
"""Tokens that it takes at most, then."""
_MANY, _TOKENS = regex(r"([\d,]+) messages"), regex(r"([\d,]+) tokens")


class Summarize(msgspec.Struct, frozen=True):
    """One summary stands for all that is older; the one before it goes into it."""

    keep_recent: int = 10
    """How many of the newest messages stay, whatever they cost."""
    max_tokens: int | None = None
    """The longest summary; unset, a third of what compaction comes down to, and at most 8,000."""
    fill: bool = True
    """Whether more than that stays where there is room for it."""

    def __call__(self, view: View, budget: Budget, count: Count, /) -> Plan:
        most = longest(self.max_tokens, budget)
        old = oldest(
            view, budget, besides=most, keep_recent=self.keep_recent, only=not self.fill, share=DEEPER
        )
        return () if old is None else fold_away(old, view, count, most, "summarize")


def longest(max_tokens: int | None, budget: Budget) -> int:
    """How much a summary may take, as it is counted."""
    share = min(LONGEST, int(budget.target * SHARE))
    return budget.counted(share if max_tokens is None else max_tokens)


def fold_away(old: Oldest, view: View, count: Count, most: int, kind: str, level: str = "summary") -> Plan:
    """The edit that shows a summary of at most so many tokens in their place, if that is shorter."""
    words = {(line.at, line.n): item.words for item in old.items for line in item.lines}
    said = [(line, words[line.at, line.n](line)) for line in old.hidden]
    places = {(line.at, line.n): item.span.start for item in old.items for line in item.lines}
    gone = {(line.at, line.n) for line in old.hidden}
    reading = Reading(view)
    rest = vocabulary(reading.text(line for line in view.lines if (line.at, line.n) not in gone))
    messages, tokens = _measure(old, said)
    handle = f"#{view.next} " if view.handles else ""

    def header(shown: str) -> str:
        return f"[refold {handle}{level}: {messages:,} messages, {tokens:,} tokens; {shown}]"

    made = summary(
        [(_at_its_place(line, places), message) for line, message in said],
        header=header,
        active=view.latest,
        elsewhere=rest,
        tokens=min(most, old.tokens - 1),
        count=count,
        task=next((line.at for line in view.lines if line.asks), None),
    )
    if count(made) > WORTH_IT * old.tokens:
        return ()
    why = f"{messages:,} messages are too many for the room there is"
    return (Edit(old.span, (made, *old.kept), kind, why, ("compact", "strategy")),)


def _at_its_place(line: Line, places: dict[tuple[int, int], int]) -> Line:
    """A shortened message is spoken of by the place of its original."""
    return line if line.summary else msgspec.structs.replace(line, at=places[line.at, line.n])


def _measure(old: Oldest, said: list[tuple[Line, Message]]) -> tuple[int, int]:
    """How many messages and tokens were there, also where something stands for them already."""
    messages = tokens = 0
    inside = {(line.at, line.n): item for item in old.items for line in item.lines}
    for line, message in said:
        item = inside[line.at, line.n]
        head = message.text.partition("\n")[0] if line.at not in item.span else ""
        messages += _number(_MANY, head) or (0 if item.is_folded else 1)
        tokens += _number(_TOKENS, head) or line.tokens
    return messages, tokens


def _number(pattern: re.Pattern[str], head: str) -> int:
    found = pattern.search(head) if head.startswith("[refold ") else None
    return int(found[1].replace(",", "")) if found else 0
