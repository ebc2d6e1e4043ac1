"""The service as one ASGI application: the routes, and the guard before them."""

from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from refold.serve import api, gateway, health, panel
from refold.serve.guard import Guard
from refold.serve.http_errors import Refused
from refold.serve.service import Service
from refold.serve.tokens import Tokens


def app_of(service: Service, tokens: Tokens | None = None) -> ASGIApp:
    """`tokens` are those of the service's configuration, unless there are others.

    Raises:
        SettingError: something in them is not allowed.
    """
    routes = [route for part in (health, gateway, api, panel) for route in part.routes(service)]
    router = Router(routes, redirect_slashes=False, default=_nowhere)
    return Guard(_as_sent(router), service.settings, tokens or Tokens(service.config), service.metrics)


def _as_sent(router: Router) -> ASGIApp:
    """Paths of the API are matched as they were sent, since an id may have a slash in it."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith("/api/") and scope.get("raw_path"):
            scope["path"] = scope["raw_path"].decode("latin-1").partition("?")[0]
        await router(scope, receive, send)

    return app


async def _nowhere(*_: object) -> None:
    raise Refused(404, "there is nothing here; people look at /panel, programs at /api/openapi.json")
