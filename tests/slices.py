"""Random parts of random texts, read from a store: `python tests/slices.py --cases 1000000` takes minutes."""

import argparse
import json
import sys
import time
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import refold
from refold.core.errors import CannotExpandError
from refold.core.slices import cut, slice_of

WORDS = ("alpha", "beta,", "gam|ma", '"q"', "[x]", "{", "漢字", "é", "😀", "\t", "\r", "12.5", "#7", "", " ")
TEXTS = 2_000
"""How many are stored; each is asked for again and again."""


def text_of(rng: Random) -> tuple[str, list[object] | None]:
    """A text, and its items where it is a list of some."""
    lines = [" ".join(rng.choices(WORDS, k=rng.randrange(8))) for _ in range(rng.randrange(1, 40))]
    if rng.random() < 0.7:
        return "\n".join(lines), None
    items: list[object] = [rng.choice([n, line, {"k": line}, [line, n]]) for n, line in enumerate(lines)]
    whole = items if rng.random() < 0.5 else {"total": len(items), "none": [], "rows": items}
    return json.dumps(whole, indent=rng.choice([None, 1, 2]), ensure_ascii=rng.random() < 0.5), items


def part_of(rng: Random, text: str, items: list[object] | None) -> dict[str, Any]:
    way = rng.choice(["lines", "chars", "match", *(["items"] if items else [])])
    first, many = rng.randrange(-3, 60), rng.randrange(0, 60)
    if way == "match":
        start = rng.randrange(len(text) + 1)
        return {"match": text[start : start + rng.randrange(1, 9)].strip("/") or "a"}
    if way == "chars":
        return {"chars": (first * 5, rng.choice([None, first + many, -many]))}
    return {way: (max(1, first), rng.choice([None, max(1, first) + many]))}


def read(text: str, part: dict[str, Any]) -> str | None:
    try:
        return cut(text, slice_of(part)).shown
    except CannotExpandError:
        return None


def is_right(text: str, items: list[object] | None, part: dict[str, Any], shown: str | None) -> bool:
    """By Python's own slices; None is that there is no such part."""
    ((way, wanted),) = part.items()
    lines = text.split("\n")
    if way == "match":
        if shown is None:
            return wanted.lower() not in text.lower()
        if "\n" in wanted or len(text) > 2_000:
            return all(wanted.lower() in shown.lower() for _ in shown)
        return shown.split("\n") == [line for line in lines if wanted.lower() in line.lower()]
    start, end = wanted
    if way == "chars":
        return (text[start:end] or None) == shown
    if way == "lines":
        return ("\n".join(lines[start - 1 : end]) if start <= len(lines) else None) == shown
    assert items is not None
    return (json.loads(f"[{shown}]") if shown is not None else []) == items[start - 1 : end]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, begun, none = Random(args.seed), time.monotonic(), 0
    texts = [text_of(rng) for _ in range(TEXTS)]
    with TemporaryDirectory() as folder:
        url = f"sqlite:///{Path(folder)}/slices.db?synchronous=normal"
        with refold.open("slices", store=url) as chat:
            for n in range(0, TEXTS, 100):
                chat.append([{"role": "user", "content": text or " "} for text, _ in texts[n : n + 100]])
        with refold.open("slices", store=url) as chat:
            for n in range(args.cases):
                at = rng.randrange(TEXTS)
                text, items = texts[at][0] or " ", texts[at][1]
                part = part_of(rng, text, items)
                try:
                    shown = chat.expand(at, **part)
                except CannotExpandError:
                    shown, none = None, none + 1
                if not is_right(text, items, part, shown):
                    sys.exit(f"seed {args.seed}, case {n}: {part} of {text!r} gave {shown!r}")
                if n % 20_000 == 0:
                    print(f"\r{n:,} of {args.cases:,}", end="", file=sys.stderr, flush=True)
    print(f"\r{args.cases:,} parts equal the slice of the original ({none:,} of them none), ", end="")
    print(f"{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
