"""The command for MCP clients: mcp."""

from typing import Annotated, Any

import typer

from refold.cli.options import Access, ConfigFile, Owner, StoreUrl
from refold.cli.terminal import say
from refold.core.errors import SettingError


def mcp(
    http: Annotated[
        int | None,
        typer.Option(
            "--http",
            metavar="PORT",
            min=0,
            max=65_535,
            help="Over HTTP on 127.0.0.1, at /mcp; 0 takes any port that is free. Else stdin and stdout.",
        ),
    ] = None,
    store: StoreUrl = None,
    config: ConfigFile = None,
    owner: Owner = "default",
) -> None:
    """Serve conversations to an MCP client, as tools and resources.

    It can list, show, expand, search and explain what the owner's agents said, take edits back and append
    messages. What it logs goes to stderr.

    \b
    Examples:
      refold mcp --store sqlite:////home/ann/agent.db     as the command in a client's configuration
      refold mcp --http 8788                              for clients that take an address
    """
    run = _serving()
    access = Access.to(store, config, for_settings=True)
    with access.open(create=True) as backend:
        run(backend, owner=owner, config=access.config, http=http, tell=_tell)


def _tell(url: str) -> None:
    say(f"refold serves MCP at {url}")


def _serving() -> Any:
    try:
        from refold.adapters.mcp import run
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("refold"):
            raise
        raise SettingError("refold mcp", 'is not installed: pip install "refold[mcp]"') from error
    return run
