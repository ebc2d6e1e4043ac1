"""What the model saw at each of its calls: one pass over a conversation, continued as it grows."""

import msgspec
from msgspec.structs import replace

from refold.core import codec
from refold.core.event import Line, Measured, Replaced
from refold.core.live import Live
from refold.stores.record import Record


class StepTokens(msgspec.Struct):
    """Tokens that the model saw."""

    system: int = 0
    user: int = 0
    assistant: int = 0
    tool: int = 0
    summary: int = 0


class StepRow(msgspec.Struct):
    """One call of the model."""

    step: int
    at: int
    """Place of its answer."""
    tokens: StepTokens
    sent: int
    """Input tokens as the provider counted them, or else as they were estimated."""
    edits: int
    """Edits made since the previous step."""


class StepHistory:
    """The steps of one conversation, from its beginning on."""

    def __init__(self, record: Record) -> None:
        self.saved_tokens = 0
        """Recorded tokens that were not sent, summed over all calls."""
        self._live = Live(record.view, record.message)
        self._digest = b""
        self._steps: list[StepRow] = []
        self._tokens = StepTokens()
        self._edition = 0
        self._edits = 0

    def steps(self, limit: int) -> list[StepRow]:
        """All steps, or so many: then neighboring ones are merged."""
        steps = self._steps
        while len(steps) > limit:
            steps = _halved(steps)
        return steps

    def follows(self, record: Record) -> bool:
        """False if the conversation was erased, and perhaps begun anew, since the last `catch_up`."""
        return not self._digest or self._digest.hex() == record.digest_before(self._live.state.next)

    def catch_up(self, record: Record) -> None:
        live = self._live
        for link in record.store.read(record.key, live.state.next, record.live.state.next):
            head = codec.head(link.entry)
            if isinstance(head, Line) and head.step > live.state.step:
                self._begin_step(head)
            live.apply(head, link.entry.at, record.entries)
            self._digest = link.digest
            if isinstance(head, Replaced) and head.view == live.view:
                self._edits += 1
            elif isinstance(head, Measured) and head.view == live.view and head.input and self._steps:
                self._steps[-1].sent = head.input
            if live.edition != self._edition:
                self._edition = live.edition
                self._tokens = StepTokens()
                for item in live.items:
                    for line in item.lines:
                        self._add(line)
            elif isinstance(head, Line):
                self._add(head)

    def _begin_step(self, answer: Line) -> None:
        live = self._live
        self.saved_tokens += max(0, live.state.total - live.tokens)
        self._steps.append(StepRow(answer.step, answer.at, replace(self._tokens), live.tokens, self._edits))
        self._edits = 0

    def _add(self, line: Line) -> None:
        kind = "summary" if line.summary else line.role
        setattr(self._tokens, kind, getattr(self._tokens, kind) + line.tokens)


def _halved(steps: list[StepRow]) -> list[StepRow]:
    """Every second step, with the edits of both."""
    first = len(steps) % 2
    pairs = zip(steps[first::2], steps[first + 1 :: 2], strict=True)
    return steps[:first] + [replace(two, edits=one.edits + two.edits) for one, two in pairs]
