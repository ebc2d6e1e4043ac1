"""A folder and the read-only tools by which an agent reads it.

Hidden files, links, key files and generated folders (`node_modules` and the like) are left out.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from refold.core.errors import NotFoundError

MOST_FILES = 2_000
MOST_FOLDERS = 2_000
MOST_ENTRIES = 20_000
"""Names that are read of one folder."""
MOST_BYTES = 1_000_000
"""Of one file."""
MOST_SEARCHED = 4_000_000
"""Bytes that one search reads."""
MOST_HITS = 30
LONGEST_LINE = 400
"""Characters; the rest of a line is cut off."""
LISTED_FILES = 25
"""Files in one listing."""
SKIPPED = frozenset(
    {"__pycache__", "bower_components", "build", "dist", "env", "node_modules", "site-packages"}
    | {"target", "vendor", "venv"}
)
SECRET = (".key", ".pem", ".p12", ".pfx", ".jks", ".kdbx")
SNIFFED = 4_096
FileKind: TypeAlias = Literal["text", "binary", "empty", "unreadable"]
"""Files with size 0 are never opened: reading some system files would block."""


class FolderFile(msgspec.Struct, frozen=True):
    path: str
    """Relative to the folder, with / on every system."""
    location: Path
    size: int
    kind: FileKind


class Folder:
    """The files of a folder, listed once."""

    def __init__(self, root: Path) -> None:
        """
        Raises:
            NotFoundError: there is no such folder.
        """
        if not root.is_dir():
            raise NotFoundError(f"{root} is not a folder; name one that exists, or none for this one")
        self.root = root
        self.files = tuple(islice(_files(root), MOST_FILES))
        self._indices = {file.path: n for n, file in enumerate(self.files)}

    @property
    def text_bytes(self) -> int:
        """Bytes of text that can be read."""
        return sum(min(file.size, MOST_BYTES) for file in self.files if file.kind == "text")

    @property
    def tools(self) -> Sequence[Callable[..., str]]:
        return self.list_files, self.read_file, self.grep, self.count_words

    def list_files(self, after: str = "") -> str:
        """The files there are, some at a time, with their size and kind.

        Args:
            after: The last one that you have seen; else from the first on.
        """
        start = self._indices[self._file(after).path] + 1 if after else 0
        listed = self.files[start : start + LISTED_FILES]
        rows = [f"{file.size} bytes, {file.kind}: {file.path}" for file in listed]
        left = len(self.files) - start - len(listed)
        end = f"{left} more: ask with after" if left else f"That is all, {len(self.files)} files"
        return "\n".join([*rows, end])

    def read_file(self, path: str, first: int = 1, lines: int = 100) -> str:
        """Some lines of a file, under one that says which.

        Args:
            path: As list_files has it.
            first: The first line to read, counting from 1.
            lines: How many.
        """
        all_lines = self._lines(self._file(path))
        start = max(0, first - 1)
        part = all_lines[start : start + max(1, lines)]
        head = f"{path}: lines {first}-{first + len(part) - 1} of {len(all_lines)}"
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
        lines = self._lines(file)
        words = sum(len(line.split()) for line in lines)
        cut = f", in its first {MOST_BYTES} bytes" if file.size > MOST_BYTES else ""
        return f"{path}: {len(lines)} lines, {words} words{cut}"

    def _hits(self, text: str) -> Iterator[str]:
        left = MOST_SEARCHED
        for file in self.files:
            if file.kind != "text" or left <= 0:
                continue
            left -= min(file.size, MOST_BYTES)
            try:
                lines = self._lines(file)
            except OSError:  # it was deleted meanwhile
                continue
            for n, line in enumerate(lines, 1):
                if text in line:
                    yield f"{file.path}:{n}: {line.strip()[:LONGEST_LINE]}"

    def _file(self, path: str) -> FolderFile:
        if path not in self._indices:
            raise NotFoundError(f"There is no file {path!r}; list_files names those that exist")
        return self.files[self._indices[path]]

    def _lines(self, file: FolderFile) -> list[str]:
        if file.kind != "text":
            raise ValueError(f"{file.path} is {file.kind}")
        with file.location.open("rb") as opened:
            return opened.read(MOST_BYTES).decode("utf-8-sig", "replace").splitlines()


def _files(root: Path) -> Iterator[FolderFile]:
    """Files nearest to the root first. Links and other file systems are not followed."""
    folders = deque([root])
    visited = 0
    device = os.stat(root).st_dev
    while folders and visited < MOST_FOLDERS:
        visited += 1
        try:
            with os.scandir(folders.popleft()) as found:
                entries = sorted(islice(found, MOST_ENTRIES), key=lambda entry: entry.name)
        except OSError:  # no permission
            continue
        for entry in entries:
            name = entry.name
            if name.startswith(".") or name.lower() in SKIPPED or not name.isprintable():
                continue
            try:
                if entry.is_dir(follow_symlinks=False):
                    if os.lstat(entry.path).st_dev == device:
                        folders.append(Path(entry.path))
                elif entry.is_file(follow_symlinks=False) and not name.lower().endswith(SECRET):
                    location = Path(entry.path)
                    size = entry.stat(follow_symlinks=False).st_size
                    kind = _kind(location) if size else "empty"
                    yield FolderFile(location.relative_to(root).as_posix(), location, size, kind)
            except OSError:
                continue


def _kind(location: Path) -> FileKind:
    try:
        with location.open("rb") as opened:
            return "binary" if b"\0" in opened.read(SNIFFED) else "text"
    except OSError:
        return "unreadable"
