"""Commands about a file with a request, nothing stored: fit, check, count."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from refold.answers import Fitted
from refold.asked import output_of
from refold.cli.options import ConfigFile, DialectOption, InFile, Json, OutFile, configured, intake_for
from refold.cli.terminal import Cell, Columns, complain, emit, fitting, pretty, progress, say, writing
from refold.cli.words import glance, glance_json, one_line, plural, saved_percent
from refold.config import Config
from refold.core.errors import MessageError, RefoldError, SettingError
from refold.formats.dialects import TARGETS
from refold.incoming import RESPONSES, Given, conversation, read_file
from refold.intake import Intake
from refold.meter import Meter
from refold.rules.targets import JUDGES, check_request
from refold.session import Session
from refold.stores.store import Key, open_store

MOST_TOLD = 5
"""Notices that are told one by one."""


def fit(
    file: InFile,
    model: Annotated[str, typer.Option("--model", metavar="M", help="Whose window it must fit.")],
    config: ConfigFile = None,
    dialect: DialectOption = None,
    out: OutFile = None,
    report: Annotated[
        str | None, typer.Option("--report", metavar="FILE", help="What was done, as JSON; - for stderr.")
    ] = None,
) -> None:
    """Messages in, messages that fit the model out.

    The file has a JSON list of messages in any dialect, or a request: an object with `messages` or `input`,
    and perhaps `system`, `tools` and how long the answer may be. What comes out has the same shape. Nothing
    is stored.
    """
    given = _read(file)
    session = Session(
        open_store("memory://"), Key("default", given.where), model=model, config=configured(config)
    )
    session.reducer.handles = False  # nothing is stored: there would be nothing to expand
    with progress("Reading", len(given.messages)) as advance:
        session.say(given.said(session.intake(dialect), advance))
    spoken = dialect if dialect in TARGETS else given.dialect
    try:
        fitted = session.fit(dialect=spoken, tools=given.tools, request=given.beside | given.system)
    except SettingError as error:  # of the request in the file
        raise MessageError(f"{given.where}: {error.where}", error.problem) from error
    messages = _same_shape(given, fitted)
    value = given.value
    _write(out, pretty({**value, given.name: messages} if isinstance(value, dict) else messages))
    if out is not None:
        say(_done(given, fitted, out))
    if report is None:
        _tell(fitted.report.notices)
    elif report == "-":
        typer.echo(pretty(fitted.report), err=True)
    else:
        _write(Path(report), pretty(fitted.report))


def _same_shape(given: Given, fitted: Fitted) -> Any:
    """What stood in the list stays there, and one text stays one."""
    messages = fitted.messages
    if fitted.system is not None:  # which the API wants apart
        messages = [{"role": "system", "content": fitted.system}, *messages]
    is_text = isinstance(given.value, dict) and isinstance(given.value[given.name], str)
    return given.value[given.name] if is_text and messages == given.messages else messages


def _done(given: Given, fitted: Fitted, out: Path) -> str:
    tokens, count, sent = fitted.report.tokens, len(given.messages), len(fitted.messages)
    kept = plural(sent, "message") + (f" for {count:,}" if sent != count else "")
    saved = f", {saved_percent(tokens.before, tokens.final)} % saved" if fitted.report.edits else ""
    return f"{one_line(str(out))}: {kept}, {plural(tokens.final, 'token')}{saved}"


def _tell(notices: Sequence[str]) -> None:
    """What the caller would not expect: what was mended, and what could not be said."""
    for notice in notices[:MOST_TOLD]:
        complain(notice)
    if len(notices) > MOST_TOLD:
        complain(f"… and {plural(len(notices) - MOST_TOLD, 'notice')} more; --report has them all")


def check(
    file: InFile,
    dialect: Annotated[
        str | None, typer.Option("--dialect", metavar="D", help=f"{', '.join(TARGETS)}; else as it looks.")
    ] = None,
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
    given = _read(file)
    with warnings.catch_warnings():
        if model is None:  # nobody asked about the window of the one that the file names
            warnings.simplefilter("ignore")
        meter = Meter(None, configured(config), model or _text(given.beside.get("model")))
    spoken = dialect or given.dialect or meter.dialect
    if spoken not in JUDGES:
        raise typer.BadParameter(f"{spoken!r} is none of {', '.join(JUDGES)}", param_hint="--dialect")
    request = {**given.beside, "input" if spoken == RESPONSES else "messages": given.messages}
    flags = meter.limits.flags
    known = {"no_prefill": "no-prefill" in flags, "system_inside": "system-inside" in flags}
    size = _size(given, configured(config), meter, dialect) if meter.is_known else {}
    found = check_request(spoken, request, strict=strict, **known, **size)
    version = JUDGES[spoken].VERSION
    if json:
        emit({"valid": not found, "violations": found, "dialect": spoken, "rules": version})
    elif found:
        rows = [(fault.rule, _place(given, fault.index), one_line(fault.message)) for fault in found]
        _table(("rule", "where", "what"), rows)
        say(f"invalid: {plural(len(found), 'violation')} of the rules for {spoken} ({version})")
    else:
        say(f"valid: {plural(len(given.messages), 'message')} by the rules for {spoken} ({version})")
    if found:
        raise typer.Exit(1)


def _size(given: Given, settings: Config, meter: Meter, dialect: str | None) -> dict[str, int]:
    """What the request takes and what there is room for, as far as it can be counted."""
    assert meter.model is not None
    with suppress(RefoldError):
        tokens = sum(weight.tokens for weight in _weights(given, settings, meter.model, dialect))
        budget = settings.budget(settings.agent(None), meter.limits, output_of(given.beside))
        return {"tokens": tokens, "room": budget.room}
    return {}


def _place(given: Given, index: int) -> str:
    return f"{given.name}[{index}]" if index < len(given.messages) else given.name


class _Weight(NamedTuple):
    """What something in a request takes."""

    role: str
    tokens: int
    text: str


def count(
    file: InFile,
    model: Annotated[str, typer.Option("--model", metavar="M", help="Who counts them.")],
    dialect: DialectOption = None,
    config: ConfigFile = None,
    json: Json = False,
) -> None:
    """How many tokens a request takes, by message and in all."""
    given, settings = _read(file), configured(config)
    system, tools, *messages = _weights(given, settings, model, dialect)
    total = sum(weight.tokens for weight in (system, tools, *messages))
    if json:
        rows = [{"index": n, "role": one.role, "tokens": one.tokens} for n, one in enumerate(messages)]
        emit(
            {"model": model, "total": total, "system": system.tokens, "tools": tools.tokens, "messages": rows}
        )
        return
    beside = [("", one) for one in (system, tools) if one.tokens]
    said = [(str(n), one) for n, one in enumerate(messages)]
    _table(
        (">index", ">tokens", "role", ""),
        [(index, f"{one.tokens:,}", one.role, one.text) for index, one in (*beside, *said)],
        wrap=False,
    )
    window = _meter(settings, model).limits.window
    percent = 100 * total / window
    share = f"{percent:.1f} %" if percent >= 0.1 else "less than 0.1 %"
    say(f"{plural(total, 'token')} for {one_line(model)}: {share} of its window of {window:,}")


def _weights(given: Given, settings: Config, model: str, dialect: str | None) -> list[_Weight]:
    """System text, tools and each message, as the model counts them; they add up to the request.

    What every request takes is in the first of them.
    """
    meter, intake = _meter(settings, model), intake_for(settings, model, dialect)
    try:
        counted = list(_counted(given, meter, intake._replace(default=given.dialect or intake.default)))
    except SettingError as error:  # of the request in the file
        raise MessageError(f"{given.where}: {error.where}", error.problem) from error
    sums = accumulate(weight.tokens for weight in counted)
    ends = [0, *(meter.estimate(so_far, None) if so_far else 0 for so_far in sums)]
    return [
        weight._replace(tokens=end - begin)
        for weight, (begin, end) in zip(counted, pairwise(ends), strict=True)
    ]


def _counted(given: Given, meter: Meter, intake: Intake) -> Iterator[_Weight]:
    text, tools = next(iter(given.system.values()), ""), given.tools or []
    yield _Weight("system", meter.apart(given.beside | given.system), _glance(text))
    chosen = meter.counter.tools(tools, given.beside.get("tool_choice"))
    yield _Weight("tools", chosen, plural(len(tools), "declaration"))
    answer: list[tuple[Any, _Weight]] = []
    with progress("Counting", len(given.messages)) as advance:
        for n, message in enumerate(given.messages):
            drafts = intake.take([message], lambda _: given.place(n)).drafts  # noqa: B023
            role, text = drafts[0].message.role, " ".join(glance(draft.message) for draft in drafts)
            written = message.get("role") if isinstance(message, Mapping) else None
            weight = _Weight(_text(written) or role, sum(draft.tokens for draft in drafts), text)
            advance(1)
            if role == "assistant" and drafts[0].dialect == RESPONSES:
                answer.append((message, weight))
                continue
            yield from _shared(answer, intake)
            answer.clear()
            yield weight
    yield from _shared(answer, intake)


def _shared(answer: Sequence[tuple[Any, _Weight]], intake: Intake) -> Iterator[_Weight]:
    """The items of one answer, which is one message and counted as one."""
    if len(answer) < 2:
        yield from (weight for _, weight in answer)
        return
    whole = sum(draft.tokens for draft in intake.take([item for item, _ in answer]).drafts)
    sums = list(accumulate(weight.tokens for _, weight in answer))
    ends = [0, *(whole * so_far // sums[-1] for so_far in sums)]
    for (_, weight), (begin, end) in zip(answer, pairwise(ends), strict=True):
        yield weight._replace(tokens=end - begin)


def _meter(settings: Config, model: str) -> Meter:
    return Meter(None, settings, model, settings.agent(None).counter)


def _glance(system: Any) -> str:
    """System text in one line."""
    blocks = system if isinstance(system, list) else [system]
    texts = [block.get("text") if isinstance(block, Mapping) else block for block in blocks]
    return " ".join(one_line(text) if isinstance(text, str) else glance_json(text) for text in texts)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], wrap: bool = True) -> None:
    cells: list[list[Cell]] = [[(text, "") for text in row] for row in rows]
    columns = Columns(*fitting(titles, cells))
    columns.head()
    for row in cells:
        columns.line(*row, wrap=wrap)


def _read(file: str) -> Given:
    return conversation(read_file(file), "stdin" if file == "-" else file)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _write(out: Path | None, data: bytes) -> None:
    if out is None:
        typer.echo(data)
        return
    with writing(out) as file:
        file.write(data + b"\n")
