"""Passwords that URLs do not like, and what of them got out."""

SEPARATORS = "@/#:?%&= [],;"
ODD_PASSWORDS = [f"XQ7{one}JW9{other}KZ4" for one in SEPARATORS for other in "@/"]
ODD_PASSWORDS += ["8431?JW9=KZ4", "XQ7@JW9", "XQ7&JW9", "XQ7℀JW9", "XQ7?JW9=9@KZ4", "XQ7%zzJW9"]
"""In pieces that no sentence has."""


def shown_parts(password: str, error: BaseException | None) -> set[str]:
    """Pieces of a password, three characters or longer, in what an error and its causes say."""
    parts, found = {password[n : n + 3] for n in range(len(password) - 2)}, set[str]()
    while error is not None:
        found |= {part for part in parts if part in str(error)}
        error = error.__cause__
    return found
