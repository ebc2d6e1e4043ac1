"""The command log: each event in a line for people, or as JSON, as soon as it is read."""

from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Any

import msgspec
import typer
from msgspec.structs import asdict

from refold.cli.format import glance, glance_json, local, one_line, places, plural
from refold.cli.options import Access, Id, Json, flag, option, place, with_owner
from refold.cli.terminal import Columns, emit, say
from refold.core import codec
from refold.core.event import (
    Called,
    Certificate,
    Event,
    Measured,
    Named,
    Pinned,
    Replaced,
    Said,
    Undone,
    Unknown,
)
from refold.session.doctor import Unreadable, links
from refold.session.inspect import follow_links, parse
from refold.session.results import error_text, utc

STYLES = {"said": "", "replaced": "bold blue", "undone": "magenta", "pinned": "red", "measured": "dim"}


@with_owner
def log(
    access: Access,
    id: Id,
    after: Annotated[int | None, option("Only events after event N.", "N", parser=place)] = None,
    limit: Annotated[int | None, option("The largest number of events.", "N", min=1)] = None,
    follow: Annotated[
        bool, flag("Wait for new events, by any process, until Ctrl-C.", "-f", "--follow")
    ] = False,
    json: Json = False,
) -> None:
    """Print every event of a conversation, in order.

    With --follow and --json, each event is a JSON document on a line of its own.
    """
    if follow and limit is not None:
        raise typer.BadParameter("cannot be combined with --limit", param_hint="--follow")
    with access.open() as backend:
        key = access.existing(backend, id, for_reading=True)
        start = 0 if after is None else after + 1
        if follow:
            events = map(_decoded, follow_links(backend, key, start))
        else:
            events = map(_decoded, islice(links(backend, key, start), limit))
        if not json:
            damaged = _print_events(events)
        elif follow:
            damaged = 0
            for event in events:
                emit(event_json(event))
        else:
            found = list(events)
            damaged = sum(isinstance(event, DamagedEvent) for event in found)
            emit({**key._asdict(), "events": list(map(event_json, found))})
    if damaged:
        raise typer.Exit(1)


class DamagedEvent(msgspec.Struct, frozen=True):
    """Stands for an event that cannot be read; those that follow it are read all the same."""

    at: int
    kind: str
    problem: str


def _decoded(link: codec.Link | Unreadable) -> Event | DamagedEvent:
    if isinstance(link, Unreadable):
        return DamagedEvent(link.at, "", error_text(link.error))
    try:
        return codec.decode(link.entry, parse)
    except Exception as error:  # anything may be stored
        return DamagedEvent(link.entry.at, str(link.entry.kind), error_text(error))


def _print_events(events: Iterator[Event | DamagedEvent]) -> int:
    """Prints a line for each, and returns how many are damaged."""
    count = damaged = 0
    columns = Columns(("place", "time", "kind", ""), (6, 19, 8))
    for event in events:
        count += 1
        if isinstance(event, DamagedEvent):
            damaged += 1
            cells = (f"#{event.at}", "", one_line(event.kind), f"cannot be read: {one_line(event.problem)}")
            columns.row([(cell, "bold red") for cell in cells])
            continue
        kind = event_kind(event)
        time = "" if isinstance(event, Unknown) else local(event.time)
        styled = (one_line(kind), STYLES.get(kind, "yellow"))
        columns.row([(f"#{event.at}", "dim"), (time, "dim"), styled, (event_line(event), "")])
    unread = f", {damaged:,} of them cannot be read: see `refold doctor`" if damaged else ""
    say(plural(count, "event") + unread, "bold")
    return damaged


def event_kind(event: Event) -> str:
    return event.kind if isinstance(event, Unknown) else type(event).__name__.lower()


def event_json(event: Event | DamagedEvent) -> Any:
    """The event's fields, with its kind as `event`; of a message, the fields of its line too."""
    if isinstance(event, DamagedEvent):
        return event
    facts = asdict(event)
    for name in ("line", "lines", "raw"):
        facts.pop(name, None)
    if isinstance(event, Said):
        facts |= asdict(event.line)
    if isinstance(event, Pinned):
        facts["places"] = [line.at for line in event.lines]
    if not isinstance(event, Unknown):
        facts["time"] = utc(event.time)
    return {"event": event_kind(event), **facts}


def event_line(event: Event) -> str:
    """The event in one line, for people."""
    match event:
        case Said(line=line, message=message):
            return f"{line.role}: {glance(message, line.tools)}"
        case Replaced(view=view, tokens=(before, after)):
            name = f" in view {one_line(view)!r}" if view != "main" else ""
            tokens = f"{before:,} → {after:,} tokens"
            author = _author(event.certificate)
            return f"{places(event.span)} {one_line(event.kind)}{name}{author}, {tokens}{_why(event.why)}"
        case Undone(of=of):
            return f"undoes #{of}{_why(event.why)}"
        case Pinned(lines=lines):
            return f"{', '.join(f'#{line.at}' for line in lines)} pinned{_why(event.why)}"
        case Measured(usage=usage):
            cache = f" ({usage.cache_read:,} cached)" if usage.cache_read else ""
            counted = f"; estimated {event.estimate:,}" if event.estimate else ""
            model = f" by {one_line(event.model)}" if event.model else ""
            return f"#{event.of} used {usage.input:,} in{cache}, {usage.output:,} out{model}{counted}"
        case Called(span=span, model=model, calls=calls):
            used = f", {event.usage.input:,} in, {event.usage.output:,} out" if event.usage else ""
            cost = f", ${event.cost:.4f}" if event.cost else ""
            result = f"no summary{_why(event.problem)}" if event.problem else "summarized"
            return f"{places(span)} {result} by {one_line(model)}, {plural(calls, 'call')}{used}{cost}"
        case Named(title=title, model=model):
            known = {"title": title, "model": model}
            given = [f"{name} {one_line(value)!r}" for name, value in known.items() if value is not None]
            return ", ".join(given) or "created without a title"
        case Unknown(body=body):
            return f"unknown event of a newer refold: {glance_json(body)}"


def _author(certificate: Certificate | None) -> str:
    """Who wrote a summary, and what the check changed."""
    if certificate is None:
        return ""
    if certificate.model is None:
        return " by rule"
    cached = ", cached" if certificate.was_cached else ""
    checked = f"{plural(certificate.kept, 'sentence')} kept, {len(certificate.struck):,} struck"
    return (
        f" by {one_line(certificate.model)}{cached} ({checked}, {len(certificate.appended):,} added by rule)"
    )


def _why(why: str) -> str:
    return f": {one_line(why)}" if why else ""
