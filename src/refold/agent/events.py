"""What those who watch a run are told, as it happens."""

from typing import Any, TypeAlias

import msgspec

from refold.agent.steps import End, Step
from refold.core.message import Usage
from refold.session.notify import Happened


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    agent: str
    conversation: str
    step: int
    """Model calls of this run so far."""

    @property
    def kind(self) -> str:
        return str(self.__struct_config__.tag)


class Asked(_Event, frozen=True, tag="step:asked"):
    """The model is asked, with a request of so many tokens."""

    tokens: int


class Heard(_Event, frozen=True, tag="step:heard"):
    """A piece of a reply that is streamed, as the SDK has it."""

    chunk: Any


class Replied(_Event, frozen=True, tag="step:replied"):
    """The reply is stored; this is what it asks for."""

    steps: tuple[Step, ...]


class Ran(_Event, frozen=True, tag="step:ran"):
    """A call has its result, which is stored."""

    call_id: str
    tool: str
    output: str
    is_error: bool


class Waited(_Event, frozen=True, tag="step:waited"):
    """The model could not be asked, and will be again after so many seconds."""

    why: str
    seconds: float


class Ended(_Event, frozen=True, tag="run:ended"):
    result: "Result"


class Result(msgspec.Struct, frozen=True):
    """How a run ended, and what it took."""

    end: End
    conversation: str
    """For `run(…, conversation=…)`, to go on, and for `refold.open`, to look at it."""
    steps: int = 0
    """Model calls of this run, those of sub-agents not included."""
    usage: Usage = Usage(0)
    cost: float = 0.0
    """USD, sub-agents included and summaries not, as far as prices are known."""

    @property
    def text(self) -> str:
        """The answer, or why there is none."""
        return self.end.text


AgentEvent: TypeAlias = Asked | Heard | Replied | Ran | Waited | Ended | Happened
"""Of the loop, and of the session beneath it."""
