"""What the model saw at each of its calls: one walk over the heads of a stream, gone on with as it grows."""

from msgspec.structs import replace

from refold.core import codec
from refold.core.codec import Link
from refold.core.event import Line
from refold.core.live import Live, MeasuredHead, ReplacedHead
from refold.serve.schemas import Kinds, Step
from refold.stores.record import Record

MOST_STEPS = 2_000
"""Of more, neighbors become one."""


class Walk:
    """Of one conversation, from its beginning on."""

    def __init__(self, record: Record) -> None:
        self.saved_tokens = 0
        """That were said and not sent again, of all calls together."""
        self._live = Live(record.view, record.message)
        self._digest = b""
        self._steps: list[Step] = []
        self._kinds, self._edition, self._edits = Kinds(), 0, 0
        self._many, self._every = 0, 1

    def steps(self, limit: int) -> list[Step]:
        steps = self._steps
        while len(steps) > limit:
            steps = _halved(steps)
        return steps

    def follows(self, record: Record) -> bool:
        """It is of this record, as far as it went, and not of one that was erased."""
        return not self._digest or self._digest.hex() == record.digest_before(self._live.state.next)

    def go_on(self, record: Record) -> None:
        """Up to what the record has now."""
        for link in record.store.read(record.key, self._live.state.next, record.live.state.next):
            self._apply(link, record)

    def _apply(self, link: Link, record: Record) -> None:
        head, live = codec.head(link.entry), self._live
        if isinstance(head, Line) and head.step > live.state.step:
            self._step(head)
        live.apply(head, link.entry.at, record)
        self._digest = link.digest
        if isinstance(head, ReplacedHead) and head.view == live.view:
            self._edits += 1
        elif isinstance(head, MeasuredHead) and head.view == live.view and head.input and self._steps:
            self._steps[-1].sent = head.input
        if live.edition != self._edition:
            self._edition, self._kinds = live.edition, Kinds()
            for item in live.items:
                for line in item.lines:
                    self._add(line)
        elif isinstance(head, Line):
            self._add(head)

    def _step(self, answer: Line) -> None:
        live = self._live
        self.saved_tokens += max(0, live.state.total - live.tokens)
        if self._many % self._every:  # it joins the one before, so that all are equally far apart
            self._edits += self._steps.pop().edits
        self._steps.append(Step(answer.step, answer.at, replace(self._kinds), live.tokens, self._edits))
        self._edits, self._many = 0, self._many + 1
        if len(self._steps) > 2 * MOST_STEPS:
            self._steps, self._every = _halved(self._steps), 2 * self._every

    def _add(self, line: Line) -> None:
        kind = "summary" if line.summary else line.role
        setattr(self._kinds, kind, getattr(self._kinds, kind) + line.tokens)


def _halved(steps: list[Step]) -> list[Step]:
    """Every second one, with the edits of both."""
    first = len(steps) % 2
    pairs = zip(steps[first::2], steps[first + 1 :: 2], strict=True)
    return steps[:first] + [replace(two, edits=one.edits + two.edits) for one, two in pairs]
