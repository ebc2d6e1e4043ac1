"""What commands have in common: their options, and the way to a store and a conversation in it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import Parameter, Signature, signature
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from refold.cli.terminal import complain
from refold.cli.words import quoted
from refold.config.config import Config, load_config
from refold.core.errors import CorruptError, NotFoundError
from refold.dialects.registry import FORMATS, format_of
from refold.session.api import DEFAULT_STORE
from refold.session.intake import Intake
from refold.session.meter import Meter
from refold.session.session import Session
from refold.stores.store import Key, Store, open_store
from refold.stores.url import shown_url

CONFIG = "refold.yaml"
"""The configuration that is used when it stands in the folder."""
DEFAULT_OWNER = "default"
ALL_OWNERS = "*"
"""How people write every owner."""
MOST_LOOKED_AT = 1_000
"""Conversations that are looked at for a hint: a store across a network may have millions."""


def place(text: str | int) -> int:
    """A place as people write it: 57 or #57."""
    number = str(text).removeprefix("#")
    if not (number.isascii() and number.isdigit()):
        raise typer.BadParameter(f"{text!r} is no place; a place is a number such as 57: see `refold show`")
    return int(number)


def place_or_id(text: str | int) -> int | str:
    """A place (57 or #57), a negative number that counts from the newest message, or a message's id."""
    number = str(text).removeprefix("#")
    digits = number.removeprefix("-")
    return int(number) if digits.isascii() and digits.isdigit() else str(text)


def ids(ctx: typer.Context, incomplete: str) -> list[str]:
    """Conversations, for the shell's completion: whatever goes wrong, it stays silent."""
    try:
        with Access.to(ctx.params.get("store"), ctx.params.get("config")).open() as store:
            listed = store.conversations(ctx.params.get("owner") or "default")
            return [row.key.conversation for row in listed if row.key.conversation.startswith(incomplete)]
    except Exception:
        return []


Id: TypeAlias = Annotated[
    str, typer.Argument(metavar="ID", help="The conversation.", autocompletion=ids, show_default=False)
]
StoreUrl: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        envvar="REFOLD_STORE",
        show_envvar=False,
        help=f"The store; else $REFOLD_STORE, else the configuration's, else {DEFAULT_STORE}.",
    ),
]
ConfigFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help=f"The configuration; else {CONFIG}, if there is one."),
]
Owner: TypeAlias = Annotated[str, typer.Option("--owner", metavar="NAME", help="Whose conversation it is.")]
ViewName: TypeAlias = Annotated[str, typer.Option("--view", metavar="NAME", help="Which view of it.")]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="JSON for machines, nothing else on stdout.")]
At: TypeAlias = Annotated[
    int, typer.Argument(metavar="AT", parser=place, help="A place, such as 57.", show_default=False)
]
AtOrId: TypeAlias = Annotated[
    Any,
    typer.Argument(
        metavar="AT",
        parser=place_or_id,
        help="A place such as 57, a message's id, or -1 for the newest message.",
        show_default=False,
    ),
]
Why: TypeAlias = Annotated[str, typer.Option("--why", metavar="TEXT", help="The reason, kept in the record.")]


InFile: TypeAlias = Annotated[
    str, typer.Argument(metavar="FILE", help="A file, or - for stdin.", show_default=False)
]
OutFile: TypeAlias = Annotated[
    Path | None, typer.Option("-o", "--out", metavar="FILE", help="Where to; else stdout.")
]
DialectOption: TypeAlias = Annotated[
    str | None, typer.Option("--dialect", metavar="D", help=f"{', '.join(FORMATS)}; else as it looks.")
]


def intake_for(config: Config, model: str | None, dialect: str | None) -> Intake:
    """How the messages of a file are taken in."""
    if dialect is not None:
        format_of(dialect)
    settings = config.agent(None)
    meter = Meter(None, config, model or settings.model, settings.counter)
    return Intake(meter.counter, meter.dialect, dialect)


