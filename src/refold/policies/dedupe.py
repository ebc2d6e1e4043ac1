"""A repeated read of the same thing: the newest stays, older ones point to it."""

from collections import Counter
from functools import lru_cache
from itertools import pairwise
from zlib import crc32

import msgspec

from refold.core.budget import Budget
from refold.core.event import Line
from refold.core.lazy import regex
from refold.core.message import Message
from refold.core.plan import Count, Edit, Plan, protected, reducible
from refold.core.view import View
from refold.policies.outline import SHORT, vocabulary, words
from refold.policies.shorten import Reduction

SKETCH = 48
"""Hashes of words that are compared before the words are."""
MINIMUM = 64
"""Tokens of an output that are worth a pointer."""
KEYS, FEW = 4, 4
"""Hashes by which a similar one is looked for, and how many are compared that share one."""
MOST_WORDS = 40
"""What an older output has and the newest has not, as far as it is named."""
_WORD = regex(r"\w+")


class Dedupe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Outputs of one tool that say the same, or nearly so."""

    similarity: float = 0.9
    """From which share of common pairs of words on two outputs are the same, from 0 to 1."""

    def __call__(self, view: View, budget: Budget, count: Count, /) -> Plan:
        fixed, newest = protected(view), _Newest(self.similarity)
        plan = list[Edit]()
        for item in reversed(reducible(view)):
            line = item.lines[0]
            if item.edit is not None or line.answers is None or line.tokens < MINIMUM:
                continue
            reduction = Reduction.of(item, view)
            if reduction is None or not reduction.text:
                continue
            output = _Output(line, reduction.text)
            same = newest.like(output)
            is_new = line.at in fixed or line.step >= view.step - 1  # nobody has seen it yet
            shown = None if same is None or is_new else _pointer(reduction, output, same)
            if same is not None and shown is not None and reduction.if_shorter(shown, count):
                why = f"#{same.line.at} says the same" + ("" if same.text == output.text else ", nearly")
                plan.append(Edit(item.span, (shown,), "dedupe", why, ("dedupe", "similarity")))
            elif same is None:
                newest.add(output)
        return plan


class _Output:
    """A result, with what is compared worked out once."""

    def __init__(self, line: Line, text: str) -> None:
        self.line, self.text, self.tool = line, text, line.tools[0] if line.tools else ""
        self.sketch = _sketch(text) if len(text) < SHORT else _hashed(text)
        self._pairs: Counter[tuple[str, str]] | None = None

    @property
    def pairs(self) -> Counter[tuple[str, str]]:
        """Each word with the one after it: what is said of what."""
        if self._pairs is None:
            self._pairs = Counter(pairwise(_WORD.findall(self.text)))
        return self._pairs


class _Newest:
    """Outputs that stay, found again by their text or by some of their words."""

    def __init__(self, similarity: float) -> None:
        self.similarity = similarity
        self._texts = dict[tuple[str, str], _Output]()
        self._words = dict[tuple[str, int], list[_Output]]()

    def add(self, output: _Output) -> None:
        self._texts[output.tool, output.text] = output
        for word in output.sketch[:KEYS]:
            self._words.setdefault((output.tool, word), []).append(output)

    def like(self, output: _Output) -> _Output | None:
        same = self._texts.get((output.tool, output.text))
        if same is not None or self.similarity >= 1:
            return same
        likely = [o for word in output.sketch[:KEYS] for o in self._words.get((output.tool, word), ())[-FEW:]]
        return next((other for other in dict.fromkeys(likely) if self._is_near(output, other)), None)

    def _is_near(self, one: _Output, other: _Output) -> bool:
        short, long = sorted((len(one.text), len(other.text)))
        if short < long * self.similarity * 0.9:
            return False
        shared = len({*one.sketch} & {*other.sketch}) / max(1, min(len(one.sketch), len(other.sketch)))
        return shared >= self.similarity * 0.7 and _similarity(one.pairs, other.pairs) >= self.similarity


def _hashed(text: str) -> tuple[int, ...]:
    hashes = {crc32(word.encode("utf-8", "replace")) for word in _WORD.findall(text)}
    return tuple(sorted(hashes)[:SKETCH])


_sketch = lru_cache(maxsize=256)(_hashed)


def _similarity(one: Counter[tuple[str, str]], other: Counter[tuple[str, str]]) -> float:
    return 2 * (one & other).total() / max(1, one.total() + other.total())


def _pointer(reduction: Reduction, old: _Output, new: _Output) -> Message | None:
    """What the newest does not have is named; where that is much, there is none."""
    where = f"same as #{new.line.at}" if reduction.handles else "same as a later one"
    if old.text == new.text:
        return reduction.as_name(where)
    known = vocabulary(new.text)
    gone = [word for word in dict.fromkeys(words(old.text)) if word and word not in known]
    if len(gone) > MOST_WORDS:
        return None
    body = " ".join(gone)
    return reduction.as_name(f"nearly the {where}" + (", but for" if body else ""), body)
