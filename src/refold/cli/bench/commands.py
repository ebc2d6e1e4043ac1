"""The commands `refold bench retention`, `cost` and `speed`. What they need is imported when they run."""

import sys
from dataclasses import asdict
from typing import Annotated, TypeAlias

import typer

from refold.core.codec import dumps
from refold.core.errors import SettingError

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True)

DataSource: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="DATA",
        help="The URL of a store, a SQLite file, an export, a file of histories, a folder of such files, or"
        " a folder with traces and probes.",
        show_default=False,
    ),
]
Only: TypeAlias = Annotated[
    list[str] | None, typer.Option("--conversation", metavar="ID", help="Only this conversation.")
]
OwnerName: TypeAlias = Annotated[str, typer.Option("--owner", metavar="NAME", help="The owner, in a store.")]
Policies: TypeAlias = Annotated[
    str | None, typer.Option(metavar="FILE,FILE,…", help="Configurations to compare with the default.")
]
Jobs: TypeAlias = Annotated[int, typer.Option(help="Processes.", min=1, max=64)]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print all numbers as JSON.")]
Brief: TypeAlias = Annotated[bool, typer.Option("--brief", help="Print one small table.")]
Markdown: TypeAlias = Annotated[bool, typer.Option("--markdown", help="Print tables in Markdown.")]


@app.callback()
def bench() -> None:
    """Measure what compaction saves and loses, what conversations cost, and how fast a step is."""


@app.command()
def retention(
    data: DataSource,
    budget: Annotated[
        str | None,
        typer.Option(metavar="P,P,…", help="Percent of each conversation's tokens; default: 50,25,10."),
    ] = None,
    policy: Policies = None,
    model: Annotated[
        str | None, typer.Option(metavar="M", help="With --policy: replaces the configurations' model.")
    ] = None,
    agent: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --policy: the agent whose settings are used.")
    ] = None,
    conversation: Only = None,
    owner: OwnerName = "default",
    source: Annotated[str | None, typer.Option(help="Only conversations of this source.")] = None,
    least: Annotated[int, typer.Option(metavar="TOKENS", help="Leave out smaller conversations.")] = 8_000,
    written: Annotated[bool, typer.Option(help="Also with a fake model that forgets and invents.")] = False,
    controls: Annotated[bool, typer.Option(help="Also everything, nothing, the least, the newest.")] = True,
    jobs: Jobs = 2,
    only_totals: Annotated[bool, typer.Option("--totals", help="One row for all sources.")] = False,
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
        print(dumps(bench.to_json(rows)).decode())
    elif brief:
        show([bench.brief_table(rows)], markdown=markdown)
    else:
        show(bench.tables(rows, only_totals=only_totals), markdown=markdown)
        dropped = max(row.numbers["dropped"] for row in rows)
        print(f"{dropped} probes left out: their value does not stand before its use.")
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
    models: Annotated[
        str, typer.Option(metavar="M,M,…", help="Models with known prices.")
    ] = "claude-sonnet-5,gpt-5",
    policy: Policies = None,
    conversation: Only = None,
    owner: OwnerName = "default",
    least: Annotated[int, typer.Option(metavar="TOKENS", help="Leave out smaller conversations.")] = 2_000,
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

    ways = bench.WAYS if policy is None else bench.ways_of(policy)
    traces = load(data, least=least, owner=owner, ids=conversation or ())
    rows = bench.measure(traces, models.split(","), ways, jobs)
    if as_json:
        print(dumps(bench.to_json(rows)).decode())
    else:
        show([bench.brief_table({"": rows}) if brief else bench.table(rows)], markdown=markdown)


@app.command()
def speed(
    sizes: Annotated[list[int] | None, typer.Argument(metavar="SIZE", help="Messages.")] = None,
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
        print(dumps([asdict(row) for row in rows]).decode())
    else:
        show([bench.table(rows)], markdown=markdown)
        print("Times are median / mean; ratios are to the floor of the same run.")
