"""The panel: a page for people who watch what the model sees, served from the package's own files."""

from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from refold.serve.access_log import CSP

if TYPE_CHECKING:
    from refold.serve.service import Service

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS = {
    "cache-control": "no-cache",  # asked for again each time, and sent again only when it changed
    "content-security-policy": f"{CSP}; require-trusted-types-for 'script'; trusted-types 'none'",
    "cross-origin-opener-policy": "same-origin",
}
"""Besides those of every answer. No text ever becomes markup: the browser refuses to make it so."""


class File(NamedTuple):
    body: bytes
    type: str
    etag: str


def routes(service: "Service") -> list[Route]:
    known = _files()

    async def page(request: Request) -> Response:
        """The page for people"""
        return _sent(request, known["index.html"])

    async def static(request: Request) -> Response:
        """Its scripts, styles and pictures"""
        file = known.get(request.path_params["name"])
        return Response("There is no such file\n", 404) if file is None else _sent(request, file)

    return [Route("/panel", page), Route("/panel/", page), Route("/panel/static/{name}", static)]


def _files() -> dict[str, File]:
    """All there is to serve, read once: a name that is not among them leads nowhere."""
    found = {}
    for file in files("refold.serve").joinpath("static").iterdir():
        if kind := TYPES.get(file.name.rpartition(".")[2]):
            body = file.read_bytes()
            found[file.name] = File(body, kind, f'"{sha256(body).hexdigest()[:32]}"')
    return found


def _sent(request: Request, file: File) -> Response:
    headers = {**HEADERS, "etag": file.etag, "content-type": file.type}
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers=headers)
