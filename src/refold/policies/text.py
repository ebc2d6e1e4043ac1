"""What policies ask of a text: its words, its exact values and its demands."""

import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from math import log2

from refold.core.lazy import regex
from refold.core.message import CompactionMarker, Message, Reasoning, Text, ToolCall, ToolResult

PLAIN = 1.0
"""Words with a lower score are common words, and left out of skeletons."""
MAX_WORD_CHARS = 300
"""A longer word is data, not a value."""
MANY = 12
"""If a text has more words of one shape, each of them counts less."""
RULE_CHARS = 2_000
SENTENCE_CHARS = 240

LETTERS = regex(r"[A-Za-z]+")
_DIGITS = regex(r"\d+")
_WORD = regex(r"""https?://[^\s"'`<>\\\])}]+|[^\s"'`<>()\[\]{},;|=\\]+""")
_DATE = regex(r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}")
_MONEY = regex(r"[$€£¥]\d")
_CAMEL = regex(r"[a-z][A-Z]|[A-Z]{2}[a-z]")
_DOTTED = regex(r"\w\.[A-Za-z_]\w*")
_NUMBER = regex(r"[-+]?[\d.,:]+(?:[eE][-+]?\d+)?(?:[-+]\d\d:\d\d)?%?")
_PROSE = regex(r"[^\W\d_]{3,}")
_STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        """
about above after again against all also although always among and another any anybody anyone
anything are around because been before being below between both but can cannot could did does doing
done down during each either else ever every everything few for from further get gets got had has
have having her here hers herself him himself his how however into its itself just let lets like
made make makes many may maybe might more most much must myself neither never nor not nothing now
off often once one only onto other others our ours out over own per please rather same she should
since some somebody someone something still such than that the their theirs them themselves then
there therefore these they thing things this those though through too under until upon use used uses
using very want wants was well were what whatever when where whether which while who whole whom
whose why will with within without would yes yet you your yours yourself
""",
    )
)
_DEMAND = regex(
    r"\b(?:must(?:n['’]t)?|never|always|make sure|ensure|should not|shouldn['’]t|shall not|may not|required"
    r"|not allowed|at most|at least|no more than|no less than|forbidden|prohibited|constraint"
    r"|under no circumstances|(?:you|we) (?:can['’]t|cannot)|reject(?:ed)?|rule[sd]? out|decided against"
    r"|(?:do|does)(?:n['’]t| not) (?:want|like|need)|please stop|stop (?:using|doing|adding)|no longer"
    r"|anything but|agreed|avoid|prefer|rather than|instead of|niemals|immer|nunca|siempre|jamais|toujours)\b"
    r"|(?:^[\W\d]*|[,;:.!?)–—-] |\(|\b(?:and|but|also|so|please|then|you|to) )"
    r"(?:do not|don['’]t|only|keep|use)\b"
    r"|必须|不要|禁止|切勿|务必|绝不|请勿",
    re.IGNORECASE | re.MULTILINE,
)
SENTENCES = regex(r"(?<=[.!?])(?<!\b\w\.\w\.)(?<!\bapprox\.)(?<!\b[DMS][rst]\.)(?<!\bMrs\.)\s+|(?<=[。！？])")
"""Between two sentences; not after initials and titles."""
_ENDED = (*".!?…:;{}。！？：；",)
_ITEM = regex(r"^(?:[-*•+–>]|\d+[.)])\s+")


def all_text(message: Message) -> str:
    """All text of a message, with calls and reasoning."""
    parts = list[str]()
    for part in message.parts:
        match part:
            case ToolCall(tool=tool, input=input):
                parts.append(f"{tool} {input}")
            case Text(text=text) | Reasoning(text=text) | ToolResult(output=str(text)):
                parts.append(text)
            case CompactionMarker(text=text):
                parts.append(text)
            case ToolResult(output=tuple(inner)):
                parts += [one.text for one in inner if isinstance(one, Text)]
            case _:
                pass
    return "\n".join(parts)


def words(text: str) -> list[str]:
    return list(map(_without_punctuation, _WORD.findall(text)))


def vocabulary(text: str) -> set[str]:
    return set(map(_without_punctuation, set(_WORD.findall(text))))


def _without_punctuation(word: str) -> str:
    return word.rstrip(".:!?*").lstrip("*#&!")


def clip(text: str, chars: int) -> str:
    """The beginning of a text, with … where it was cut."""
    return text if len(text) <= chars else f"{text[: chars - 1]}…"


