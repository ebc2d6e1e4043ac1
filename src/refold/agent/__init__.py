"""An agent: a model, tools, and a loop that never loses anything and always fits.

>>> agent = Agent("poet", lambda request: "Roses are red.", store="memory://")
>>> agent.run("Write a poem.").text
'Roses are red.'

`agent.py` has the settings of an agent, and `loop.py` one run of it; `steps.py` says what a reply asks for,
`tools.py` makes tools from functions, and `models.py` calls the SDKs. `demo/` is the agent of `refold demo`.
"""

from refold.agent.agent import Agent
from refold.agent.events import AgentEvent, Asked, Ended, Heard, Ran, Replied, Result, Waited
from refold.agent.models import AnthropicModel, Model, OpenAIModel
from refold.agent.steps import Action, Actions, Chat, ExpandMessage, Failed, Retry, Step, SubAgent, Success
from refold.agent.tools import Tool

__all__ = [
    "Action",
    "Actions",
    "Agent",
    "AgentEvent",
    "AnthropicModel",
    "Asked",
    "Chat",
    "Ended",
    "ExpandMessage",
    "Failed",
    "Heard",
    "Model",
    "OpenAIModel",
    "Ran",
    "Replied",
    "Result",
    "Retry",
    "Step",
    "SubAgent",
    "Success",
    "Tool",
    "Waited",
]
