"""Random parts of random texts, held against slices by Python: `python tests/slices.py --cases 1000000`."""

import argparse
import json
import sys
import time
from random import Random

from refold.core.errors import CannotExpandError
from refold.core.slices import Slice, cut, slice_of

WORDS = ("alpha", "beta,", "gam|ma", '"q"', "[x]", "{", "漢字", "é", "😀", "\t", "\r", "12.5", "#7", "", " ")


def case(seed: int, text: str | None = None) -> tuple[str, Slice, object]:
    """A text, a part of it, and what that is: a list of items where the text is one, else None."""
    rng = Random(seed)
    items: list[object] | None = None
    if text is None:
        lines = [" ".join(rng.choices(WORDS, k=rng.randrange(8))) for _ in range(rng.randrange(1, 40))]
        text = "\n".join(lines)
        if rng.random() < 0.3:
            items = [rng.choice([n, line, {"k": line}, [line, n]]) for n, line in enumerate(lines)]
            indent = rng.choice([None, 1, 2])
            whole = items if rng.random() < 0.5 else {"total": len(items), "none": [], "rows": items}
            text = json.dumps(whole, indent=indent, ensure_ascii=rng.random() < 0.5)
    way = rng.choice(["lines", "chars", "match", *(["items"] if items else [])])
    first, many = rng.randrange(-3, 60), rng.randrange(0, 60)
    if way == "match":
        start = rng.randrange(len(text) + 1)
        return text, Slice("match", pattern=text[start : start + rng.randrange(1, 9)] or "a"), items
    if way == "chars":
        end = rng.choice([None, first + many, -many])
        return text, slice_of({"chars": (first * 5, end)}), items
    return text, slice_of({way: (max(1, first), rng.choice([None, max(1, first) + many]))}), items


def equals_its_slice(text: str, part: Slice, items: object) -> bool:
    start, end = part.range
    lines = text.split("\n")
    try:
        shown = cut(text, part).shown
    except CannotExpandError:
        missing = {
            "lines": start > len(lines),
            "chars": not text[start:end],
            "items": isinstance(items, list) and start > len(items),
            "match": part.pattern.lower() not in text.lower(),
        }
        return missing[part.way]
    if part.way == "lines":
        return shown == "\n".join(lines[start - 1 : end])
    if part.way == "chars":
        return shown == text[start:end]
    if part.way == "items":
        assert isinstance(items, list)
        return bool(json.loads(f"[{shown}]") == items[start - 1 : end])
    if "\n" in part.pattern:
        return part.pattern.lower() in shown.lower()
    if len(text) > 2_000:
        return all(part.pattern.lower() in piece.lower() for piece in shown.split("\n"))
    return shown.split("\n") == [line for line in lines if part.pattern.lower() in line.lower()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    begun = time.monotonic()
    for n in range(args.cases):
        one = case(args.seed + n)
        if not equals_its_slice(*one):
            sys.exit(f"seed {args.seed + n}: {one!r}")
        if n % 50_000 == 0:
            print(f"\r{n:,} of {args.cases:,}", end="", file=sys.stderr, flush=True)
    print(f"\r{args.cases:,} parts equal the slice of their text, {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
