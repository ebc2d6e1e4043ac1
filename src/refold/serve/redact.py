"""Nothing that looks like a secret leaves in a log, an event or an error."""

import re
from collections.abc import Iterable

HIDDEN = "***"
_NAMES = "authorization|x-api-key|x-refold-token|api[-_]?key|access[-_]?key|password|passwd|secret|token"
_PATTERNS = (
    r"(?P<scheme>://[^\s/@:\"']*:)[^\s/@\"']+(?=@)",  # the password of a URL
    r"(?i:(?P<bearer>\b(?:bearer|basic)\s+)[\w.~+/=-]{6,})",
    r"(?P<known>\b(?:sk|pk|rk|rft|ghp|gho|ghs|ghu|github_pat|glpat|hf|xox[abeprs]|AIza|AKIA|ASIA)[-_]?)"
    r"(?=[\w-]{0,99}\d)[\w-]{12,}",
    r"\beyJ[\w-]{8,999}\.[\w-]{8,}(?:\.[\w-]*)?",  # a signed token
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*",
    rf"(?i:(?P<named>(?:{_NAMES})\\*[\"']?\s*[:=]\s*(?:bearer\s+|basic\s+)?\\*[\"']?)[^\s\"'\\,;&}})]{{3,}})",
)
_SECRET = re.compile("|".join(_PATTERNS))
"""Takes time in proportion to the text, whatever is in it."""


def redacted(text: str, known: Iterable[str] = ()) -> str:
    """The text with `***` for what looks like a key, a token or a password, and for all that is `known`.

    >>> redacted("Authorization: Bearer sk-ant-0123456789abcdef at https://me:word@host")
    'Authorization: Bearer *** at https://me:***@host'
    """
    for secret in known:
        text = text.replace(secret, HIDDEN)
    return _SECRET.sub(_hidden, text)


def _hidden(found: re.Match[str]) -> str:
    return f"{found[found.lastgroup] if found.lastgroup else ''}{HIDDEN}"