@dataclass(frozen=True, slots=True)
class Access:
    """Which store a command is about, by its options, the environment and the configuration."""

    given: str
    """Its URL, and perhaps a password in it."""
    config: Config

    @property
    def shown(self) -> str:
        """For people to read."""
        return shown_url(self.given)

    @classmethod
    def to(cls, store: str | None, config: Path | None, *, for_settings: bool = False) -> "Access":
        """Where a store is named, the configuration is read only by those who act by its settings."""
        is_read = for_settings or config is not None or not store
        settings = configured(config) if is_read else Config()
        return cls(store or settings.store or DEFAULT_STORE, settings)

    @contextmanager
    def open(self, *, create: bool = False) -> Iterator[Store]:
        """The store. One in a file that is not there is made only on request.

        Raises:
            NotFoundError: there is no such file.
        """
        file = self.file
        if file is not None and not create and not file.exists():
            raise NotFoundError(
                f"There is no store at {file} yet; `refold import FILE` makes one, --store URL names another"
            )
        from refold.stores.sqlite_file import is_foreign  # only where a store is opened

        if file is not None and not create and is_foreign(file):
            raise NotFoundError(f"{file} is a database of something else: refold has kept nothing in it")
        store = open_store(self.given)
        try:
            yield store
        finally:
            store.close()

    @property
    def file(self) -> Path | None:
        """Where a SQLite store is; None for stores of another kind."""
        path = self.given.removeprefix("sqlite:///").partition("?")[0]
        return Path(path) if self.given.startswith("sqlite:///") and path not in ("", ":memory:") else None

    @contextmanager
    def session(
        self, id: str, owner: str, view: str = "main", *, for_reading: bool = False, **rest: Any
    ) -> Iterator[Session]:
        """A conversation that is there already; `rest` is what else a session takes, such as its model.

        Raises:
            NotFoundError: it is not, with the way to see what is.
        """
        with self.open() as store:
            key = existing(store, self.shown, Key(owner, id), for_reading=for_reading)
            with blaming_damage(id):
                yield Session(store, key, config=self.config, view=view, **rest)


def conversing(command: Callable[..., None], *, for_reading: bool = False) -> Callable[..., None]:
    """Opens the conversation that a command is about: it gets the session, people the options for it."""

    def run(
        id: Id,
        store: StoreUrl = None,
        config: ConfigFile = None,
        owner: Owner = DEFAULT_OWNER,
        view: ViewName = "main",
        **own: Any,
    ) -> None:
        access = Access.to(store, config)
        with access.session(id, owner, view, for_reading=for_reading) as session:
            command(session, **own)

    first, *options, _ = signature(run).parameters.values()
    _, *own, json = signature(command).parameters.values()
    named = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in (first, *own, *options, json)]
    run.__signature__, run.__doc__ = Signature(named), command.__doc__  # type: ignore[attr-defined]
    return run


def reading(command: Callable[..., None]) -> Callable[..., None]:
    """The same for a command that changes nothing: see `existing`."""
    return conversing(command, for_reading=True)


def configured(config: Path | None) -> Config:
    """The configuration in a file, or in the one of the usual name in this folder."""
    if config is None and Path(CONFIG).is_file():
        config = Path(CONFIG)
    return load_config(config)


def existing(store: Store, url: str, key: Key, *, for_reading: bool = False) -> Key:
    """The same key, if there is such a conversation, be it damaged.

    Commands that only read (`for_reading`) may omit the owner where the store is local: if exactly one other
    owner has a conversation of that id, its key is returned and stderr names the owner.

    Raises:
        NotFoundError: there is none; says how to see what there is.
    """
    try:
        if next(store.read(key, 0, 1), None) is not None:
            return key
    except (CorruptError, ValueError):
        return key
    names = [row.key.conversation for row in store.conversations(key.owner)]
    if key.conversation in names:  # a fork of nothing, still empty
        return key
    owners = _owners(store, url, key.conversation)
    if for_reading and key.owner == DEFAULT_OWNER and len(owners) == 1:
        owner = owners[0]
        complain(f"{key.conversation!r} is a conversation of the owner {owner!r} (--owner {quoted(owner)})")
        return Key(owner, key.conversation)
    raise NotFoundError(_not_found(store, url, key, names, owners))


def _owners(store: Store, url: str, id: str) -> list[str]:
    """Who has a conversation of that id. Only local stores are searched."""
    if not url.startswith(("sqlite:", "memory:")):
        return []
    return [row.key.owner for row in store.conversations() if row.key.conversation == id]


def _not_found(store: Store, url: str, key: Key, names: Sequence[str], owners: Sequence[str]) -> str:
    of_owner = "" if key.owner == DEFAULT_OWNER else f" of owner {key.owner!r}"
    told = f"There is no conversation {key.conversation!r}{of_owner} in {url}. "
    if owners:
        return told + f"One of that id belongs to {' and one to '.join(map(repr, owners))}: give --owner"
    close = get_close_matches(key.conversation, names, 1)
    if close:
        told += f"Did you mean {close[0]!r}? "
    told += "`refold list` shows what there is"
    if of_owner:
        told += f" for owner {key.owner!r}"
    newest = islice(store.conversations(), MOST_LOOKED_AT)
    if any(row.key.owner != key.owner for row in newest):
        told += "; other owners have conversations too: `refold list --all-owners`"
    return told


@contextmanager
def blaming_damage(id: str) -> Iterator[None]:
    """What only damaged data makes Python raise is told as damage."""
    try:
        yield
    except (AssertionError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise CorruptError(
            f"{id!r} cannot be read ({type(error).__name__}: {error}). `refold doctor` says where it is"
            " damaged; if it finds nothing, this is a bug: please report it"
        ) from error
