"""The command doctor: verifies that the store still has what was written."""

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Annotated

import msgspec
import typer

import refold
from refold.cli.format import local, one_line, plural
from refold.cli.options import DEFAULT_OWNER, Access, Json, argument, ids, option, with_store
from refold.cli.terminal import answer, at_most, progress, say
from refold.core.codec import FORMAT
from refold.core.errors import CorruptError
from refold.session.doctor import BACKUP, Finding, examine, list_safely, missing_features
from refold.session.results import error_text, utc
from refold.stores.shelf import Shelf
from refold.stores.store import ConversationInfo, Store

MAX_PRINTED_FINDINGS = 50


@with_store
def doctor(
    access: Access,
    id: Annotated[str | None, argument("Only this conversation.", "[ID]", autocompletion=ids)] = None,
    owner: Annotated[str | None, option("Only conversations of this owner.", "NAME")] = None,
    json: Json = False,
) -> None:
    """Verify that the store still has what was written.

    Checks every hash chain, index, snapshot and the engine's own files, and prints versions, leases and the
    features that this kind of store lacks. Nothing is changed.
    """
    health = StoreHealth(access.shown, _versions(access))
    try:
        with access.open() as backend:
            only = None
            if id is not None:
                whose = replace(access, owner=owner or DEFAULT_OWNER)
                only = whose.existing(backend, id, for_reading=True)
            rows = [row for row in list_safely(backend, owner)[0] if only in (None, row.key)]
            health.conversations = len(rows)
            with progress("Checking", sum(row.next for row in rows)) as advance:

                def tick(n: int) -> None:
                    health.events += n
                    advance(n)

                health.findings = examine(backend, owner=owner, only=only, tick=tick)
            health.cannot = dict(getattr(backend, "cannot", {}))
            health.without = missing_features(backend)
            health.leases = list(_leases(backend, rows))
    except CorruptError as error:  # it cannot be opened
        health.findings = [Finding(error_text(error), BACKUP)]
    health.healthy = not health.findings
    answer(health, json, _print)
    if health.findings:
        raise typer.Exit(1)


class HeldLease(msgspec.Struct, frozen=True):
    owner: str
    conversation: str
    name: str
    holder: str
    until: datetime | None


class StoreHealth(msgspec.Struct):
    """What the examination found."""

    store: str
    versions: dict[str, str]
    healthy: bool = True
    conversations: int = 0
    events: int = 0
    findings: list[Finding] = []
    leases: list[HeldLease] = []
    cannot: dict[str, str] = {}
    """What its engine is not able to do."""
    without: dict[str, str] = {}
    """Optional features that it lacks."""


def _leases(store: Store, rows: list[ConversationInfo]) -> Iterator[HeldLease]:
    if isinstance(store, Shelf):
        now = time.time()
        for row in rows:
            with suppress(Exception):  # damaged: a lease expires anyway
                for lease in store.leases(row.key, now):
                    yield HeldLease(*row.key, lease.name, lease.holder, utc(lease.until))


def _versions(access: Access) -> dict[str, str]:
    python = ".".join(map(str, sys.version_info[:3]))
    versions = {"refold": refold.__version__, "format": str(FORMAT), "Python": python}
    if access.file is not None:
        import apsw

        versions["SQLite"] = apsw.sqlite_lib_version()
    return versions


def _print(health: StoreHealth) -> None:
    say(" · ".join(f"{name} {version}" for name, version in health.versions.items()), "dim")
    read = f"{plural(health.conversations, 'conversation')}, {plural(health.events, 'event')}"
    say(f"{read} in {one_line(health.store)}")
    for lease in health.leases:
        until = "" if lease.until is None else f" until {local(lease.until.timestamp())}"
        what = f"lease {one_line(lease.name)} of {one_line(lease.conversation)}"
        say(f"{what} held by {one_line(lease.holder)}{until}", "yellow")
    for name, why in (health.cannot | health.without).items():
        say(f"without {name}: {one_line(why)}", "dim")
    for line in at_most(list(map(_finding_text, health.findings)), MAX_PRINTED_FINDINGS):
        say(line, "red")
    if health.findings:
        say(plural(len(health.findings), "problem"), "bold red")
    else:
        say("✓  No problems: everything is as it was written", "bold green")


def _finding_text(one: Finding) -> str:
    place = "" if one.at is None else f" #{one.at}"
    where = f"{one_line(one.conversation)}{place}: " if one.conversation else ""
    return f"✗  {where}{one_line(one.problem)}\n   {one.advice}"
