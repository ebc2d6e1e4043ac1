"""Is a value there? Plain search for the text of it, and of what stands beside it.

Who looks for values to ask about (`probes.py`) and who keeps them (`refold.policies`) have rules of their
own: nothing of theirs is used here.
"""

NEAR = 200
"""Characters before and after a value, and at the beginning of its line, where its key may stand."""


def has(text: str, value: str) -> bool:
    """Whether it stands there, to the letter."""
    return value in text


def has_beside(text: str, value: str, key: str) -> bool:
    """Whether it stands there with its key near it. A key that begins a line is near all that is on it."""
    wanted, at = _words(key), text.find(value)
    while at >= 0:
        line = text.rfind("\n", 0, at) + 1
        before, after = text[max(0, at - NEAR) : at], text[at + len(value) : at + len(value) + NEAR]
        if any(wanted in _words(part) for part in (text[line : min(line + NEAR, at)], before, after)):
            return True
        at = text.find(value, at + 1)
    return False


def _words(text: str) -> str:
    """Letters and digits in lower case, so that `Order-ID` is the label of `order_id`."""
    plain = "".join(char if char.isalnum() else " " for char in text.lower())
    return f" {' '.join(plain.split())} "
