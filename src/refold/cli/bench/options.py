"""Options that the benchmarks share."""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

Data: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        metavar="DATA",
        help="A folder with traces and probes; your own exports, histories or a folder of them; a SQLite"
        " file or the URL of a store. Else a set that is made by chance.",
        show_default=False,
    ),
]
Conversations: TypeAlias = Annotated[
    list[str] | None, typer.Option("--conversation", metavar="ID", help="Only these.")
]
Owner: TypeAlias = Annotated[str, typer.Option(metavar="NAME", help="Of a store: whose.")]
Seed: TypeAlias = Annotated[int, typer.Option(help="Of the set that is made by chance.")]
Jobs: TypeAlias = Annotated[int, typer.Option(help="Processes.", min=1, max=64)]
Numbers: TypeAlias = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="All numbers; - for stdout.")
]
Brief: TypeAlias = Annotated[bool, typer.Option("--brief", help="Only what decides, in one small table.")]
Markdown: TypeAlias = Annotated[bool, typer.Option("--markdown", help="Tables for documents.")]
