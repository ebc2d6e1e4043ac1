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


def option(help: str, metavar: str, *names: str, **rest: Any) -> Any:
    """Declares an option with a value, named after its parameter unless `names` are given."""
    return typer.Option(*names, metavar=metavar, help=help, **rest)


def flag(help: str, *names: str) -> Any:
    """Declares an option without a value."""
    return typer.Option(*names, help=help)


def argument(help: str, metavar: str, **rest: Any) -> Any:
    return typer.Argument(metavar=metavar, help=help, show_default=False, **rest)


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
            listed = store.conversations(ctx.params.get("owner") or DEFAULT_OWNER)
            return [row.key.conversation for row in listed if row.key.conversation.startswith(incomplete)]
    except Exception:
        return []


STORE_HELP = f"The store; default: $REFOLD_STORE, the configuration's store, or {DEFAULT_STORE}."
Id: TypeAlias = Annotated[str, argument("The conversation.", "ID", autocompletion=ids)]
StoreUrl: TypeAlias = Annotated[
    str | None, option(STORE_HELP, "URL", "--store", envvar="REFOLD_STORE", show_envvar=False)
]
ConfigFile: TypeAlias = Annotated[
    Path | None, option(f"The configuration file; default: {CONFIG}, if it exists.", "FILE", "--config")
]
Owner: TypeAlias = Annotated[str, option("The owner of the conversation.", "NAME", "--owner")]
ViewName: TypeAlias = Annotated[str, option("The view of the conversation.", "NAME", "--view")]
Json: TypeAlias = Annotated[bool, flag("Print JSON, and nothing else, on stdout.", "--json")]
At: TypeAlias = Annotated[int, argument("A place, such as 57.", "AT", parser=place)]
AtOrId: TypeAlias = Annotated[
    Any,
    argument("A place such as 57, a message's id, or -1 for the newest message.", "AT", parser=place_or_id),
]
Why: TypeAlias = Annotated[str, option("The reason, which is recorded.", "TEXT", "--why")]
InFile: TypeAlias = Annotated[str, argument("A file, or - for stdin.", "FILE")]
OutFile: TypeAlias = Annotated[
    Path | None, option("The file to write; default: stdout.", "FILE", "-o", "--out")
]
DialectOption: TypeAlias = Annotated[
    str | None, option(f"{', '.join(DIALECTS)}; default: detected.", "D", "--dialect")
]


@dataclass(frozen=True, slots=True)
class Access:
    """The store of a command, from its options, the environment and the configuration, and the owner."""

    given: str
    """The URL, which may contain a password."""
    config: Config
    owner: str = DEFAULT_OWNER

    @property
    def shown(self) -> str:
        """The URL without its password."""
        return shown_url(self.given)

    @classmethod
    def to(cls, store: str | None, config: Path | None = None, owner: str = DEFAULT_OWNER) -> "Access":
        settings = configured(config)
        return cls(store or settings.store or DEFAULT_STORE, settings, owner)

    @contextmanager
    def open(self, *, create: bool = False) -> Iterator[Store]:
        """Opens the store. A file that does not exist is created only if `create` is set.

        Raises:
            NotFoundError: the file does not exist, or is not a store.
        """
        from refold.stores.sqlite_file import is_foreign  # only where a store is opened

        file = None if create else self.file
        if file is not None and not file.exists():
            raise NotFoundError(
                f"There is no store at {file}; `refold import FILE` creates one, --store URL names another"
            )
        if file is not None and is_foreign(file):
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

    def existing(self, store: Store, id: str, *, for_reading: bool = False) -> Key:
        """The key of a conversation that exists, damaged or not.

        Commands that only read (`for_reading`) may omit the owner where the store is local: if exactly one
        other owner has a conversation of that id, its key is returned and stderr names the owner.

        Raises:
            NotFoundError: there is no such conversation.
        """
        key = Key(self.owner, id)
        try:
            if next(store.read(key, 0, 1), None) is not None:
                return key
        except (CorruptError, ValueError):
            return key
        names = [row.key.conversation for row in store.conversations(self.owner)]
        if id in names:  # a fork without events
            return key
        others: list[str] = []
        if self.given.startswith(("sqlite:", "memory:")):
            others = [row.key.owner for row in store.conversations() if row.key.conversation == id]
        if for_reading and self.owner == DEFAULT_OWNER and len(others) == 1:
            complain(f"{id!r} belongs to the owner {others[0]!r} (--owner {quoted(others[0])})")
            return Key(others[0], id)
        advice = "`refold list --all-owners` shows every conversation"
        if others:
            advice = f"The owner {' or '.join(map(repr, others))} has one: give --owner"
        elif close := get_close_matches(id, names, 1):
            advice = f"Did you mean {close[0]!r}? {advice}"
        raise NotFoundError(f"There is no conversation {id!r} in {self.shown}. {advice}")

    @contextmanager
    def session(
        self, id: str, view: str = "main", *, for_reading: bool = False, **rest: Any
    ) -> Iterator[Session]:
        """Opens an existing conversation; `rest` is what else a session takes, such as its model.

        Raises:
            NotFoundError: there is no such conversation.
        """
        with self.open() as store:
            key = self.existing(store, id, for_reading=for_reading)
            with reporting_damage(id):
                yield Session(store, key, config=self.config, view=view, **rest)


def with_store(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command --store and --config, and calls it with the access to that store."""

    def run(store: StoreUrl = None, config: ConfigFile = None, **own: Any) -> None:
        command(Access.to(store, config), **own)

    return _with_options_of(command, run)


def with_owner(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command --owner too."""

    def run(
        store: StoreUrl = None, config: ConfigFile = None, owner: Owner = DEFAULT_OWNER, **own: Any
    ) -> None:
        command(Access.to(store, config, owner), **own)

    return _with_options_of(command, run)


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
        with Access.to(store, config, owner).session(id, view, for_reading=for_reading) as session:
            command(session, **own)

    return _with_options_of(command, run)


def reading(command: Callable[..., None]) -> Callable[..., None]:
    """The same for a command that changes nothing: see `Access.existing`."""
    return with_session(command, for_reading=True)


def _with_options_of(command: Callable[..., None], run: Callable[..., None]) -> Callable[..., None]:
    """Gives `run` the options of the command too; those that all commands share come last."""
    last = ("store", "config", "owner", "view", "json")
    *shared, _ = signature(run).parameters.values()
    _, *own = signature(command).parameters.values()
    named = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in (*shared, *own)]
    named.sort(key=lambda one: last.index(one.name) if one.name in last else -1)
    run.__signature__, run.__doc__ = Signature(named), command.__doc__  # type: ignore[attr-defined]
    return run


def configured(config: Path | None) -> Config:
    """The configuration from a file, or from the default file in this folder."""
    return load_config(config or default_config())


def default_config() -> Path | None:
    """The configuration file in this folder, if there is one."""
    return Path(CONFIG) if Path(CONFIG).is_file() else None


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
