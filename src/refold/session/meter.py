"""How much a model takes: its limits, its tokens, and what its provider's own counts have taught."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

import msgspec

from refold.config.config import Config
from refold.core import codec
from refold.core.errors import StoreError
from refold.core.live import MeasuredHead
from refold.models import calibrate
from refold.models.calibrate import LOWEST, Anchor, Calibration
from refold.models.count import Units, counter
from refold.models.limits import find, provider_of, same_model
from refold.stores.store import Notes, Store

OFTEN, SELDOM = 3, 20
"""So many measurements are kept at once, and then only one of so many: the rest when a session ends."""

CALIBRATION = codec.decoder(Calibration)


class Meter:
    """Of one model. What it learns is kept in the store, for all conversations with the model."""

    def __init__(
        self,
        store: Store | None,
        config: Config,
        model: str | None,
        kind: Literal["auto", "estimate"] = "auto",
    ) -> None:
        found = find(model, config.models)
        self.model, self.limits, self.is_known = model, found.limits, found.id is not None
        self.provider = self.limits.provider or provider_of(model)
        self.counter = Units(counter(model, self.provider, kind))
        """Counts as they are stored; `estimate` makes the model's tokens of them."""
        self._notes = store if isinstance(store, Notes) and model is not None else None
        self._name = f"calibration:{kind}:{model}"
        self._calibration: Calibration | None = None
        self._learned = self._unsaved = 0

    @property
    def dialect(self) -> str:
        """The one that its provider speaks."""
        return "anthropic" if self.provider == "anthropic" else "openai-chat"

    @property
    def calibration(self) -> Calibration:
        """What was learned so far, by this process or another."""
        if self._calibration is None:
            self._calibration = Calibration()
            with suppress(StoreError, msgspec.DecodeError):  # it is no more than a better guess
                note = self._notes.note(self._name) if self._notes else None
                self._calibration = CALIBRATION.decode(note or b"{}")
        return self._calibration

    def scale(self, gauge: MeasuredHead | None) -> tuple[float, int]:
        """How many of its tokens one counted token is, and what every request takes besides."""
        ratio, constant = calibrate.scale(self.counter.counter, self.calibration, self._anchor(gauge))
        return ratio * self.counter.margin, constant

    def estimate(self, counted: int, gauge: MeasuredHead | None) -> int:
        """What a request takes of which so much was counted; `gauge` measured the one before it."""
        tokens = self.counter.tokens(counted)
        return calibrate.estimate(tokens, self.counter.counter, self.calibration, self._anchor(gauge))

    def apart(self, request: Mapping[str, Any]) -> int:
        """What is counted for system text and the shape of the answer, which stand beside the messages."""
        text = request.get("system") or request.get("instructions")
        asked = request.get("response_format") or request.get("output_config")
        shape = asked or (request.get("text") or {}).get("format")
        return (self.counter.system(text) if text else 0) + self.counter.shape(shape)

    def learn(self, counted: int, reported: int, gauge: MeasuredHead | None) -> None:
        """The provider's own count of a request; `gauge` measured the one before it."""
        if reported > self.limits.window:
            return
        tokens = self.counter.tokens(counted)
        self._calibration = calibrate.update(self.calibration, tokens, reported, self._anchor(gauge))
        self._learned += 1
        self._unsaved += 1
        if self._learned <= OFTEN or self._unsaved >= SELDOM:
            self.save()

    def save(self) -> None:
        """Keeps what was learned; where that cannot be kept now, it is next time."""
        if self._notes and self._unsaved:
            with suppress(StoreError):
                self._notes.keep_note(self._name, msgspec.json.encode(self.calibration))
                self._unsaved = 0

    def _anchor(self, gauge: MeasuredHead | None) -> Anchor | None:
        if gauge is None or not gauge.estimate or not same_model(gauge.model, self.model):
            return None
        counted = self.counter.tokens(gauge.estimate)
        is_likely = LOWEST * counted <= gauge.input <= self.limits.window
        return Anchor(counted, gauge.input) if is_likely else None
