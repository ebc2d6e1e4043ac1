"""`Dedupe`: of repeated tool outputs the newest stays, older ones point to it."""

from collections import Counter
from itertools import pairwise
from zlib import crc32

import msgspec

from refold.core.budget import Budget
from refold.core.event import Line
from refold.core.lazy import regex
from refold.core.message import Message
from refold.core.plan import Count, Edit, Plan, protected, reducible
from refold.core.view import View
from refold.policies.shorten import Reduction
from refold.policies.text import vocabulary, words

SKETCH = 48
"""Word hashes that are compared before the words themselves."""
MIN_OUTPUT_TOKENS = 64
INDEXED_HASHES = 4
CANDIDATES = 4
"""How many outputs with a common hash are compared."""
MAX_EXTRA_WORDS = 40
"""An older output with more words that the newest does not have is left alone."""
_WORD = regex(r"\w+")


class Dedupe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Replaces outputs of a tool that it repeated later, exactly or nearly."""

    similarity: float = 0.9
    """The share of common word pairs from which on two outputs count as the same, from 0 to 1."""

    def __call__(self, view: View, budget: Budget, count: Count, /) -> Plan:
        fixed = protected(view)
        newest = _NewestOutputs(self.similarity)
        plan: list[Edit] = []
        for item in reversed(reducible(view)):
            line = item.lines[0]
            if item.edit is not None or line.answers is None or line.tokens < MIN_OUTPUT_TOKENS:
                continue
            reduction = Reduction.of(item, view)
            if reduction is None or not reduction.text:
                continue
            output = _Output(line, reduction.text)
            same = newest.like(output)
            is_new = line.at in fixed or line.step >= view.step - 1  # the model has not seen it
            shown = None if same is None or is_new else _pointer(reduction, output, same)
            if same is not None and shown is not None and reduction.if_shorter(shown, count):
                why = f"#{same.line.at} says the same" + ("" if same.text == output.text else ", nearly")
                plan.append(Edit(item.span, (shown,), "dedupe", why, ("dedupe", "similarity")))
            elif same is None:
                newest.add(output)
        return plan


class _Output:
    """A tool output with its sketch and word pairs."""

    def __init__(self, line: Line, text: str) -> None:
        self.line = line
        self.text = text
        self.tool = line.tools[0] if line.tools else ""
        self.sketch = _sketch(text)
        self._pairs: Counter[tuple[str, str]] | None = None

    @property
    def pairs(self) -> Counter[tuple[str, str]]:
        """Each word with the one after it."""
        if self._pairs is None:
            self._pairs = Counter(pairwise(_WORD.findall(self.text)))
        return self._pairs


class _NewestOutputs:
    """Outputs that stay, indexed by their text and by some word hashes."""

    def __init__(self, similarity: float) -> None:
        self.similarity = similarity
        self._texts = dict[tuple[str, str], _Output]()
        self._words = dict[tuple[str, int], list[_Output]]()

    def add(self, output: _Output) -> None:
        self._texts[output.tool, output.text] = output
        for word in output.sketch[:INDEXED_HASHES]:
            self._words.setdefault((output.tool, word), []).append(output)

    def like(self, output: _Output) -> _Output | None:
        same = self._texts.get((output.tool, output.text))
        if same is not None or self.similarity >= 1:
            return same
        candidates: dict[_Output, None] = {}
        for word in output.sketch[:INDEXED_HASHES]:
            similar = self._words.get((output.tool, word), ())[-CANDIDATES:]
            candidates.update(dict.fromkeys(similar))
        return next((other for other in candidates if self._is_near(output, other)), None)

    def _is_near(self, one: _Output, other: _Output) -> bool:
        short, long = sorted((len(one.text), len(other.text)))
        if short < long * self.similarity * 0.9:
            return False
        shared = len({*one.sketch} & {*other.sketch}) / max(1, min(len(one.sketch), len(other.sketch)))
        if shared < self.similarity * 0.7:
            return False
        similarity = 2 * (one.pairs & other.pairs).total() / max(1, one.pairs.total() + other.pairs.total())
        return similarity >= self.similarity


def _sketch(text: str) -> tuple[int, ...]:
    hashes = {crc32(word.encode("utf-8", "replace")) for word in _WORD.findall(text)}
    return tuple(sorted(hashes)[:SKETCH])


def _pointer(reduction: Reduction, old: _Output, new: _Output) -> Message | None:
    """A pointer to the newest, with the words that it does not have; None if those are many."""
    where = f"same as #{new.line.at}" if reduction.handles else "same as a later one"
    if old.text == new.text:
        return reduction.as_name(where)
    known = vocabulary(new.text)
    gone = [word for word in dict.fromkeys(words(old.text)) if word and word not in known]
    if len(gone) > MAX_EXTRA_WORDS:
        return None
    body = " ".join(gone)
    return reduction.as_name(f"nearly the {where}" + (", but for" if body else ""), body)
