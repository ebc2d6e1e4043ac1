"""Who asks, and what they may do."""

from typing import NamedTuple, get_args

from refold.config.serving import Right

EVERYTHING: frozenset[Right] = frozenset(get_args(Right))


class Caller(NamedTuple):
    owner: str | None
    """Whose conversations they may see; None is everybody's: the machine's own user."""
    scopes: frozenset[Right]


LOCAL = Caller(None, EVERYTHING)
"""Who asks where no token is set: then only this machine can."""
AGENT = Caller(None, frozenset[Right](("read", "append")))
"""Who comes to the gateway without a token: their owner is found by their API key."""
NOBODY = Caller(None, frozenset())
"""Who has no token where one is needed: they see what is no secret."""
