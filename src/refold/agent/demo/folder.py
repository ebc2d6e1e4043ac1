"""A folder and the tools by which an agent reads it: only read, and of what is vast only a part.

Left out are hidden files, links, what holds keys, and folders that tools fill (`node_modules` and the like).
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from refold.core.errors import NotFoundError

MOST_FILES, MOST_FOLDERS, MOST_ENTRIES = 2_000, 2_000, 20_000
"""How many files are known, how many folders are looked into, and at how many names in each."""
MOST_BYTES = 1_000_000
"""Of one file."""
MOST_SEARCHED, MOST_HITS = 4_000_000, 30
"""Bytes that one search reads, and lines that it gives."""
LONGEST_LINE = 400
"""Characters; more of a line is of no use to anybody."""
PAGE = 25
"""Files in one listing."""
SKIPPED = frozenset(
    {"__pycache__", "bower_components", "build", "dist", "env", "node_modules", "site-packages"}
    | {"target", "vendor", "venv"}
)
SECRET = (".key", ".pem", ".p12", ".pfx", ".jks", ".kdbx")
SNIFFED = 4_096
Kind: TypeAlias = Literal["text", "binary", "empty", "unreadable"]
"""What says that it is empty is never opened: some files of the system would keep the reader for ever."""


class File(msgspec.Struct, frozen=True):
    path: str
    """From the folder on, with / on every system."""
    place: Path
    size: int
    kind: Kind


class Folder:
    """What is in a folder, looked at once."""

    def __init__(self, root: Path) -> None:
        """
        Raises:
            NotFoundError: there is no such folder.
        """
        if not root.is_dir():
            raise NotFoundError(f"{root} is no folder; name one that is there, or none for this one")
        self.root = root
        self.files = tuple(islice(_files(root), MOST_FILES))
        self._known = {file.path: n for n, file in enumerate(self.files)}

    @property
    def text_bytes(self) -> int:
        """As far as they can be read."""
        return sum(min(file.size, MOST_BYTES) for file in self.files if file.kind == "text")

    @property
    def tools(self) -> Sequence[Callable[..., str]]:
        return self.list_files, self.read_file, self.grep, self.count_words

    def list_files(self, after: str = "") -> str:
        """The files there are, some at a time, with their size and kind.

        Args:
            after: The last one that you have seen; else from the first on.
        """
        start = self._known[self._file(after).path] + 1 if after else 0
        page = self.files[start : start + PAGE]
        rows = [f"{file.size} bytes, {file.kind}: {file.path}" for file in page]
        left = len(self.files) - start - len(page)
        end = f"{left} more: ask with after" if left else f"That is all, {len(self.files)} files"
        return "\n".join([*rows, end])

    def read_file(self, path: str, first: int = 1, lines: int = 100) -> str:
        """Some lines of a file, under one that says which.

        Args:
            path: As list_files has it.
            first: The first line to read, counting from 1.
            lines: How many.
        """
        said = self._lines(self._file(path))
        part = said[max(0, first - 1) : max(0, first - 1) + max(1, lines)]
        head = f"{path}: lines {first}-{first + len(part) - 1} of {len(said)}"
        return "\n".join([head, *(line[:LONGEST_LINE] for line in part)])

    def grep(self, text: str) -> str:
        """Lines of any file that have a text in them, with their file and number.

        Args:
            text: What to look for, letter by letter.
        """
        hits = [*islice(self._hits(text), MOST_HITS + 1)] if text else []
        more = ["There are more."] if len(hits) > MOST_HITS else []
        return "\n".join([*hits[:MOST_HITS], *more]) or "No line has it."

    def count_words(self, path: str) -> str:
        """How many lines and words a file has.

        Args:
            path: As list_files has it.
        """
        file = self._file(path)
        said = self._lines(file)
        words = sum(len(line.split()) for line in said)
        cut = f", in its first {MOST_BYTES} bytes" if file.size > MOST_BYTES else ""
        return f"{path}: {len(said)} lines, {words} words{cut}"

    def _hits(self, text: str) -> Iterator[str]:
        left = MOST_SEARCHED
        for file in self.files:
            if file.kind == "text" and left > 0:
                left -= min(file.size, MOST_BYTES)
                try:
                    said = self._lines(file)
                except OSError:  # it is gone by now
                    continue
                found = ((n, line) for n, line in enumerate(said, 1) if text in line)
                yield from (f"{file.path}:{n}: {line.strip()[:LONGEST_LINE]}" for n, line in found)

    def _file(self, path: str) -> File:
        if path not in self._known:
            raise NotFoundError(f"There is no file {path!r}; list_files has those there are")
        return self.files[self._known[path]]

    def _lines(self, file: File) -> list[str]:
        if file.kind != "text":
            raise ValueError(f"{file.path} is {file.kind}")
        with file.place.open("rb") as opened:
            return opened.read(MOST_BYTES).decode("utf-8-sig", "replace").splitlines()


def _files(root: Path) -> Iterator[File]:
    """Those nearest to the root first.

    Neither links are followed nor other file systems entered: there is no way out, and none in a circle.
    """
    waiting, looked, device = deque([root]), 0, os.stat(root).st_dev
    while waiting and looked < MOST_FOLDERS:
        looked += 1
        try:
            with os.scandir(waiting.popleft()) as entries:
                known = sorted(islice(entries, MOST_ENTRIES), key=lambda entry: entry.name)
        except OSError:  # not for us
            continue
        for entry in known:
            name = entry.name
            if name.startswith(".") or name.lower() in SKIPPED or not name.isprintable():
                continue
            try:
                if entry.is_dir(follow_symlinks=False):
                    if os.lstat(entry.path).st_dev == device:
                        waiting.append(Path(entry.path))
                elif entry.is_file(follow_symlinks=False) and not name.lower().endswith(SECRET):
                    place = Path(entry.path)
                    size = entry.stat(follow_symlinks=False).st_size
                    kind = _kind(place) if size else "empty"
                    yield File(place.relative_to(root).as_posix(), place, size, kind)
            except OSError:
                continue


def _kind(place: Path) -> Kind:
    try:
        with place.open("rb") as opened:
            return "binary" if b"\0" in opened.read(SNIFFED) else "text"
    except OSError:
        return "unreadable"
