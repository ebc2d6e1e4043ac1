"""A repeated read of the same thing: the newest stays, older ones point to it."""

from collections import Counter
from functools import lru_cache
from itertools import islice
from typing import NamedTuple
from zlib import crc32

import msgspec

from refold.core.budget import Budget
from refold.core.event import Line
from refold.core.message import Message
from refold.core.plan import Count, Edit, Plan, protected, reducible
from refold.core.regex import regex
from refold.core.view import View
from refold.policies.importance import SHORT
from refold.policies.outline import exact, vocabulary
from refold.policies.reduced import Reduction

SKETCH = 48
"""Hashes of words that are compared before the words are."""
MINIMUM = 64
"""Tokens of an output that are worth a pointer."""
MOST_WORDS = 40
"""What an older output has and the newest has not, as far as it is named."""
_WORD = regex(r"\w+")


class Dedupe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Outputs of one tool that say the same, or nearly so."""

    similarity: float = 0.9
    """From which share of common words on two outputs are the same, from 0 to 1."""

    def __call__(self, view: View, budget: Budget, count: Count, /) -> Plan:
        fixed = protected(view)
        newest = dict[str, list[_Output]]()
        plan = list[Edit]()
        for item in reversed(reducible(view)):
            line = item.lines[0]
            if item.edit is not None or line.answers is None or line.tokens < MINIMUM:
                continue
            reduction = Reduction.of(item, view.handles)
            if reduction is None or not reduction.text:
                continue
            output, tool = _Output(line, reduction.text), line.tools[0] if line.tools else ""
            same = next((new for new in newest.get(tool, ()) if self._is_same(output, new)), None)
            if same is None:
                newest.setdefault(tool, []).append(output)
            elif line.at not in fixed:
                shown = _pointer(reduction, output, same)
                if count(shown) < line.tokens:
                    why = f"#{same.line.at} says the same" + ("" if same.text == output.text else ", nearly")
                    plan.append(Edit(item.span, (shown,), "dedupe", why, ("dedupe", "similarity")))
        return plan

    def _is_same(self, one: "_Output", other: "_Output") -> bool:
        if one.text == other.text:
            return True
        short, long = sorted((len(one.text), len(other.text)))
        if self.similarity >= 1 or short < long * self.similarity * 0.9:
            return False
        likely = len(one.sketch & other.sketch) / max(1, min(len(one.sketch), len(other.sketch)))
        return likely >= self.similarity * 0.7 and _similarity(one.words, other.words) >= self.similarity


class _Output(NamedTuple):
    line: Line
    text: str

    @property
    def words(self) -> Counter[str]:
        return Counter(_WORD.findall(self.text))

    @property
    def sketch(self) -> frozenset[int]:
        return _sketch(self.text) if len(self.text) < SHORT else _hashed(self.text)


def _hashed(text: str) -> frozenset[int]:
    return frozenset(
        sorted({crc32(word.encode("utf-8", "replace")) for word in _WORD.findall(text)})[:SKETCH]
    )


_sketch = lru_cache(maxsize=1_024)(_hashed)


def _similarity(one: Counter[str], other: Counter[str]) -> float:
    return 2 * (one & other).total() / max(1, one.total() + other.total())


def _pointer(reduction: Reduction, old: _Output, new: _Output) -> Message:
    """What the newest does not have is named, so that nothing exact is lost."""
    where = f"same as #{new.line.at}" if reduction.handles else "same as a later one"
    if old.text == new.text:
        return reduction.as_name(where)
    known = vocabulary(new.text)
    body = " ".join(islice((word for word in exact(old.text) if word not in known), MOST_WORDS))
    return reduction.as_name(f"nearly the {where}" + (", but for" if body else ""), body)
