"""Events of a run, for its callbacks and streams."""

from typing import Any, TypeAlias

import msgspec

from refold.agent.steps import End, Step
from refold.core.message import Usage
from refold.session.notify import SessionEvent


class _RunEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    agent: str
    conversation: str
    step: int
    """Model calls of this run so far."""

    @property
    def kind(self) -> str:
        return str(self.__struct_config__.tag)


class Asked(_RunEvent, frozen=True, tag="step:asked"):
    """The model is asked; `tokens` is the size of the request."""

    tokens: int


class Heard(_RunEvent, frozen=True, tag="step:heard"):
    """A chunk of a streamed reply, as the SDK returns it."""

    chunk: Any


class Replied(_RunEvent, frozen=True, tag="step:replied"):
    """The reply is stored; `steps` is what it asks for."""

    steps: tuple[Step, ...]


class Ran(_RunEvent, frozen=True, tag="step:ran"):
    """The result of a call is stored."""

    call_id: str
    tool: str
    output: str
    is_error: bool


class Waited(_RunEvent, frozen=True, tag="step:waited"):
    """A request failed; it is sent again after `seconds`."""

    why: str
    seconds: float


class Ended(_RunEvent, frozen=True, tag="run:ended"):
    result: "Result"


class Result(msgspec.Struct, frozen=True):
    """How a run ended, and what it used."""

    end: End
    conversation: str
    """For `run(…, conversation=…)` to continue, and `refold.open` to inspect."""
    steps: int = 0
    """Model calls of this run, those of sub-agents not included."""
    usage: Usage = Usage(0)
    cost: float = 0.0
    """USD, including sub-agents and without summaries, as far as prices are known."""

    @property
    def text(self) -> str:
        """The answer, or the reason why there is none."""
        return self.end.text


AgentEvent: TypeAlias = Asked | Heard | Replied | Ran | Waited | Ended | SessionEvent
"""Events of the loop and of its session."""
