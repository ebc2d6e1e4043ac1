"""The command doctor: verifies that the store still has what was written."""

import sys
import time
from typing import Annotated, Any

import typer

import refold
from refold.cli.format import iso, local, one_line, plural
from refold.cli.options import DEFAULT_OWNER, Access, ConfigFile, Json, StoreUrl, existing, ids
from refold.cli.terminal import Column, Columns, emit, progress
from refold.core.codec import FORMAT
from refold.core.errors import CorruptError
from refold.session.doctor import BACKUP, Finding, examine, list_safely, missing_features, told
from refold.stores.store import ConversationInfo, Key, Lease, Leases, Store

MAX_FINDINGS = 50
"""Findings that are printed one by one."""

OneId = Annotated[
    str | None,
    typer.Argument(metavar="[ID]", help="Only this conversation.", autocompletion=ids, show_default=False),
]
AnyOwner = Annotated[
    str | None, typer.Option("--owner", metavar="NAME", help="Only conversations of this owner.")
]


def doctor(
    id: OneId = None,
    store: StoreUrl = None,
    config: ConfigFile = None,
    owner: AnyOwner = None,
    json: Json = False,
) -> None:
    """Verify that the store still has what was written.

    Checks every hash chain, index, snapshot and the engine's own files, and prints versions, leases and the
    features that this kind of store lacks. Nothing is changed.
    """
    access = Access.to(store, config)
    events = 0
    rows: list[ConversationInfo] = []
    leases: list[tuple[Key, Lease]] = []
    cannot = dict[str, str]()
    lacks = dict[str, str]()
    try:
        with access.open() as backend:
            only = None
            if id is not None:
                key = Key(owner or DEFAULT_OWNER, id)
                only = existing(backend, access.shown, key, for_reading=owner is None)
            rows = [row for row in list_safely(backend, owner)[0] if only in (None, row.key)]
            with progress("Checking", sum(row.next for row in rows)) as advance:

                def tick(n: int) -> None:
                    nonlocal events
                    events += n
                    advance(n)

                findings = examine(backend, owner=owner, only=only, tick=tick)
            cannot = dict(getattr(backend, "cannot", {}))
            lacks = missing_features(backend)
            leases = _leases(backend, rows)
    except CorruptError as error:  # it cannot be opened
        findings = [Finding(told(error), BACKUP)]
    counts = {"conversations": len(rows), "events": events}
    if json:
        emit(_json(access, counts, findings, leases) | {"cannot": cannot, "without": lacks})
    else:
        _print(access, counts, findings, leases, cannot | lacks)
    if findings:
        raise typer.Exit(1)


def _leases(store: Store, rows: list[ConversationInfo]) -> list[tuple[Key, Lease]]:
    if not isinstance(store, Leases):
        return []
    now = time.time()
    held = []
    for row in rows:
        try:
            held += [(row.key, lease) for lease in store.leases(row.key, now)]
        except Exception:  # damaged: a lease expires anyway
            continue
    return held


def _versions(access: Access) -> dict[str, str]:
    python = ".".join(map(str, sys.version_info[:3]))
    versions = {"refold": refold.__version__, "format": str(FORMAT), "python": python}
    if access.file is not None:
        import apsw

        versions["sqlite"] = apsw.sqlite_lib_version()
    return versions


def _json(
    access: Access, counts: dict[str, int], findings: list[Finding], leases: list[tuple[Key, Lease]]
) -> dict[str, Any]:
    return {
        "healthy": not findings,
        "store": access.shown,
        "versions": _versions(access),
        **counts,
        "findings": [
            {
                "owner": one.key and one.key.owner,
                "conversation": one.key and one.key.conversation,
                "at": one.place,
                "problem": one.problem,
                "advice": one.advice,
            }
            for one in findings
        ],
        "leases": [
            {
                "owner": key.owner,
                "conversation": key.conversation,
                "name": lease.name,
                "holder": lease.holder,
                "until": iso(lease.until),
            }
            for key, lease in leases
        ],
    }


def _print(
    access: Access,
    counts: dict[str, int],
    findings: list[Finding],
    leases: list[tuple[Key, Lease]],
    lacks: dict[str, str],
) -> None:
    table = Columns(Column("", 1), Column("", 0))
    names = {"refold": "refold", "format": "format", "python": "Python", "sqlite": "SQLite"}
    versions = " · ".join(f"{names[name]} {version}" for name, version in _versions(access).items())
    table.line((versions, "dim"))
    read = ", ".join(plural(n, what.removesuffix("s")) for what, n in counts.items())
    table.line((f"{read} in {one_line(access.shown)}", ""), wrap=True)
    for key, lease in leases:
        held = f"{one_line(lease.holder)} until {local(lease.until)}"
        table.line((f"lease {one_line(lease.name)} of {one_line(key.conversation)} held by {held}", "yellow"))
    for name, why in lacks.items():
        table.line((f"without {name}: {one_line(why)}", "dim"), wrap=True)
    for one in findings[:MAX_FINDINGS]:
        where = "" if one.key is None else one_line(one.key.conversation)
        where += "" if one.place is None else f" #{one.place}"
        table.line(("✗", "red"), (f"{where}: {one_line(one.problem)}".removeprefix(": "), "red"), wrap=True)
        table.line(("", ""), (one.advice, ""), wrap=True)
    if len(findings) > MAX_FINDINGS:
        table.line((f"… and {len(findings) - MAX_FINDINGS:,} more: see --json", "red"))
    if findings:
        table.line((plural(len(findings), "problem"), "bold red"))
    else:
        table.line(("✓", "green"), ("No problems: everything is as it was written", "bold green"))
