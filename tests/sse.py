"""Recorded streams: server-sent events as their JSON."""

from typing import Any

from refold.core.codec import loads


def events(text: str) -> list[Any]:
    """The JSON of all events, without pings, end marks and an incomplete last event."""
    found: list[Any] = []
    blocks = text.replace("\r\n", "\n").split("\n\n")
    for n, block in enumerate(blocks):
        data = "\n".join(line[5:] for line in block.split("\n") if line.startswith("data:")).strip()
        if not data or data == "[DONE]":
            continue
        try:
            found.append(loads(data.encode()))
        except ValueError:
            assert n == len(blocks) - 1
    return [event for event in found if event.get("type") != "ping"]