def exactness(word: str) -> float:
    """From 0 for a common word to 3 for one that could not be guessed."""
    return _exactness(word) if 1 < len(word) <= MAX_WORD_CHARS else 0.0


@lru_cache(maxsize=1 << 13)
def _exactness(word: str) -> float:
    size = len(word)
    if "…" in word:
        return 0.0
    digits = any(map(str.isdigit, word))
    letters = any(map(str.isalpha, word))
    if _DATE.match(word):
        return 2.8
    if _MONEY.match(word):
        return 2.6
    if digits and (not letters or _NUMBER.fullmatch(word)):
        return _number(word)
    if not letters:
        return 0.0
    if "/" in word or "@" in word:
        return 3.0 if digits or "." in word or word.count("/") > 1 or word[0] == "/" else 1.6
    if digits:
        return 3.0 if size > 3 else 1.4
    if "_" in word.strip("_"):
        return 2.5
    if _CAMEL.search(word):
        return 2.3
    if _DOTTED.search(word):
        return 2.4
    if word.isupper() and size > 2:
        return 1.6
    if "-" in word and size > 4:
        return 1.5
    return 0.5 if word[0].isupper() else 0.0


def _number(word: str) -> float:
    count = sum(map(str.isdigit, word))
    return 2.0 if count > 3 or "." in word else 1.5 if count == 3 else 0.3


def exact_values(text: str) -> dict[str, float]:
    """The words that could not be guessed, in their order, with their scores; repeated words score higher."""
    found = dict[str, float]()
    for raw, times in Counter(_WORD.findall(text)).items():
        word = _without_punctuation(raw)
        value = exactness(word)
        if value >= PLAIN:
            value += min(0.9, 0.3 * log2(times))
            found[word] = max(found.get(word, 0.0), value)
    shapes = Counter(map(shape, found))
    for word in found:  # of very many words of one shape, each is less likely to matter
        found[word] -= 0.15 * log2(max(1.0, shapes[shape(word)] / MANY))
    return found


def shape(word: str) -> str:
    """The pattern of letters and digits, the same for 14:00 and 09:30, or HAT078 and HAT118."""
    return LETTERS.sub("a", _DIGITS.sub("9", word))


def exact_words(text: str) -> frozenset[str]:
    """The words of a text that could not be guessed."""
    return frozenset(word for word in vocabulary(text) if exactness(word) >= PLAIN)


def plain_words(text: str) -> frozenset[str]:
    """The words of prose in lower case, without stop words and plural s."""
    found = set(_PROSE.findall(text.lower())) - _STOP_WORDS
    return frozenset(word.removesuffix("s") for word in found)


def demands(text: str) -> Iterator[str]:
    """Sentences that demand or forbid something, each on one line with the list that it introduces."""
    listed = ""
    for line in _unwrapped(text):
        bare = _ITEM.sub("", line)
        flat = line.replace("\n", " ")
        is_item = bare != line
        found = [*_demanding(bare)]
        if listed and not found and (is_item or _announces(listed)):
            listed = clip(f"{listed} {flat}", RULE_CHARS)
            continue
        if listed and not is_item:
            yield listed
            listed = ""
        if found and not listed and _announces(flat) and flat.endswith(found[-1]):
            listed = found.pop()
        yield from found
    if listed:
        yield listed


def is_demand(sentence: str) -> bool:
    """True if a sentence demands or forbids something."""
    return _DEMAND.search(sentence) is not None


def _demanding(line: str) -> Iterator[str]:
    for sentence in SENTENCES.split(line):
        flat = sentence.replace("\n", " ").strip()
        if len(flat) > 4 and (is_demand(flat) or is_demand(sentence)):
            yield flat


def _announces(line: str) -> bool:
    return line.rstrip("*_").endswith((":", "："))


def _unwrapped(text: str) -> Iterator[str]:
    """The lines of a text; a line is joined with the next one if its last sentence goes on there."""
    lines: list[str] = []
    size = 0
    for line in map(str.strip, (*text.splitlines(), "")):
        goes_on = line[:1].islower() and size < SENTENCE_CHARS
        if lines and (not goes_on or lines[-1].endswith(_ENDED)):
            yield "\n".join(lines)
            lines = []
            size = 0
        if line:
            lines.append(line)
            *ended, last = SENTENCES.split(line)
            size = len(last) + (0 if ended else size)
