"""Writes docs/reference/ from the code; with --check it writes nothing and says what is stale."""

import argparse
import ast
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any, Literal, get_args, get_origin

import msgspec
import typer

import refold
from refold import Session
from refold.cli import app
from refold.config.config import Config
from refold.config.serving import ServeSettings
from refold.config.settings import AgentSettings, Setting, ToolSettings
from refold.config.validate import (
    RANGES,
    TYPE_NAMES,
    Range,
    accepted_types,
    field_types,
    is_struct,
    lists_structs,
)
from refold.core import errors, event
from refold.core.event import Called, Certificate, Line, Named, Piece, Pinned, Replaced, Span, Undone
from refold.core.message import Message, Text, Usage
from refold.models.limits import ModelLimits, ModelSettings
from refold.serve import app as service_app
from refold.serve import events as live_events
from refold.serve import gateway, http_errors, openapi
from refold.serve.endpoint import ENDPOINTS, Endpoint
from refold.serve.service import Service
from refold.session.notify import CompactionEvent, MessageEvent
from refold.stores.memory import MemoryStore
from refold.stores.store import Key

HERE = Path(__file__).parents[1] / "docs" / "reference"
NOTE = "<!-- Written by scripts/reference.py: change the code, then run it. -->"
MORE = """models:models serve:production compact:ladder repair:validity counter:counting summarizer:summaries
profile:prompts prompts:prompts prompt:prompts executor:workers expand:expand tokens:security flags:models
inject_tools:gateway"""
"""Settings that have a page of their own."""


def table(head: str, rows: Iterable[Iterable[object]]) -> Iterator[str]:
    yield f"| {head} |\n|{'---|' * len(head.split(' | '))}"
    for row in rows:
        cells = (" ".join(str(cell).split()).replace("|", "\\|") for cell in row)
        yield f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")
    yield ""


def paragraphs(of: Any) -> list[str]:
    return [" ".join(one.split()) for one in (inspect.getdoc(of) or "").split("\n\n")]


def listed(of: Any) -> dict[str, str]:
    """The `name  meaning` lines of a docstring."""
    pairs = (line.split("  ", 1) for line in (inspect.getdoc(of) or "").splitlines())
    return {pair[0]: pair[1].strip() for pair in pairs if len(pair) == 2 and " " not in pair[0]}


def code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def node_of(of: Any) -> Any:
    return ast.parse(dedent(inspect.getsource(of))).body[0]


def settings() -> Iterator[str]:
    """Every setting

    How they are written, and which of several counts: [settings](../configuration.md). `refold config` prints
    those in force. A row with a dot stands inside the one before it. `null` is as if it were not there.
    """
    parts: dict[str, tuple[type[msgspec.Struct], str]] = {
        "Of the file": (Config, "At the top."),
        "Of an agent": (AgentSettings, "Under `agents: {NAME: …}`."),
        "Of a tool": (ToolSettings, "Under `tools: {NAME: …}`, of an agent or of all."),
        "Of a model": (ModelSettings, "Under `models: {NAME: …}`; unset, as is known of it."),
        "Of the service": (ServeSettings, "Under `serve`."),
    }
    for title, (struct, where) in parts.items():
        yield f"## {title}\n\n{where}\n"
        yield from table("setting | default | allowed | what it does", rows_of(struct))


def rows_of(struct: type[msgspec.Struct], prefix: str = "") -> Iterator[list[str]]:
    says = dict(openapi.documented(ModelLimits if struct is ModelSettings else struct))
    pages = dict(pair.split(":") for pair in MORE.split())
    for field in msgspec.structs.fields(struct):
        if field.name in ("origins", "tree"):  # where the others came from: nobody sets them
            continue
        path, kinds = f"{prefix}{field.name}", accepted_types(field_types(struct)[field.name])
        inner = [kind if is_struct(kind) else get_args(kind)[0] for kind in kinds if has_rows(kind)]
        meaning = says.get(field.name, "").split("\n\n")[0] or (paragraphs(inner[0])[0] if inner else "")
        if not meaning:
            raise SystemExit(f"{struct.__name__}.{field.name} has no line of documentation under it")
        more = f" [More](../{pages[field.name]}.md)." if field.name in pages else ""
        value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
        value = (bool in kinds or None) if isinstance(value, msgspec.Struct) else value
        shown = "" if value in (None, (), {}, "", msgspec.UNSET) else f"`{Setting((path,), value, '').shown}`"
        yield [f"`{path}`", shown, allowed(field.name, kinds), meaning + more]
        if inner and struct is not Config:
            yield from rows_of(inner[0], f"{path}{'[]' if lists_structs(kinds[0]) else ''}.")


def has_rows(kind: Any) -> bool:
    return is_struct(kind) or lists_structs(kind)


