"""The commands `refold bench retention`, `cost` and `speed`. What they need is imported when they run."""

import sys
from typing import Annotated, TypeAlias

import typer

from refold.cli.options import DEFAULT_OWNER, argument, flag, option
from refold.cli.terminal import emit
from refold.core.errors import SettingError

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True)

DATA_HELP = (
    "The URL of a store, a SQLite file, an export, a file of histories, a folder of such files, or"
    " a folder with traces and probes."
)
DataSource: TypeAlias = Annotated[str, argument(DATA_HELP, "DATA")]
Only: TypeAlias = Annotated[list[str] | None, option("Only this conversation.", "ID", "--conversation")]
OwnerName: TypeAlias = Annotated[str, option("The owner, in a store.", "NAME", "--owner")]
Policies: TypeAlias = Annotated[
    str | None, option("Configurations to compare with the default.", "FILE,FILE,…", "--policy")
]
Least: TypeAlias = Annotated[int, option("Leave out smaller conversations.", "TOKENS", "--least")]
Jobs: TypeAlias = Annotated[int, option("Processes.", "N", "--jobs", min=1, max=64)]
AsJson: TypeAlias = Annotated[bool, flag("Print all numbers as JSON.", "--json")]
Brief: TypeAlias = Annotated[bool, flag("Print one small table.", "--brief")]
Markdown: TypeAlias = Annotated[bool, flag("Print tables in Markdown.", "--markdown")]


@app.callback()
def bench() -> None:
    """Measure retention, cost and speed."""


@app.command()
def retention(
    data: DataSource,
    budget: Annotated[
        str | None, option("Percent of each conversation's tokens; default: 50,25,10.", "P,P,…")
    ] = None,
    policy: Policies = None,
    model: Annotated[str | None, option("With --policy: replaces the configurations' model.", "M")] = None,
    agent: Annotated[str | None, option("With --policy: the agent whose settings are used.", "NAME")] = None,
    conversation: Only = None,
    owner: OwnerName = DEFAULT_OWNER,
    source: Annotated[str | None, option("Only conversations of this source.", "NAME")] = None,
    least: Least = 8_000,
    written: Annotated[bool, flag("Also with a fake model that forgets and invents.", "--written")] = False,
    controls: Annotated[
        bool, flag("Also everything, nothing, the least, the newest.", "--controls/--no-controls")
    ] = True,
    jobs: Jobs = 2,
    only_totals: Annotated[bool, flag("One row for all sources.", "--totals")] = False,
    as_json: AsJson = False,
    brief: Brief = False,
    markdown: Markdown = False,
) -> None:
    """Measure what is saved and lost, on conversations that are replayed step by step.

    Before each model call, refold makes the request under a budget and looks in it for the exact values that
    this call used. Configurations are compared in their models' windows, or with --budget under budgets.

    \b
    Examples:
      refold bench retention agent.db
      refold bench retention sqlite:///agent.db --policy careful.yaml,tight.yaml --model gpt-5
      refold bench retention exports/ --budget 25 --json > numbers.json
    """
    from refold.cli.bench import retention as bench
    from refold.cli.bench.recorded import load
    from refold.cli.bench.replay import Arm
    from refold.cli.bench.tables import show

    arms = bench.arms_of(budget or "50,25,10", policy, model, agent, own_windows=budget is None)
    percents = sorted({arm.percent for arm in arms if arm.percent}, reverse=True)
    if written:
        arms += [Arm("written", percent) for percent in percents]
    if controls:
        arms += [Arm("everything"), Arm("nothing"), Arm("least")]
        arms += [Arm("newest", percent) for percent in percents]
    rows = bench.measure(load(data, source, least, owner=owner, ids=conversation or ()), arms, jobs)
    failed = list(bench.failed_controls(rows))
    if as_json:
        emit(bench.to_json(rows))
    elif brief:
        show([bench.brief_table(rows)], markdown=markdown)
    else:
        show(bench.tables(rows, only_totals=only_totals), markdown=markdown)
        dropped = max(row.numbers["dropped"] for row in rows)
        print(f"{dropped} probes left out: their value does not occur before its use.")
        if not any(row.numbers["probes"] for row in rows):
            print("No call uses a value of an earlier result: nothing can be said about what is lost.")
        if policy is not None:
            print("Configurations are replayed by rule: no model is called.")
        if controls and not failed:
            print("The controls hold: keeping everything loses nothing, keeping nothing loses all.")
    if failed:
        print(f"The controls fail: {'; '.join(failed)}. Trust none of these numbers.", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def cost(
    data: DataSource,
    models: Annotated[str, option("Models with known prices.", "M,M,…")] = "claude-sonnet-5,gpt-5",
    policy: Policies = None,
    conversation: Only = None,
    owner: OwnerName = DEFAULT_OWNER,
    least: Least = 2_000,
    jobs: Jobs = 2,
    as_json: AsJson = False,
    brief: Brief = False,
    markdown: Markdown = False,
) -> None:
    """Measure what conversations cost at the providers' prices, reduced in several ways.

    \b
    Examples:
      refold bench cost agent.db
      refold bench cost agent.db --policy a.yaml,b.yaml --models gpt-5
    """
    from refold.cli.bench import cost as bench
    from refold.cli.bench.recorded import load
    from refold.cli.bench.tables import show

    ways = bench.ways_of(policy)
    traces = load(data, least=least, owner=owner, ids=conversation or ())
    rows = bench.measure(traces, models.split(","), ways, jobs)
    if as_json:
        emit(bench.to_json(rows))
    else:
        show([bench.brief_table({"": rows}) if brief else bench.table(rows)], markdown=markdown)


@app.command()
def speed(
    sizes: Annotated[list[int] | None, argument("Messages.", "[SIZE]...")] = None,
    as_json: AsJson = False,
    markdown: Markdown = False,
) -> None:
    """Measure whether a step takes longer when the conversation is longer.

    An append is compared with a bare INSERT of the same durability, a fit with a walk over what is shown and
    the encoding of the request, in the same run.

    \b
    Examples:
      refold bench speed                   100 to 100,000 messages
      refold bench speed 100 1000          only these
    """
    from refold.cli.bench import speed as bench
    from refold.cli.bench.tables import show

    if sizes and min(sizes) < 2:
        raise SettingError("SIZE", f"{min(sizes)} messages are no conversation; the smallest is 2")
    rows = bench.measure_all(sizes or bench.SIZES)
    if as_json:
        emit(rows)
    else:
        show([bench.table(rows)], markdown=markdown)
        print("Times are median / mean; ratios are to the floor of the same run.")
