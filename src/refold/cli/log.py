"""The stream: each event in a line for people, and as JSON for machines, as soon as it is read."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import typer
from msgspec.structs import asdict

from refold.cli.terminal import Column, Columns
from refold.cli.words import glance, glance_json, iso, local, one_line, places, plural
from refold.core import codec
from refold.core.codec import Link
from refold.core.event import Called, Event, Measured, Named, Pinned, Replaced, Said, Undone, Unknown
from refold.session.doctor import Unreadable, links, told
from refold.session.inspect import parse
from refold.stores.record import follow
from refold.stores.store import Key, Store

STYLES = {"said": "", "replaced": "bold blue", "undone": "magenta", "pinned": "red", "measured": "dim"}


class Damaged(NamedTuple):
    """Stands for an event that cannot be read."""

    at: int
    kind: str
    problem: str


class Names:
    """What stands at a place, in a word or two: for events that speak of others."""

    def __init__(self, store: Store, key: Key) -> None:
        self._store, self._key = store, key

    def __call__(self, at: int) -> str:
        found = next(events(self._store, self._key, at, 1), None)
        match found:
            case Replaced(kind=kind, span=span):
                return f"#{at} ({one_line(kind)} of {places(span)})"
            case Pinned():
                return f"#{at} (a pin)"
            case Undone(of=of):
                return f"#{at} (the undoing of #{of})"
        return f"#{at}"


def events(store: Store, key: Key, start: int, limit: int | None) -> Iterator[Event | Damaged]:
    """The events from a place on; damaged ones do not hide those that follow."""
    for link in islice(links(store, key, start), limit):
        yield from _decoded(link)


def _decoded(link: Link | Unreadable) -> Iterator[Event | Damaged]:
    if isinstance(link, Unreadable):
        yield Damaged(link.at, "?", told(link.error))
        return
    try:
        yield codec.decode(link.entry, parse)
    except Exception as error:
        yield Damaged(link.entry.at, str(link.entry.kind), told(error))


def followed(store: Store, key: Key, start: int) -> Iterator[Event | Damaged]:
    """The same, and then whatever is appended by anybody, as it comes."""
    for link in follow(store, key, start):
        if link is not None:
            yield from _decoded(link)


def print_log(found: Iterator[Event | Damaged], names: Names) -> int:
    """Prints a line for each, and returns how many were damaged."""
    count = damaged = 0
    table = Columns(Column("place", 6), Column("time", 19), Column("kind", 8), Column("", 0))
    for event in found:
        count += 1
        if isinstance(event, Damaged):
            damaged += 1
            cells = (f"#{event.at}", "", one_line(event.kind), f"cannot be read: {one_line(event.problem)}")
            table.line(*((cell, "bold red") for cell in cells))
            continue
        time, kind = event_time(event), event_kind(event)
        table.line(
            (f"#{event.at}", "dim"),
            ("" if time is None else local(time), "dim"),
            (one_line(kind), STYLES.get(kind, "yellow")),
            (event_line(event, names), ""),
        )
    left = f", {damaged:,} of them cannot be read: see `refold doctor`" if damaged else ""
    table.line((plural(count, "event") + left, "bold"))
    return damaged


def emit_lines(found: Iterator[Event | Damaged]) -> int:
    """One JSON document a line, for what has no end."""
    for event in found:
        typer.echo(codec.dumps(_json(event)))
    return 0


def _json(event: Event | Damaged) -> dict[str, Any]:
    return event._asdict() if isinstance(event, Damaged) else event_json(event)


def emit_log(key: Key, found: Iterator[Event | Damaged]) -> int:
    """The same as one JSON document, written as it goes."""
    damaged, before = 0, b""
    head = codec.dumps({"conversation": key.conversation, "owner": key.owner})
    typer.echo(head[:-1] + b',"events":[', nl=False)
    for event in found:
        damaged += isinstance(event, Damaged)
        typer.echo(before + b"\n" + codec.dumps(_json(event)), nl=False)
        before = b","
    typer.echo(b"\n]}")
    return damaged


def event_time(event: Event) -> float | None:
    """When it happened; None where only a newer refold could tell."""
    if isinstance(event, Unknown):
        time = event.body.get("time") if isinstance(event.body, dict) else None
        return float(time) if isinstance(time, int | float) else None
    return event.time


def event_kind(event: Event) -> str:
    return event.kind if isinstance(event, Unknown) else type(event).__name__.lower()


def event_line(event: Event, names: Callable[[int], str]) -> str:
    """What happened, for people."""
    match event:
        case Said(line=line, message=message):
            return f"{line.role}: {glance(message, line.tools)}"
        case Replaced(view=view, tokens=(before, after)):
            name = f" in view {one_line(view)!r}" if view != "main" else ""
            tokens = f"{before:,} → {after:,} tokens"
            by = event.certificate.model if event.certificate else None
            who = f" by {one_line(by)}" if by else ""
            return f"{places(event.span)} {one_line(event.kind)}{name}{who}, {tokens}{_why(event.why)}"
        case Undone(of=of):
            return f"takes back {names(of)}{_why(event.why)}"
        case Pinned(lines=lines):
            return f"{', '.join(f'#{line.at}' for line in lines)} kept in every view{_why(event.why)}"
        case Measured(usage=usage):
            cache = f", {usage.cache_read:,} of it cached" if usage.cache_read else ""
            counted = f"; counted {event.estimate:,}" if event.estimate else ""
            model = f" by {one_line(event.model)}" if event.model else ""
            return f"#{event.of} took {usage.input:,} in{cache}, {usage.output:,} out{model}{counted}"
        case Called(span=span, model=model, calls=calls):
            took = f", {event.usage.input:,} in, {event.usage.output:,} out" if event.usage else ""
            cost = f", ${event.cost:.4f}" if event.cost else ""
            result = f"no summary{_why(event.problem)}" if event.problem else "a summary"
            return f"{places(span)} asked of {one_line(model)}, {plural(calls, 'call')}{took}{cost}: {result}"
        case Named(title=title, model=model):
            known = {"title": title, "model": model}
            given = [f"{name} {one_line(value)!r}" for name, value in known.items() if value is not None]
            return ", ".join(given) or "begun without a title"
        case Unknown(body=body):
            return f"only a newer refold understands this: {glance_json(body)}"


def _why(why: str) -> str:
    return f": {one_line(why)}" if why else ""


def event_json(event: Event) -> dict[str, Any]:
    """What happened, for machines: `at`, `kind` and `time`, and what this kind has besides."""
    time = event_time(event)
    about = {"at": event.at, "kind": event_kind(event), "time": None if time is None else iso(time)}
    match event:
        case Said(line=line, message=message):
            numbers = {name: getattr(line, name) for name in ("role", "tokens", "turn", "step", "tools")}
            more = {"index": event.index, "total": event.total, "id": message.id, "tags": event.tags}
            return about | numbers | more | {"message": message}
        case Replaced(view=view, tokens=(before, after)):
            what = {"view": view, "span": event.span, "edit": event.kind, "why": event.why}
            tokens = {"before": before, "after": after}
            certificate = asdict(event.certificate) if event.certificate else None
            rest = {"round": event.round, "shown": event.shown, "certificate": certificate}
            rest["worth"] = asdict(event.worth) if event.worth else None
            return about | what | {"tokens": tokens} | rest
        case Undone(of=of, why=why):
            return about | {"of": of, "why": why}
        case Pinned(lines=lines, why=why):
            return about | {"places": [line.at for line in lines], "why": why}
        case Measured(of=of, usage=usage, model=model):
            numbers = {"input": usage.input, "output": usage.output}
            cache = {"cache_read": usage.cache_read, "cache_write": usage.cache_write}
            what = {"view": event.view, "of": of, "model": model, "estimate": event.estimate}
            return about | what | {"usage": numbers | cache}
        case Called():
            names = ("view", "span", "model", "problem", "calls", "usage", "cost")
            return about | {name: getattr(event, name) for name in names}
        case Named(title=title, model=model):
            return about | {"title": title, "model": model}
        case Unknown(head=head, body=body):
            return about | {"head": head, "body": body}
