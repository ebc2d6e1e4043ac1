"""Counts the tokens of requests: with a model's limits and counter, calibrated by its provider's counts."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import msgspec

from refold.config.config import Config
from refold.config.validate import brief_repr
from refold.core import codec
from refold.core.codec import dumps, json_problem
from refold.core.errors import SettingError, StoreError
from refold.core.event import Measured
from refold.dialects.registry import default_dialect
from refold.models import calibrate
from refold.models.calibrate import LOWEST, Anchor, Calibration
from refold.models.count import Units, counter
from refold.models.limits import find, provider_of, same_model
from refold.stores.shelf import Shelf
from refold.stores.store import Store

SAVED_AT_ONCE = 3
SAVE_EVERY = 20
"""After the first measurements; the rest are saved when the session ends."""

CALIBRATION = codec.decoder(Calibration)


class Meter:
    """Counts tokens for one model. Its calibration is stored for all conversations with the model."""

    def __init__(
        self,
        store: Store | None,
        config: Config,
        model: str | None,
        kind: Literal["auto", "estimate"] = "auto",
    ) -> None:
        found = find(model, config.models)
        self.model = model
        self.limits = found.limits
        self.is_known = found.id is not None
        self.provider = self.limits.provider or provider_of(model)
        self.dialect = default_dialect(self.provider)
        """The provider's own."""
        self.counter = Units(counter(model, self.provider, kind))
        """Its counts are stored; `estimate` converts them to the model's tokens."""
        self._notes = store if isinstance(store, Shelf) and model is not None else None
        self._name = f"calibration:{kind}:{model}"
        self._calibration: Calibration | None = None
        self._learned = 0
        self._unsaved = 0

    @property
    def calibration(self) -> Calibration:
        """Learned by this process or another."""
        if self._calibration is None:
            self._calibration = Calibration()
            with suppress(StoreError, msgspec.DecodeError):  # only a better guess
                note = self._notes.note(self._name) if self._notes else None
                self._calibration = CALIBRATION.decode(note or b"{}")
        return self._calibration

    def scale(self, measured: Measured | None) -> tuple[float, int]:
        """Model tokens per counted token, and the constant overhead of a request."""
        ratio, constant = calibrate.scale(self.counter.counter, self.calibration, self._anchor(measured))
        return ratio * self.counter.margin, constant

    def estimate(self, counted: int, measured: Measured | None) -> int:
        """Model tokens of a request with so many counted tokens; `measured` is the previous request."""
        tokens = self.counter.tokens(counted)
        return calibrate.estimate(tokens, self.counter.counter, self.calibration, self._anchor(measured))

    def separate(self, request: Mapping[str, Any]) -> int:
        """Counted tokens of system text and response format, which are apart from the messages."""
        text = request.get("system") or request.get("instructions")
        asked = request.get("response_format") or request.get("output_config")
        shape = asked or (request.get("text") or {}).get("format")
        return (self.counter.system(text) if text else 0) + self.counter.shape(shape)

    def extras(self, request: Mapping[str, Any]) -> int:
        """Counted tokens of everything besides the messages.

        Raises:
            SettingError: tools or system text do not have the shape that the API documents.
        """
        tools = request.get("tools")
        try:
            counted = self.counter.tools(tools, request.get("tool_choice")) if tools else 0
            return counted + self.separate(request)
        except (TypeError, ValueError, AttributeError, RecursionError) as error:
            problem = f"its tools or system text are not valid for the API: {error}"
            raise SettingError("request", problem) from error

    def learn(self, counted: int, reported: int, measured: Measured | None) -> None:
        """Calibrates with the provider's count of a request; `measured` is the previous request."""
        if reported > self.limits.window:
            return
        tokens = self.counter.tokens(counted)
        self._calibration = calibrate.update(self.calibration, tokens, reported, self._anchor(measured))
        self._learned += 1
        self._unsaved += 1
        if self._learned <= SAVED_AT_ONCE or self._unsaved >= SAVE_EVERY:
            self.save()

    def save(self) -> None:
        """Stores the calibration; if that fails, the next call tries again."""
        if self._notes and self._unsaved:
            with suppress(StoreError):
                self._notes.keep_note(self._name, msgspec.json.encode(self.calibration))
                self._unsaved = 0

    def _anchor(self, measured: Measured | None) -> Anchor | None:
        if measured is None or not measured.estimate or not same_model(measured.model, self.model):
            return None
        counted = self.counter.tokens(measured.estimate)
        is_likely = LOWEST * counted <= measured.input <= self.limits.window
        return Anchor(counted, measured.input) if is_likely else None


def extras_json(tools: Sequence[Any] | None, request: Mapping[str, Any]) -> bytes:
    """The fields of a request besides its messages.

    Raises:
        SettingError: they cannot be sent as JSON.
    """
    if not isinstance(tools, list | tuple | None):
        raise SettingError("tools", f"expected a list, got {brief_repr(tools)}")
    plain_tools = list(map(_plain, tools)) if tools is not None else request.get("tools")
    for name, value in (("tools", plain_tools), ("request", dict(request))):
        problem = json_problem(value)
        if problem and "surrogate" not in problem:
            raise SettingError(name, f"cannot be sent: it contains {problem.rstrip(',')}")
    return dumps({**request, "tools": plain_tools} if plain_tools is not None else dict(request))


def _plain(tool: Any) -> Any:
    if not hasattr(tool, "model_dump"):
        return tool
    try:
        return tool.model_dump(mode="json", exclude_unset=True)
    except Exception as error:  # whatever an SDK may raise
        raise SettingError("tools", f"{type(tool).__name__}.model_dump() failed: {error}") from error
