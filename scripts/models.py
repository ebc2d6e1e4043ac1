"""Writes src/refold/models/models.json: what genai-prices knows, and models-corrections.yaml on top.

    .venv/bin/pip install genai-prices && .venv/bin/python scripts/models.py

A model whose window or longest answer nobody has looked up is left out, and named.
"""

from collections.abc import Iterable, Iterator
from datetime import date
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import yaml
from genai_prices import data
from genai_prices.types import ClauseEquals, ClauseOr, ModelInfo, ModelPrice, StartDateConstraint

from refold.models.limits import ModelLimits, ModelTable, parts, provider_of

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "src" / "refold" / "models" / "models.json"
SOURCE = f"genai-prices {version('genai-prices')}"
PROVIDERS = {
    "anthropic": "anthropic",
    "deepseek": "deepseek",
    "google": "google",
    "meta": "meta",
    "mistral": "mistral",
    "openai": "openai",
    "x-ai": "xai",
}
PRICES = {
    "input": "input_mtok",
    "cache_read": "cache_read_mtok",
    "cache_write": "cache_write_mtok",
    "output": "output_mtok",
}

Entry: TypeAlias = dict[str, Any]


def build(day: date) -> tuple[ModelTable, list[str]]:
    """The table with the prices of that day, and the names of models that lack something."""
    ours = yaml.safe_load((ROOT / "scripts" / "models-corrections.yaml").read_text("utf-8"))
    models, aliases = _taken(ours, day)
    for new, known in ours["like"].items():
        models[new] = {**models[known], "flags": []}
    for correction in ours["corrections"]:
        _correct(models, correction)
    whole = {
        id: msgspec.convert(_settled(entry), ModelLimits)
        for id, entry in sorted(models.items())
        if "window" in entry and "max_output" in entry
    }
    needed = dict(sorted(_needed([*reversed(aliases.items()), *ours["aliases"].items()], whole)))
    return ModelTable(str(day), SOURCE, whole, needed), sorted(models.keys() - whole.keys())


def text(table: ModelTable) -> str:
    """JSON with a model a line."""
    models = ",\n".join(f"{_json(id)}:{_json(_compact(entry))}" for id, entry in table.models.items())
    aliases = ",\n".join(f"{_json(name)}:{_json(id)}" for name, id in table.aliases.items())
    head = f'"date":{_json(table.date)},"source":{_json(table.source)}'
    return f'{{{head},\n"models":{{\n{models}\n}},\n"aliases":{{\n{aliases}\n}}}}\n'


def _taken(ours: Entry, day: date) -> tuple[dict[str, Entry], dict[str, str]]:
    """What the makers themselves offer; for open models, what one host does."""
    models: dict[str, Entry] = {}
    aliases: dict[str, str] = {}
    known = {provider.id: provider.models for provider in data.providers}
    for source, provider in PROVIDERS.items():
        names = {model.id for model in known[source]}
        for model in known[source]:
            if provider_of(model.id) != provider or _is_any(model.id, ours["leave_out"]):
                continue
            id = ours["rename"].get(model.id) or _plain(model.id, names)
            models[id] = _entry(model, provider, day)
            aliases |= {name: id for name in _equals(model.match) if "/" not in name}
    hosts = {model.id: model for model in known["openrouter"]}
    for provider, hosted in ours["hosted"].items():
        models |= {id: _entry(hosts[there], provider, day) for id, there in hosted.items()}
    return models, aliases


def _is_any(id: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(id, pattern) for pattern in patterns)


def _plain(id: str, names: Iterable[str]) -> str:
    """`gemini-3.1-pro-preview` is found under `gemini-3.1-pro`, and still will be when it is out."""
    for ending in ("-instruct", "-it", "-latest", "-preview"):
        if id.endswith(ending) and id.removesuffix(ending) not in names:
            return id.removesuffix(ending)
    return id


def _entry(model: ModelInfo, provider: str, day: date) -> Entry:
    prices = _prices(model, day)
    entry: Entry = {"provider": provider, "flags": []}
    if model.context_window:
        entry["window"] = model.context_window
    for name, theirs in PRICES.items():
        price = getattr(prices, theirs)
        if price is not None:
            entry[name] = float(getattr(price, "base", price))
    return entry


def _prices(model: ModelInfo, day: date) -> ModelPrice:
    """Those of the day, outside of peak hours."""
    if isinstance(model.prices, ModelPrice):
        return model.prices
    return [
        price.prices
        for price in model.prices
        if price.constraint is None
        or (isinstance(price.constraint, StartDateConstraint) and price.constraint.start_date <= day)
    ][-1]


def _equals(clause: object) -> Iterator[str]:
    match clause:
        case ClauseEquals(equals=name):
            yield name
        case ClauseOr(or_=clauses):
            for each in clauses:
                yield from _equals(each)


def _correct(models: dict[str, Entry], correction: Entry) -> None:
    for pattern in correction["models"]:
        meant = [id for id in models if fnmatchcase(id, pattern)]
        if not meant:
            raise SystemExit(f"models-corrections.yaml: {pattern} matches nothing")
        for id in meant:
            entry = models[id]
            seen = max(str(correction["date"]), entry.get("date", ""))
            entry |= {name: correction[name] for name in ModelLimits.__struct_fields__ if name in correction}
            entry["date"] = seen
            entry["flags"] = sorted({*entry["flags"], *correction.get("add_flags", ())})


def _settled(entry: Entry) -> Entry:
    """With a number for `max_output: window` and for `max_input: rest`."""
    if entry["max_output"] == "window":
        entry = {**entry, "max_output": entry["window"]}
    if entry.get("max_input") == "rest":
        entry = {**entry, "max_input": entry["window"] - entry["max_output"]}
    return entry


def _needed(aliases: Iterable[tuple[str, str]], models: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The names that do not begin with the name of their model, or with one that is needed already."""
    index = {parts(id): id for id in models}
    known = {*index.values()}
    latest = {parts(name): (name, id) for name, id in aliases if id in known}
    for whole in sorted(latest.keys() - index.keys(), key=lambda whole: (len(whole), whole)):
        name, id = latest[whole]
        begins = [index[whole[:end]] for end in range(1, len(whole)) if whole[:end] in index]
        if begins[-1:] != [id]:
            index[whole] = id
            yield name, id


def _compact(entry: ModelLimits) -> Entry:
    """Without what is not known, and 3 for 3.0."""
    fields = msgspec.structs.asdict(entry).items()
    kept = {name: value for name, value in fields if value not in (None, ())}
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in kept.items()
    }


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def main() -> None:
    table, lacking = build(date.today())
    TABLE.write_text(text(table), "utf-8")
    print(f"{len(table.models)} models and {len(table.aliases)} other names, {TABLE.stat().st_size:,} bytes")
    print("left out, for want of a window or a longest answer:", *lacking, sep="\n  ")


if __name__ == "__main__":
    main()
