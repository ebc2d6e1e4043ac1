"""Views by the million: every history in every target and window, by all rungs, is a valid request that fits.

    python tests/views.py --views 1000000 --jobs 2 --state views.json

Goes on where it was stopped; a seed that fails is printed, and `--seed N` looks at that one alone.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import refold
from histories import DIALECTS, steps
from refold.core.errors import OverBudgetError
from refold.dialects.rules.targets import check_request
from refold.session.session import Session
from refold.stores.memory import MemoryStore
from refold.stores.store import Key
from refold.testing.scribe import Scribe

TARGETS = ("openai-chat", "openai-responses", "anthropic")
WINDOWS = (2_000, 4_000, 8_000, 32_000, 200_000)
MODELS = {"claude-sonnet-4-5": (), "claude-opus-4-8": ("system-inside", "no-prefill", "binds-thinking")}


def ladder(dice: random.Random) -> dict[str, Any]:
    """Settings of all rungs; every third history has the defaults."""
    if dice.random() < 1 / 3:
        return {}
    prune: dict[str, Any] = {"protect": dice.choice((0, 200, 2_000)), "minimum": dice.choice((0, 500))}
    prune |= {
        "keep_turns": dice.randrange(3),
        "keep_steps": dice.randrange(4),
        "length": dice.choice((0, 600)),
    }
    compact: dict[str, Any] = {
        "strategy": dice.choice(("summarize", "sliding-window", "hierarchical")),
        "keep_recent": dice.choice((0, 2, 10)),
        "prune": dice.choice(("off", prune, prune)),
        "cap": dice.choice(("off", {"share": 0.02}, {"share": 0.25})),
    }
    if dice.random() < 0.2:
        compact["message_threshold"] = dice.choice((3, 10))
    rules = {
        tool: {"expire": _rule(dice)} for tool in ("read", "bash", "search", "patch") if dice.random() < 0.5
    }
    return {
        "compact": compact,
        "dedupe": dice.choice(("off", {"similarity": 0.5}, {"similarity": 0.9})),
        "tools": rules,
        "handles": dice.choice(("on", "on", "off")),
    }


def _rule(dice: random.Random) -> dict[str, Any]:
    return {
        "after_steps": dice.randrange(4),
        "mode": dice.choice(("none", "remove", "compact", "compact")),
        "compact_mode": dice.choice(("first-n-chars", "skeleton", "ai-summary")),
        "length": dice.choice((0, 40, 500)),
        "strategy": dice.choice(("age", "relevance")),
    }


def look(seed: int) -> Counter[str]:
    """All views of one history. What came out, by kind; a violation has the seed in its name."""
    dice = random.Random(seed)
    dialect = dice.choice([*DIALECTS])
    messages = DIALECTS[dialect](steps(dice))
    flags = dice.choice([*MODELS.values()])
    store, key, seen = MemoryStore(), Key("default", "h"), Counter[str]()
    limits: dict[str, Any] = {
        f"w{window}": {"window": window, "max_output": window // 8, "flags": list(flags)}
        for window in WINDOWS
    }
    config = refold.config.load_config({"models": limits, "agents": {"default": ladder(dice)}})
    half = dice.randrange(len(messages) + 1)
    scribe = Scribe() if dice.random() < 1 / 3 else None
    writer = Session(store, key, config=config)
    for start, stop in ((0, half), (half, len(messages))):
        if dice.random() < 0.3:
            for message in messages[start:stop]:
                writer.append(message, dialect=dialect)
        elif messages[start:stop]:
            writer.append(messages[start:stop], dialect=dialect)
        for window in WINDOWS if stop == len(messages) else WINDOWS[:2]:
            for target in TARGETS:
                rest = {"config": config, "view": f"{target}-{window}", "summarizer": scribe}
                view = Session(store, key, model=f"w{window}", **rest)
                seen[_fit(view, target, window, flags, seed)] += 1
    return seen


def _fit(session: Session, target: str, window: int, flags: tuple[str, ...], seed: int) -> str:
    try:
        fitted = session.fit(dialect=target)
    except OverBudgetError:
        return f"over budget ({window:,})"
    if not fitted.messages:
        return "empty"
    if fitted.report.tokens.final > window:
        return f"seed {seed}: {target} does not fit {window}"
    known = {"no_prefill": "no-prefill" in flags, "system_inside": "system-inside" in flags}
    broken = check_request(target, fitted.request, **known)
    return f"seed {seed}: {target} {window} {broken[0]}" if broken else "valid"


def many(seeds: range) -> Counter[str]:
    seen = Counter[str]()
    for seed in seeds:
        try:
            seen += look(seed)
        except Exception as error:  # told with its seed
            seen[f"seed {seed}: {type(error).__name__}: {error}"] += 1
    return seen


def run(views: int, jobs: int, state: Path | None, progress: bool = True) -> Counter[str]:
    known = json.loads(state.read_text()) if state and state.exists() else {"next": 0, "seen": {}}
    seen, seed, begun = Counter[str](known["seen"]), known["next"], time.monotonic()
    size = 50
    with ProcessPoolExecutor(jobs) as pool:
        while sum(seen.values()) < views:
            batches = [range(seed + n * size, seed + (n + 1) * size) for n in range(jobs * 2)]
            for found in pool.map(many, batches):
                seen += found
            seed = batches[-1].stop
            if state:
                state.write_text(json.dumps({"next": seed, "seen": dict(seen)}))
            if progress:
                rate = sum(seen.values()) / (time.monotonic() - begun)
                print(
                    f"\r{sum(seen.values()):,} views, {seed:,} histories, {rate:,.0f}/s ",
                    end="",
                    file=sys.stderr,
                )
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--views", type=int, default=1_000_000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--state", type=Path)
    parser.add_argument("--seed", type=int)
    asked = parser.parse_args()
    seen = look(asked.seed) if asked.seed is not None else run(asked.views, asked.jobs, asked.state)
    print()
    for what, count in sorted(seen.items(), key=lambda pair: -pair[1]):
        print(f"{count:>10,}  {what}")
    sys.exit(any(what.startswith("seed") for what in seen))


if __name__ == "__main__":
    main()
