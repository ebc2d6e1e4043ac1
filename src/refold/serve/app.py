"""The service as one ASGI application: all routes behind the guard."""

from starlette.exceptions import HTTPException
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from refold.serve import api, gateway, health, panel
from refold.serve.guard import Guard
from refold.serve.service import Service
from refold.serve.tokens import Tokens


def app_of(service: Service, tokens: Tokens | None = None) -> ASGIApp:
    """`tokens` default to those of the service's configuration.

    Raises:
        SettingError: a configured token is not valid.
    """
    routes = [route for part in (health, gateway, api, panel) for route in part.routes(service)]
    router = Router(routes, redirect_slashes=False, default=_not_found)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith("/api/") and scope.get("raw_path"):  # an id may contain a slash
            scope["path"] = scope["raw_path"].decode("latin-1").partition("?")[0]
        await router(scope, receive, send)

    return Guard(app, service.settings, tokens or Tokens(service.config), service.metrics)


async def _not_found(*_: object) -> None:
    raise HTTPException(
        404, "no such path; the panel is at /panel, a description of the API at /api/openapi.json"
    )
