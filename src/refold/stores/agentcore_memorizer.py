"""AgentCore Memory beside a record that is elsewhere: told what was said, and asked what it learned."""

from collections.abc import Sequence

from refold.core.codec import to_bytes
from refold.core.errors import MessageError, StoreError
from refold.stores.agentcore_events import conversational
from refold.stores.agentcore_service import Service, digest
from refold.stores.store import Key, Memory, SpokenMessage


class AgentCoreMemorizer:
    """What was said, an event without a blob for each message; the same handed in again is one event."""

    def __init__(self, service: Service, *, long_term: bool = True) -> None:
        self._service = service
        self.recalls = long_term
        """Whether models are to be shown what was learned, unasked."""

    @property
    def name(self) -> str:
        return f"agentcore://{self._service.memory_id}/{self._service.actor or ''}"

    def remember(self, key: Key, said: Sequence[SpokenMessage], /) -> None:
        place = self._service.place(key)
        for one in said:
            token = digest(*map(to_bytes, (*place, *key, f"{one.at} {one.time!r}")))  # erased, it is another
            try:
                if texts := list(conversational([one])):
                    self._service.create(place, texts, token, 0)
            except StoreError as error:
                if self._service.code(error) in ("ValidationException", "InvalidInputException", "413"):
                    raise MessageError(f"message {one.at} of {key.conversation!r}", str(error)) from error
                raise

    def memories(self, key: Key, query: str | None, limit: int, namespace: str | None, /) -> list[Memory]:
        return self._service.memories(key, query, limit, namespace)

    def forget(self, key: Key, /) -> None:
        """The events, and the records whose namespace has `{sessionId}`; other records are the actor's."""
        place = self._service.place(key)
        for event in list(self._service.events(place)):
            self._service.delete(place, event["eventId"])
        self._service.forget_records(place)

    def close(self) -> None:
        self._service.close()
