"""The service as one ASGI application: all routes behind the guard; health, metrics and the panel's files."""

from hashlib import sha256
from importlib.resources import files

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from refold.serve import api, gateway
from refold.serve.guard import Guard
from refold.serve.logs import CSP
from refold.serve.service import Service
from refold.serve.tokens import Tokens, require_scope

CONTENT_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
"""Of the panel's files."""
PANEL_HEADERS = {
    "cache-control": "no-cache",  # requested again each time, and sent again only when it changed
    "content-security-policy": f"{CSP}; require-trusted-types-for 'script'; trusted-types 'none'",
    "cross-origin-opener-policy": "same-origin",
}
"""Besides those of every response. Text never becomes markup: the browser refuses to parse it."""


def app_of(service: Service, tokens: Tokens | None = None) -> ASGIApp:
    """`tokens` default to those of the service's configuration.

    Raises:
        SettingError: a configured token is not valid.
    """
    all_routes = [*routes(service), *gateway.routes(service), *api.routes(service)]
    router = Router(all_routes, redirect_slashes=False, default=_not_found)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith("/api/") and scope.get("raw_path"):  # an id may contain a slash
            scope["path"] = scope["raw_path"].decode("latin-1").partition("?")[0]
        await router(scope, receive, send)

    return Guard(app, service.settings, tokens or Tokens(service.config), service.metrics)


def routes(service: Service) -> list[Route]:
    """Health, metrics and the panel."""
    panel_files = {}  # read once: another name leads nowhere
    for file in files("refold.serve").joinpath("static").iterdir():
        if file.name.rpartition(".")[2] in CONTENT_TYPES:
            panel_files[file.name] = file.read_bytes()

    async def healthz(request: Request) -> Response:
        """200 while the store answers, else 503 and the reason; needs no token"""
        problem = await service.health.problem()
        if problem is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unavailable", "reason": problem}, 503)

    async def metrics(request: Request) -> Response:
        """Metrics for Prometheus; needs the scope `read`"""
        require_scope(request.state.caller, "read")
        return Response(service.metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def panel(request: Request) -> Response:
        """The page for people, its scripts, styles and pictures"""
        name = request.path_params.get("name", "index.html")
        body = panel_files.get(name)
        if body is None:
            raise HTTPException(404, "the panel has no such file")
        etag = f'"{sha256(body).hexdigest()[:32]}"'
        content_type = CONTENT_TYPES[name.rpartition(".")[2]]
        headers = {**PANEL_HEADERS, "etag": etag, "content-type": content_type}
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers)

    return [
        Route("/healthz", healthz),
        Route("/metrics", metrics),
        Route("/panel", panel),
        Route("/panel/", panel),
        Route("/panel/static/{name}", panel),
    ]


async def _not_found(*_: object) -> None:
    raise HTTPException(
        404, "no such path; the panel is at /panel, the description of the API at /api/openapi.json"
    )
