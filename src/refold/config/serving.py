"""Settings of `refold serve`, each with its default."""

from typing import Literal, TypeAlias

import msgspec

from refold.config.settings import Switch

Right: TypeAlias = Literal["read", "append", "edit", "admin"]


class Upstreams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where requests are sent, written as the SDK's base URL would be."""

    openai: str = "https://api.openai.com/v1"
    """For `/openai/v1`."""
    anthropic: str = "https://api.anthropic.com"
    """For `/anthropic`."""


class TokenSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A token of the service. `refold token` prints such an entry."""

    hash: str = ""
    """SHA-256 of the token in hexadecimal; the token itself is stored nowhere."""
    owner: str = "default"
    """Whose conversations it gives access to."""
    scopes: tuple[Right, ...] = ("read", "append", "edit")
    """What it allows. `admin` allows everything, for every owner."""
    revoked: bool = False
    """The token no longer allows anything."""


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one client may use of the service, so that enough is left for the others."""

    header_s: float = 10.0
    """Seconds for the headers of a request, from their first byte on."""
    body_s: float = 60.0
    """Seconds for the whole body of a request."""
    body_idle_s: float = 10.0
    """Seconds between two parts of a body."""
    write_timeout_s: float = 60.0
    """Seconds for a client to read what is waiting for it of a response."""
    idle_s: float = 75.0
    """Seconds that a connection may stay open without a request."""
    requests_per_s: float = 1_000.0
    """Of one caller, on average."""
    burst: int = 2_000
    """Of one caller, at once."""
    requests: int = 2_000
    """Concurrent requests of all callers, open streams included."""
    connections: int = 5_000
    """Concurrent connections of all callers."""
    grace_s: float = 30.0
    """Seconds for open streams to end when the service is stopped."""


class ServeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the service listens, who may use it, and where requests are sent."""

    host: str = "127.0.0.1"
    """The address to listen on. Anything but loopback needs a token."""
    port: int = 8787
    """0 takes any free port."""
    hosts: tuple[str, ...] = ()
    """Other host names of the service, such as that of a proxy in front: `agents.example` or with a port."""
    upstreams: Upstreams = Upstreams()
    allow_insecure_upstreams: bool = False
    """Upstreams on other machines may be called without TLS."""
    token: str | None = None
    """One token that allows everything."""
    tokens: tuple[TokenSettings, ...] = ()
    """Any number of tokens, each with its owner and what it allows."""
    inject_tools: Literal["auto"] | Switch = "auto"
    """The gateway adds expand and search: `auto` where a request already has tools."""
    max_body_mb: float = 64.0
    """The largest request body."""
    limits: Limits = Limits()
