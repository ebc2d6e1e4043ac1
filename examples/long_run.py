"""An agent that would have outgrown its window early goes on to step 200.

The model is scripted, so that this runs without a key or a network; the tool and the files are real.
"""

import json
import sys
from pathlib import Path

import refold

ROOT = Path(__file__).resolve().parent.parent
STORE = "sqlite:///long-run.db"
CONFIG = {"models": {"scripted": {"window": 8_000, "max_output": 1_000}}}


def model(step: int, files: list[Path]) -> dict:
    """What a model would answer: read the next file, and at the end say so."""
    if step > 200:
        return {"role": "assistant", "content": "I have read everything."}
    call = {"name": "read_file", "arguments": json.dumps({"path": str(files[step % len(files)])})}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": f"call_{step}", "type": "function", "function": call}],
    }


def read_file(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8", errors="replace")[:2_000]


def main() -> None:
    files = sorted(path.relative_to(ROOT) for path in ROOT.rglob("src/**/*.py"))
    with refold.open("long-run", store=STORE, model="scripted", config=CONFIG) as chat:
        chat.clear()
        chat.append({"role": "system", "content": "You review code."})
        chat.append({"role": "user", "content": "Read every file and tell me what is wrong."})
        most = step = 0
        while True:
            step += 1
            fitted = chat.fit()  # before every model call
            most = max(most, fitted.report.tokens.final)
            reply = model(step, files)
            chat.append(reply)
            if not reply.get("tool_calls"):
                break
            call = reply["tool_calls"][0]
            result = read_file(**json.loads(call["function"]["arguments"]))
            chat.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            if sys.stderr.isatty():
                print(f"\rstep {step}: {fitted.report.tokens.final:,} tokens sent", end="", file=sys.stderr)
        window, said = fitted.report.limit, chat.get_all()
        total = sum(stored.tokens for stored in said)
        over = next(s.step for s in said if sum(x.tokens for x in said[: s.index + 1]) > window)
        print(f"\n{step} steps, {total:,} tokens said, never more than {most:,} sent; nothing is lost.")
        print(f"Without refold, the window of {window:,} would have been full at step {over}.")
    print(f"Look at it:   .venv/bin/refold show long-run --store {STORE}")
    print(f"Ask why:      .venv/bin/refold explain long-run 2 --store {STORE}")
    print(f"Take it back: .venv/bin/refold undo long-run --store {STORE}")


if __name__ == "__main__":
    main()
