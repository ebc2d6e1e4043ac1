"""Options that commands share, and how they open a store and a conversation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from refold.cli.format import quoted
from refold.cli.terminal import complain
from refold.config.config import Config, load_config
from refold.core.errors import CorruptError, NotFoundError
from refold.dialects.registry import DIALECTS
from refold.session.api import DEFAULT_STORE
from refold.session.session import Session
from refold.stores.store import Key, Store, open_store
from refold.stores.url import shown_url

CONFIG = "refold.yaml"
"""The configuration that is read if it is in the current folder."""
DEFAULT_OWNER = "default"
ALL_OWNERS = "*"
"""What --owner takes for every owner."""


def place(text: str | int) -> int:
    """Parses a place: 57 or #57."""
    number = str(text).removeprefix("#")
    if not (number.isascii() and number.isdigit()):
        raise typer.BadParameter(
            f"{text!r} is not a place: expected a number such as 57, as `refold show` prints it"
        )
    return int(number)


def place_or_id(text: str | int) -> int | str:
    """Parses a place (57 or #57), a negative number counted from the newest message, or a message's id."""
    number = str(text).removeprefix("#")
    digits = number.removeprefix("-")
    return int(number) if digits.isascii() and digits.isdigit() else str(text)


def ids(ctx: typer.Context, incomplete: str) -> list[str]:
    """Ids for the shell's completion, which must never print an error."""
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
        help=f"The store; default: $REFOLD_STORE, the configuration's store, or {DEFAULT_STORE}.",
    ),
]
ConfigFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help=f"The configuration file; default: {CONFIG}, if it exists."
    ),
]
Owner: TypeAlias = Annotated[
    str, typer.Option("--owner", metavar="NAME", help="The owner of the conversation.")
]
ViewName: TypeAlias = Annotated[
    str, typer.Option("--view", metavar="NAME", help="The view of the conversation.")
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]
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
Why: TypeAlias = Annotated[str, typer.Option("--why", metavar="TEXT", help="The reason, which is recorded.")]


InFile: TypeAlias = Annotated[
    str, typer.Argument(metavar="FILE", help="A file, or - for stdin.", show_default=False)
]
OutFile: TypeAlias = Annotated[
    Path | None, typer.Option("-o", "--out", metavar="FILE", help="The file to write; default: stdout.")
]
DialectOption: TypeAlias = Annotated[
    str | None, typer.Option("--dialect", metavar="D", help=f"{', '.join(DIALECTS)}; default: detected.")
]


@dataclass(frozen=True, slots=True)
class Access:
    """The store of a command, from its options, the environment and the configuration."""

    given: str
    """The URL, which may contain a password."""
    config: Config

    @property
    def shown(self) -> str:
        """The URL without its password."""
        return shown_url(self.given)

    @classmethod
    def to(cls, store: str | None, config: Path | None) -> "Access":
        settings = configured(config)
        return cls(store or settings.store or DEFAULT_STORE, settings)

    @contextmanager
    def open(self, *, create: bool = False) -> Iterator[Store]:
        """Opens the store. A file that does not exist is created only if `create` is set.

        Raises:
            NotFoundError: the file does not exist, or is not a store.
        """
        file = self.file
        if file is not None and not create and not file.exists():
            raise NotFoundError(
                f"There is no store at {file}; `refold import FILE` creates one, --store URL names another"
            )
        from refold.stores.sqlite_file import is_foreign  # only where a store is opened

        if file is not None and not create and is_foreign(file):
            raise NotFoundError(f"{file} is not a refold store: it is a database of something else")
        store = open_store(self.given)
        try:
            yield store
        finally:
            store.close()

    @property
    def file(self) -> Path | None:
        """The file of a SQLite store; None for other stores."""
        path = self.given.removeprefix("sqlite:///").partition("?")[0]
        return Path(path) if self.given.startswith("sqlite:///") and path not in ("", ":memory:") else None

    @contextmanager
    def session(
        self, id: str, owner: str, view: str = "main", *, for_reading: bool = False, **rest: Any
    ) -> Iterator[Session]:
        """Opens an existing conversation; `rest` is what else a session takes, such as its model.

        Raises:
            NotFoundError: there is no such conversation.
        """
        with self.open() as store:
            key = existing(store, self.shown, Key(owner, id), for_reading=for_reading)
            with reporting_damage(id):
                yield Session(store, key, config=self.config, view=view, **rest)


def with_session(command: Callable[..., None], *, for_reading: bool = False) -> Callable[..., None]:
    """Gives a command the options that name a conversation, and calls it with the session."""

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
    return with_session(command, for_reading=True)


def configured(config: Path | None) -> Config:
    """The configuration from a file, or from the default file in this folder."""
    if config is None and Path(CONFIG).is_file():
        config = Path(CONFIG)
    return load_config(config)


def existing(store: Store, url: str, key: Key, *, for_reading: bool = False) -> Key:
    """Returns the key if the conversation exists, damaged or not.

    Commands that only read (`for_reading`) may omit the owner where the store is local: if exactly one other
    owner has a conversation of that id, its key is returned and stderr names the owner.

    Raises:
        NotFoundError: there is no such conversation.
    """
    try:
        if next(store.read(key, 0, 1), None) is not None:
            return key
    except (CorruptError, ValueError):
        return key
    names = [row.key.conversation for row in store.conversations(key.owner)]
    if key.conversation in names:  # a fork without events
        return key
    owners = list[str]()
    if url.startswith(("sqlite:", "memory:")):
        owners = [row.key.owner for row in store.conversations() if row.key.conversation == key.conversation]
    if for_reading and key.owner == DEFAULT_OWNER and len(owners) == 1:
        owner = owners[0]
        complain(f"{key.conversation!r} belongs to the owner {owner!r} (--owner {quoted(owner)})")
        return Key(owner, key.conversation)
    advice = "`refold list --all-owners` shows every conversation"
    if owners:
        advice = f"The owner {' or '.join(map(repr, owners))} has one: give --owner"
    elif close := get_close_matches(key.conversation, names, 1):
        advice = f"Did you mean {close[0]!r}? {advice}"
    raise NotFoundError(f"There is no conversation {key.conversation!r} in {url}. {advice}")


@contextmanager
def reporting_damage(id: str) -> Iterator[None]:
    """Turns errors that only damaged data can cause into a CorruptError."""
    try:
        yield
    except (AssertionError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise CorruptError(
            f"{id!r} cannot be read ({type(error).__name__}: {error}). Run `refold doctor` to find the"
            " damage; if it finds none, this is a bug: please report it"
        ) from error
