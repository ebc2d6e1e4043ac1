"""Commands about a file with a request, nothing stored: fit, check, count."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from refold.cli.incoming import Given, given, read_file
from refold.cli.options import ConfigFile, DialectOption, InFile, Json, OutFile, configured, intake_for
from refold.cli.terminal import Cell, Columns, emit, fitting, pretty, progress, say, writing
from refold.cli.words import plural
from refold.config import Config
from refold.meter import Meter
from refold.rules.targets import JUDGES, check_request
from refold.session import Session
from refold.stores.store import Key, open_store

Model = Annotated[str, typer.Option("--model", metavar="M", help="Whose window it must fit.")]


def fit(
    file: InFile,
    model: Model,
    config: ConfigFile = None,
    dialect: DialectOption = None,
    out: OutFile = None,
    report: Annotated[
        str | None, typer.Option("--report", metavar="FILE", help="What was done, as JSON; - for stderr.")
    ] = None,
) -> None:
    """Messages in, messages that fit the model out.

    The file has a JSON list of messages in any dialect, or a request: an object with `messages` or `input`,
    and perhaps `system` and `tools`. What comes out has the same shape. Nothing is stored.
    """
    conversation = _read(file)
    session = Session(
        open_store("memory://"), Key("default", conversation.where), model=model, config=configured(config)
    )
    spoken = dialect or conversation.dialect
    with progress("Reading", conversation.count) as advance:
        drafts = conversation.drafts(session.intake(dialect), advance)
    apart = bool(conversation.system)
    session.say(drafts[1:] if apart else drafts)
    beside = {"system": next(iter(conversation.system.values()))} if apart else {}
    fitted = session.fit(dialect=spoken, tools=conversation.tools, request=beside)
    value = conversation.value
    whole = {**value, conversation.name: fitted.messages} if isinstance(value, dict) else fitted.messages
    _write(out, pretty(whole))
    if report == "-":
        typer.echo(pretty(fitted.report), err=True)
    elif report is not None:
        _write(Path(report), pretty(fitted.report))


def check(
    file: InFile,
    dialect: DialectOption = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="M", help="For rules that only some models have.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Also what was seen accepted, though the rules are against it.")
    ] = False,
    config: ConfigFile = None,
    json: Json = False,
) -> None:
    """Which rule of the provider's a request breaks, and where."""
    conversation = _read(file)
    value = conversation.value
    request = value if isinstance(value, dict) else {conversation.name: value}
    meter = Meter(None, configured(config), model or _text(request.get("model")))
    spoken = dialect or conversation.dialect or meter.dialect
    if spoken not in JUDGES:
        raise typer.BadParameter(f"{spoken!r} is none of {', '.join(JUDGES)}", param_hint="--dialect")
    if spoken == "openai-responses":
        request = {**request, "input": conversation.messages}
    flags = meter.limits.flags
    known = {"no_prefill": "no-prefill" in flags, "system_inside": "system-inside" in flags}
    found = check_request(spoken, request, strict=strict, **known)
    if json:
        emit({"valid": not found, "violations": found, "dialect": spoken, "rules": JUDGES[spoken].VERSION})
    elif found:
        rows = [(fault.rule, f"{conversation.name}[{fault.index}]", fault.message) for fault in found]
        _table(("rule", "where", "what"), rows)
        say(f"{plural(len(found), 'violation')} of the rules for {spoken} ({JUDGES[spoken].VERSION})")
    else:
        count = plural(len(conversation.messages), "message")
        say(f"valid: {count} by the rules for {spoken} ({JUDGES[spoken].VERSION})")
    if found:
        raise typer.Exit(1)


def count(
    file: InFile, model: Model, dialect: DialectOption = None, config: ConfigFile = None, json: Json = False
) -> None:
    """How many tokens a request takes, by message and in all."""
    conversation, settings = _read(file), configured(config)
    weights = _weights(conversation, settings, model, dialect)
    rows = [{"index": n, "role": role, "tokens": tokens} for n, (role, tokens) in enumerate(weights[2:])]
    system, tools, total = weights[0][1], weights[1][1], sum(tokens for _, tokens in weights)
    if json:
        emit({"model": model, "total": total, "system": system, "tools": tools, "messages": rows})
        return
    shown = [(str(row["index"]), f"{row['tokens']:,}", str(row["role"])) for row in rows]
    beside = [("", f"{tokens:,}", role) for role, tokens in weights[:2] if tokens]
    _table((">index", ">tokens", "role"), [*beside, *shown])
    meter = Meter(None, settings, model)
    share = total / meter.limits.window
    say(f"{plural(total, 'token')} for {model}: {share:.1%} of its window of {meter.limits.window:,}")


def _weights(conversation: Given, settings: Config, model: str, dialect: str | None) -> list[tuple[str, int]]:
    """Tokens of system text, tools and each message, as the model counts them; they add up to the request."""
    meter, intake = Meter(None, settings, model), intake_for(settings, model, dialect)
    intake = intake._replace(default=conversation.dialect or intake.default)
    counted = [
        ("system", meter.apart(conversation.system)),
        ("tools", meter.counter.tools(conversation.tools or [])),
    ]
    with progress("Counting", conversation.count) as advance:
        for n, message in enumerate(conversation.messages):
            where = f"{conversation.where}: {conversation.name}[{n}]"
            drafts = intake.take([message], lambda _: where).drafts  # noqa: B023
            counted.append((drafts[0].message.role, sum(draft.tokens for draft in drafts)))
            advance(1)
    sums = [0, *accumulate(tokens for _, tokens in counted)]
    ends = [0, *(meter.estimate(so_far, None) if so_far else 0 for so_far in sums[1:])]
    return [
        (name, after - before) for (name, _), (before, after) in zip(counted, pairwise(ends), strict=True)
    ]


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    cells: list[list[Cell]] = [[(text, "") for text in row] for row in rows]
    columns = Columns(*fitting(titles, cells))
    columns.head()
    for row in cells:
        columns.line(*row, wrap=True)


def _read(file: str) -> Given:
    return given(read_file(file), "stdin" if file == "-" else file)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _write(out: Path | None, data: bytes) -> None:
    if out is None:
        typer.echo(data)
        return
    with writing(out) as file:
        file.write(data + b"\n")
