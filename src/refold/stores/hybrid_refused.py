"""What a service would not take: noted beside the record that it is in, so that it can be handed in again."""

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from hashlib import blake2b
from typing import NamedTuple

from refold.core.codec import to_bytes
from refold.core.errors import CorruptError
from refold.stores.packing import pack, unpack
from refold.stores.store import Cursors, Key, Notes, Store


class Refused(NamedTuple):
    """A message that the service did not take, though it took others. It is in the record."""

    key: Key
    at: int
    why: str


class Refusals:
    """A note for each conversation, which only who hands it over may change: nobody loses another's.
    A cursor at its beginning marks those that ever had one, so that the others are not asked.

    Where the record keeps no notes, they are gone with the process.
    """

    def __init__(self, record: Store, name: str) -> None:
        assert isinstance(record, Cursors)
        self._record, self._cursors, self._name = record, record, name
        self._here: dict[str, bytes] = {}

    def of(self, key: Key) -> list[Refused]:
        """In order.

        Raises:
            CorruptError: the note was altered.
        """
        if not (body := self._note(key)):
            return []
        try:
            note = json.loads(unpack(body))
            whose, reasons = note["of"], dict(note["refused"])
            found = [Refused(key, int(at), why) for why, places in reasons.items() for at in places]
        except (ValueError, TypeError, KeyError) as error:
            what = f"The note of what was refused of {key.conversation!r} cannot be read: {error!r}"
            raise CorruptError(what) from error
        return sorted(found) if whose == self._whose(key) else []  # else of an erased one of that name

    def all(self) -> Iterator[Refused]:
        for key in self.places():
            yield from self.of(key)

    def places(self) -> list[Key]:
        """Conversations of which something was refused, be it that it was taken since."""
        return list(self._cursors.behind(f"refused by {self._name}"))

    def add(self, key: Key, more: Iterable[Refused]) -> None:
        known = list[Refused]()
        with suppress(CorruptError):  # there is nothing left to keep of it
            known = self.of(key)
        self.set(key, [*known, *more])

    def set(self, key: Key, refused: Iterable[Refused]) -> None:
        reasons = dict[str, list[int]]()
        for one in {one.at: one for one in refused}.values():
            reasons.setdefault(one.why, []).append(one.at)
        whose = self._whose(key) if reasons else ""
        body = pack(json.dumps({"of": whose, "refused": reasons}).encode()) if whose else b""
        if body:  # first: a note that is not marked would not be found
            self._cursors.set_cursor(key, f"refused by {self._name}", 0)
        if body == (self._note(key) or b""):
            return
        if isinstance(self._record, Notes):
            self._record.keep_note(self._title(key), body)
        elif body:
            self._here[self._title(key)] = body
        else:
            del self._here[self._title(key)]

    def _note(self, key: Key) -> bytes | None:
        title = self._title(key)
        return self._record.note(title) if isinstance(self._record, Notes) else self._here.get(title)

    def _title(self, key: Key) -> str:
        owner, conversation = map(to_bytes, key)
        digest = blake2b(b"%d:%b%b" % (len(owner), owner, conversation), digest_size=16)
        return f"refused by {self._name} of {digest.hexdigest()}"

    def _whose(self, key: Key) -> str:
        """Tells a record from an earlier one of the same name, by how it begins."""
        return "".join(link.digest.hex() for link in self._record.read(key, 0, 1))
