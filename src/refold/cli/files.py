"""Commands for a request in a file, without a store: fit, check, count."""

from pathlib import Path
from typing import Annotated, Any

import typer

from refold.cli.format import glance, glance_json, one_line, plural, saved_percent
from refold.cli.options import ConfigFile, DialectOption, InFile, Json, OutFile, configured, flag, option
from refold.cli.terminal import Cell, at_most, complain, emit, pretty, progress, say, table, writing
from refold.core.errors import MessageError, SettingError
from refold.dialects.registry import TARGETS
from refold.dialects.rules.targets import RULES
from refold.models.limits import find
from refold.session.files import FileConversation, conversation, read_file
from refold.session.oneoff import check_given, count_parts
from refold.session.session import Session
from refold.stores.store import Key, open_store

MAX_PRINTED_NOTICES = 5


def fit(
    file: InFile,
    model: Annotated[str, option("The model whose window it must fit.", "M")],
    config: ConfigFile = None,
    dialect: DialectOption = None,
    out: OutFile = None,
    report: Annotated[
        str | None, option("Write a report of what was done as JSON; - for stderr.", "FILE")
    ] = None,
) -> None:
    """Fit the messages of a file into a model's window.

    The file contains a JSON list of messages in any dialect, or a request: an object with `messages` or
    `input`, and optionally `system`, `tools` and the maximum output. The output has the same shape. Nothing
    is stored.
    """
    given = _read(file)
    session = Session(
        open_store("memory://"), Key("default", given.where), model=model, config=configured(config)
    )
    session.shows_handles = False  # nothing is stored, so nothing could be expanded
    with progress("Reading", len(given.messages)) as advance:
        session.say(given.said(session.intake(dialect)))
        advance(len(given.messages))
    spoken = dialect if dialect in TARGETS else given.dialect
    try:
        fitted = session.fit(dialect=spoken, tools=given.tools, request=given.fields | given.system)
    except SettingError as error:  # a field of the request in the file
        raise MessageError(f"{given.where}: {error.where}", error.problem) from error
    value: Any = fitted.messages
    if fitted.system is not None:  # the API has it as a separate field, the file in the list
        value = [{"role": "system", "content": fitted.system}, *value]
    if isinstance(given.value, dict):
        is_same = value == given.messages  # and then a single text stays a text
        value = given.value if is_same else {**given.value, given.name: value}
    _write(out, pretty(value))
    if out is not None:
        tokens = fitted.report.tokens
        count = plural(len(fitted.messages), "message")
        size = plural(tokens.final, "token")
        if fitted.report.edits:
            count += f" for {len(given.messages):,}"
            size += f", {saved_percent(tokens.before, tokens.final)} % saved"
        say(f"{one_line(str(out))}: {count}, {size}")
    if report is None:
        for notice in at_most(fitted.report.notices, MAX_PRINTED_NOTICES):
            complain(notice)
    elif report == "-":
        typer.echo(pretty(fitted.report), err=True)
    else:
        _write(Path(report), pretty(fitted.report))


def check(
    file: InFile,
    dialect: Annotated[str | None, option(f"{', '.join(TARGETS)}; default: detected.", "D")] = None,
    model: Annotated[str | None, option("The model, for rules that only some models have.", "M")] = None,
    strict: Annotated[
        bool, flag("Also report what providers accept although their rules forbid it.", "--strict")
    ] = False,
    config: ConfigFile = None,
    json: Json = False,
) -> None:
    """Check which of the provider's rules a request breaks, and where."""
    given = _read(file)
    spoken, found = check_given(given, configured(config), model, dialect, strict=strict)
    version = RULES[spoken].VERSION
    if json:
        emit({"valid": not found, "violations": found, "dialect": spoken, "rules": version})
    elif found:
        for fault in found:
            where = f"{given.name}[{fault.index}]" if fault.index < len(given.messages) else given.name
            say(f"{fault.rule}  {where}: {one_line(fault.message)}")
        say(f"invalid: {plural(len(found), 'violation')} of the rules for {spoken} ({version})")
    else:
        say(f"valid: {plural(len(given.messages), 'message')} by the rules for {spoken} ({version})")
    if found:
        raise typer.Exit(1)


def count(
    file: InFile,
    model: Annotated[str, option("The model that counts the tokens.", "M")],
    dialect: DialectOption = None,
    config: ConfigFile = None,
    json: Json = False,
) -> None:
    """Count the tokens of a request, by message and in total."""
    given = _read(file)
    settings = configured(config)
    with progress("Counting", len(given.messages)) as advance:
        parts = count_parts(given, settings, model, dialect)
        advance(len(given.messages))
    system, tools, *messages = parts
    total = sum(part.tokens for part in parts)
    if json:
        counts = [{"index": n, "role": one.role, "tokens": one.tokens} for n, one in enumerate(messages)]
        sizes = {"total": total, "system": system.tokens, "tools": tools.tokens}
        emit({"model": model, **sizes, "messages": counts})
        return
    texts = [_system_text(given), plural(len(given.tools or []), "declaration")]
    texts += [" ".join(map(glance, part.parsed)) for part in messages]
    rows = list[list[Cell]]()
    for n, (part, text) in enumerate(zip(parts, texts, strict=True), -2):  # messages are counted from 0
        if n >= 0 or part.tokens:
            index = f"{n}" if n >= 0 else ""
            rows.append([(index, ""), (f"{part.tokens:,}", ""), (part.role, ""), (text, "")])
    table((">index", ">tokens", "role", ""), rows)
    window = find(model, settings.models).limits.window
    percent = 100 * total / window
    share = f"{percent:.1f} %" if percent >= 0.1 else "less than 0.1 %"
    say(f"{plural(total, 'token')} for {one_line(model)}: {share} of its window of {window:,}")


def _system_text(given: FileConversation) -> str:
    """The system text that stands beside the messages, in one line."""
    system = next(iter(given.system.values()), "")
    return one_line(system) if isinstance(system, str) else glance_json(system)


def _read(file: str) -> FileConversation:
    return conversation(read_file(file), "stdin" if file == "-" else file)


def _write(out: Path | None, data: bytes) -> None:
    if out is None:
        typer.echo(data)
        return
    with writing(out) as file:
        file.write(data + b"\n")
