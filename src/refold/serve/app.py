"""The service as one ASGI application: the routes, and the guard before them."""

from starlette.routing import Router
from starlette.types import ASGIApp

from refold.serve import api, gateway, health, panel
from refold.serve.guard import Guard
from refold.serve.refusal import Refused
from refold.serve.service import Service
from refold.serve.tokens import Tokens


def app_of(service: Service, tokens: Tokens | None = None) -> ASGIApp:
    """`tokens` are those of the service's configuration, unless there are others.

    Raises:
        SettingError: something in them is not allowed.
    """
    routes = [route for part in (health, gateway, api, panel) for route in part.routes(service)]
    router = Router(routes, redirect_slashes=False, default=_nowhere)
    return Guard(router, service.settings, tokens or Tokens(service.config), service.metrics)


async def _nowhere(*_: object) -> None:
    raise Refused(404, "there is nothing here; people look at /panel, programs at /api/openapi.json")
