"""What can be set for the service, each with its default."""

from typing import Literal, TypeAlias

import msgspec

from refold.config.settings import Switch

Right: TypeAlias = Literal["read", "append", "edit", "admin"]


class Upstreams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where requests go, written as the SDK's base URL would be."""

    openai: str = "https://api.openai.com/v1"
    """For `/openai/v1`."""
    anthropic: str = "https://api.anthropic.com"
    """For `/anthropic`."""


class TokenSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One who may ask. `refold token` makes such an entry."""

    hash: str = ""
    """SHA-256 of the token, as hexadecimal digits; the token itself stands nowhere."""
    owner: str = "default"
    """Whose conversations these are."""
    scopes: tuple[Right, ...] = ("read", "append", "edit")
    """What it allows. `admin` allows all, for every owner."""
    revoked: bool = False
    """No longer allows anything."""


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one client may take of the service, so that there is enough for the others."""

    header_s: float = 10.0
    """Seconds for the headers of a request, from their first byte on."""
    body_s: float = 60.0
    """Seconds for its body."""
    body_pause_s: float = 10.0
    """Seconds without a byte of it."""
    take_s: float = 60.0
    """Seconds for a client to take what waits for it of an answer."""
    idle_s: float = 75.0
    """Seconds without any request."""
    requests_per_s: float = 1_000.0
    """Of one caller, in the long run."""
    burst: int = 2_000
    """Of one caller, at once."""
    requests: int = 2_000
    """At the same time, of all callers; open streams are requests too."""
    connections: int = 5_000
    """At the same time, of all callers."""
    grace_s: float = 30.0
    """Seconds for streams to end in, when the service is told to stop."""


class ServeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the service listens, who may ask, and where requests go."""

    host: str = "127.0.0.1"
    """Where it listens. Anything but loopback needs a token."""
    port: int = 8787
    """0 takes any that is free."""
    hosts: tuple[str, ...] = ()
    """Other names that it is called by, such as that of a proxy in front: `agents.example` or with a port."""
    upstreams: Upstreams = Upstreams()
    plain_http: bool = False
    """Upstreams that are not on this machine may be spoken to without TLS."""
    token: str | None = None
    """One token that allows everything."""
    tokens: tuple[TokenSettings, ...] = ()
    """Any number of tokens, each with its owner and what it allows."""
    inject_tools: Literal["auto"] | Switch = "auto"
    """The gateway adds expand and search: `auto` where a request has tools already."""
    max_body_mb: float = 16.0
    """The largest request."""
    limits: Limits = Limits()