def allowed(name: str, kinds: tuple[Any, ...]) -> str:
    words: list[str] = []
    for kind in kinds:
        if has_rows(kind):
            words.append("the rows below" if is_struct(kind) else "a list, each with the rows below")
        elif get_origin(kind) is dict:
            words.append("by name")
        elif get_origin(kind) is Literal:
            words += [f"`{one}`" for one in get_args(kind)]
        elif get_origin(kind) is tuple and get_origin(get_args(kind)[0]) is Literal:
            words.append(f"a list of {code(get_args(get_args(kind)[0]))}")
        elif kind is bool:
            words += [] if "`on`" in words else ["`on`", "`off`"]
        else:
            words.append(
                TYPE_NAMES[kind] + (within(RANGES.get(name, Range())) if kind in (int, float) else "")
            )
    return ", ".join(words)


def within(range: Range) -> str:
    low = f"above {range.low:g}" if range.is_open else f"from {range.low:g}"
    return f", {low}" + (f" to {range.high:g}" if range.high < Range().high else "")


def events() -> Iterator[str]:
    """Every event

    [Events](../events.md) explains how to receive them, [live events](../api.md#live-events) how over HTTP.
    Those of the record are what `chat.events()` and `refold log ID --json` return, and what is
    [stored](../format.md).
    """
    yield "## In the record\n"
    for kind in get_args(event.Event):
        yield from fields_of(kind, "###", listed(event)[kind.__name__])
    yield "### Inside them\n"
    for kind in (Line, Certificate, Piece, Usage):
        yield from fields_of(kind, "####")
    yield "## For callbacks\n\nWhat `on_event` is called with, from `refold.session.notify`.\n"
    for struct in (MessageEvent, CompactionEvent):
        yield from fields_of(struct, "###")
        yield from table("`kind` | when", (([code([kind]), says]) for kind, says in listed(struct).items()))
    yield "## Over HTTP\n\nThe `event:` of a frame, and the fields of its `data:`, if it has any.\n"
    told, found = (
        listed(MessageEvent) | listed(CompactionEvent) | listed(live_events),
        dict(fields_of_frames()),
    )
    rows = ([code([kind]), says, code(found[kind])] for kind, says in told.items())
    yield from table("event | when | fields", rows)


def fields_of(struct: Any, level: str, says: str = "") -> Iterator[str]:
    says = says or paragraphs(struct)[0]
    yield f"{level} {struct.__name__}\n\n{says[0].upper()}{says[1:].removesuffix('.')}.\n"
    meant, body = dict(openapi.documented(struct)), node_of(struct).body
    annotated = [one for one in body if isinstance(one, ast.AnnAssign)]
    named = [(ast.unparse(one.target), type_text(struct, ast.unparse(one.annotation))) for one in annotated]
    rows = ((code([name]), code([kind]), meant.get(name, "")) for name, kind in named if kind != "ClassVar")
    yield from table("field | type | what", rows)


def type_text(struct: Any, annotation: str) -> str:
    """An annotation, with the values of an alias such as `CompactionKind`."""
    named = getattr(sys.modules[struct.__module__], annotation, None)
    return f"Literal{list(get_args(named))}" if get_origin(named) is Literal else annotation


def fields_of_frames() -> Iterator[tuple[str, list[str]]]:
    """One event of every kind is told, and what it is told with is looked at."""
    key, line, span = Key("ann", "c"), Line(1, "tool", 9, 1, 1, tools=("grep",)), Span(1, 3)
    text = Message("tool", (Text("found"),))
    edits = [("expire", "remove"), ("expire", "compact"), *((kind, "why") for kind in live_events.KINDS)]
    happened: list[Any] = [
        event.Said(line, text, 1, 9, 1.0),
        *(Replaced(4, "main", span, (text,), (line,), kind, why, (9, 3), 1.0) for kind, why in edits),
        *(Undone(5, 4, "no", 1.0), Pinned(5, (line,), "yes", 1.0), Named(5, "a title", "m", 1.0)),
        Called(5, "main", span, "m", "late", 1, time=1.0),
    ]
    texts = [b"".join(live_events.stored_frames(key, one)) for one in happened] + [live_events.LAGGING]
    expanded = MessageEvent("message-expanded", "c", 1, 1, 1, "tool", ("grep",), "a question")
    others: list[Any] = [kind for kind in listed(CompactionEvent) if kind != "compaction:failed"]
    live: list[Any] = [expanded, *(CompactionEvent(kind, "c", 1, 1, "why") for kind in others)]
    texts += [live_events.live_frame(key, one) for one in live]
    for frame in b"".join(texts).decode().strip().split("\n\n"):
        head, data = frame.split("\n")
        yield head.removeprefix("event: "), list(json.loads(data.removeprefix("data: ")))


def failures() -> Iterator[str]:
    """Every error

    From `refold.core.errors`; some are also in `refold`. The text of each says where, why and what to do. The
    command line prints it in one line and ends with 1, after a `SettingError` with 2.
    """
    known = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    kinds = [kind for kind in known if issubclass(kind, errors.RefoldError)]
    yield f"```text\n{(errors.__doc__ or '').partition('wrong.')[2].strip()}\n```\n"
    yield from table("error | means | what to do | has | as HTTP", map(row_of, kinds))


