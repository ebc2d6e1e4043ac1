"""Hides secrets in logs, events and errors."""

import re
from collections.abc import Iterable

HIDDEN = "***"
_NAMES = "authorization|x-api-key|x-refold-token|api[-_]?key|access[-_]?key|password|passwd|secret|token"
_PATTERNS = (
    r"(?P<scheme>://[^\s/@:\"']*:)[^\s/@\"']+(?=@)",  # the password of a URL
    r"(?i:(?P<bearer>\b(?:bearer|basic)\s+)[\w.~+/=-]{6,})",
    r"(?P<known>\b(?:sk|pk|rk|rft|ghp|gho|ghs|ghu|github_pat|glpat|hf|xox[abeprs]|AIza|AKIA|ASIA)[-_]?)"
    r"(?=[\w-]{0,99}\d)[\w-]{12,}",
    r"\beyJ[\w-]{8,999}\.[\w-]{8,}(?:\.[\w-]*)?",  # a JSON web token
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*",
    rf"(?i:(?P<named>(?:{_NAMES})\\*[\"']?\s*[:=]\s*(?:bearer\s+|basic\s+)?\\*[\"']?)[^\s\"'\\,;&}})]{{3,}})",
)
_SECRET = re.compile("|".join(_PATTERNS))
"""Takes linear time on any text."""


def redacted(text: str, secrets: Iterable[str] = ()) -> str:
    """The text with `***` for `secrets` and for whatever looks like a key, a token or a password.

    >>> redacted("Authorization: Bearer sk-ant-0123456789abcdef at https://me:word@host")
    'Authorization: Bearer *** at https://me:***@host'
    """
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return _SECRET.sub(_hidden, text)


def _hidden(found: re.Match[str]) -> str:
    before = found[found.lastgroup] if found.lastgroup else ""
    return f"{before}{HIDDEN}"