def row_of(kind: type[Exception]) -> list[object]:
    status = next((status for one, status in http_errors.STATUSES.items() if issubclass(kind, one)), 500)
    has = inspect.signature(kind).parameters if inspect.isfunction(kind.__init__) else ()
    return [code([kind.__name__]), *paragraphs(kind), code(has), status]


def http() -> Iterator[str]:
    """Every route

    What `refold serve` answers to. How to use it: [the gateway](../gateway.md), [the API](../api.md),
    [the panel](../panel.md), [running it](../production.md). `GET /api/openapi.json` is the API for machines.
    """
    service = Service(Config(), MemoryStore())
    rows = [(f"any `{route.path}`", route.description) for route in gateway.ROUTES]
    plain = service_app.routes(service)
    rows += [(f"GET `{route.path}`", inspect.getdoc(route.endpoint) or "") for route in plain]
    yield "## Gateway, health and panel\n"
    yield from table("route | what", rows)
    yield "## API\n\nEvery route takes `owner` in its query, too; what has a `?` may be left out.\n"
    yield from table("route | scope | query | body | does", map(endpoint, ENDPOINTS))
    given: dict[tuple[str, str], list[str]] = {}
    for one in ENDPOINTS:
        for name, schema in openapi.schema_of(one.body or one.query)["properties"].items():
            if "description" in schema:
                given.setdefault((name, schema["description"]), []).append(one.operation)
    yield from table("given | with | is", ((code([n]), ", ".join(v), says) for (n, says), v in given.items()))
    yield '## What is refused\n\nIs answered as `{"error": {"code", "message"}}`.\n'
    rest = ((status, code([error.code]), error.meaning) for status, error in http_errors.ERRORS.items())
    yield from table("status | code | why", rest)


def endpoint(one: Endpoint) -> list[str]:
    query = [field for field in msgspec.structs.fields(one.query) if field.name != "owner"]
    body = msgspec.structs.fields(one.body) if one.body else ()
    names = (code(f.name if f.required else f"{f.name}?" for f in some) for some in (query, body))
    return [f"{one.method} `{one.path}`", one.scope, *names, one.summary]


def python() -> Iterator[str]:
    """The Python names

    All of `refold`. What is not here may change without notice.
    """
    functions = ("open", "fit", "count", "check", "limits", "load")
    for name in functions:
        yield from signature(getattr(refold, name), "## ")
    yield f"## Session\n\n{inspect.getdoc(Session)}\n"
    for name, one in vars(Session).items():
        if inspect.isfunction(one) and not name.startswith("_"):
            yield from signature(one, "### Session.")
    ways = "`async with aopen(…) as chat` opens one and closes it; `await aopen(…)` opens one."
    yield f"## aopen, AsyncSession\n\n{inspect.getdoc(refold.AsyncSession)} {ways}\n"
    done = ("Session", "AsyncSession", "aopen", *functions)
    for name in (name for name in refold.__all__ if name not in done):
        kind = getattr(refold, name)
        if issubclass(kind, Exception):
            yield f"## {name}\n\n{paragraphs(kind)[0]} [What to do](errors.md).\n"
        elif kind is Config:
            yield f"## {name}\n\nWhat files and dicts say, read and checked: [settings](settings.md).\n"
        else:
            yield from fields_of(kind, "##")


def signature(of: Any, title: str) -> Iterator[str]:
    lines = dedent(inspect.getsource(of)).splitlines()[: node_of(of).body[0].lineno - 1]
    yield f"{title}{of.__name__}\n\n```py\n{chr(10).join(lines)} ...\n```\n"
    yield (inspect.getdoc(of) or "").replace("Raises:\n", "Raises:\n\n").replace("\n    ", "\n- ") + "\n"


def cli() -> Iterator[str]:
    """The command line

    What `refold --help` and `refold COMMAND --help` print.
    """
    group: Any = typer.main.get_command(app)
    top = group.context_class(group, info_name="refold", terminal_width=100, **group.context_settings)
    below = [top.__class__(one, top, name, terminal_width=100) for name, one in group.commands.items()]
    for context in (top, *below):
        yield f"## {context.command_path}\n\n```text\n{context.command.get_help(context).strip()}\n```\n"


PAGES: dict[str, Callable[[], Iterator[str]]] = {"cli": cli, "settings": settings, "events": events}
PAGES |= {"errors": failures, "http": http, "python": python}


def page(name: str) -> str:
    title, _, about = (inspect.getdoc(PAGES[name]) or "").partition("\n\n")
    text = "\n".join([f"# {title}\n\n{NOTE}\n\n{about}\n", *PAGES[name]()])
    return "\n".join(line.rstrip() for line in text.splitlines()).strip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say which pages are stale")
    is_check = parser.parse_args().check
    stale = [name for name in PAGES if page(name) != (HERE / f"{name}.md").read_text()]
    for name in stale:
        print(f"docs/reference/{name}.md {'is stale' if is_check else 'written'}")
        if not is_check:
            (HERE / f"{name}.md").write_text(page(name))
    return int(is_check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
