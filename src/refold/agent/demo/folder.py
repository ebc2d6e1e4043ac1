"""The text files of a folder, and the read-only tools by which an agent reads them.

Hidden files, links, key files and generated folders (`node_modules` and the like) are left out.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from refold.core.errors import NotFoundError

MAX_FILES = 2_000
MAX_FOLDERS = 2_000
MAX_BYTES = 1_000_000
"""Of one file."""
MAX_SEARCHED_BYTES = 4_000_000
"""By one search."""
MAX_HITS = 30
MAX_LINE_CHARS = 400
"""The rest of a line is cut off."""
LISTED_FILES = 25
"""Files in one listing."""
SKIPPED = frozenset(
    {"__pycache__", "bower_components", "build", "dist", "env", "node_modules", "site-packages"}
    | {"target", "vendor", "venv"}
)
SECRET = (".key", ".pem", ".p12", ".pfx", ".jks", ".kdbx")
SAMPLE_BYTES = 4_096
"""Read to tell whether a file is text."""


class Folder:
    """The text files of a folder, listed once."""

    def __init__(self, root: Path) -> None:
        """
        Raises:
            NotFoundError: there is no such folder.
        """
        if not root.is_dir():
            raise NotFoundError(f"{root} is not a folder; name one that exists, or none for this one")
        self.root = root
        self.sizes = dict(islice(_text_files(root), MAX_FILES))
        """By path relative to the folder, with / on every system."""

    @property
    def text_bytes(self) -> int:
        """Bytes of text that can be read."""
        return sum(min(size, MAX_BYTES) for size in self.sizes.values())

    @property
    def tools(self) -> Sequence[Callable[..., str]]:
        return self.list_files, self.read_file, self.grep

    def list_files(self, after: str = "") -> str:
        """The files there are, some at a time, with their size.

        Args:
            after: The last one that you have seen; else from the first on.
        """
        paths = list(self.sizes)
        start = paths.index(self._known(after)) + 1 if after else 0
        listed = paths[start : start + LISTED_FILES]
        rows = [f"{self.sizes[path]} bytes: {path}" for path in listed]
        left = len(paths) - start - len(listed)
        end = f"{left} more: ask with after" if left else f"That is all, {len(paths)} files"
        return "\n".join([*rows, end])

    def read_file(self, path: str, first: int = 1, lines: int = 100) -> str:
        """Some lines of a file, under one that says which.

        Args:
            path: As list_files has it.
            first: The first line to read, counting from 1.
            lines: How many.
        """
        all_lines = self._lines(path)
        start = max(0, first - 1)
        part = all_lines[start : start + max(1, lines)]
        head = f"{path}: lines {first}-{first + len(part) - 1} of {len(all_lines)}"
        return "\n".join([head, *(line[:MAX_LINE_CHARS] for line in part)])

    def grep(self, text: str) -> str:
        """Lines of any file that have a text in them, with their file and number.

        Args:
            text: What to look for, letter by letter.
        """
        hits = list(islice(self._hits(text), MAX_HITS + 1)) if text else []
        if len(hits) > MAX_HITS:
            hits[MAX_HITS:] = ["There are more."]
        return "\n".join(hits) or "No line has it."

    def _hits(self, text: str) -> Iterator[str]:
        left = MAX_SEARCHED_BYTES
        for path, size in self.sizes.items():
            if left <= 0:
                return
            left -= min(size, MAX_BYTES)
            try:
                lines = self._lines(path)
            except OSError:  # it was deleted meanwhile
                continue
            for n, line in enumerate(lines, 1):
                if text in line:
                    yield f"{path}:{n}: {line.strip()[:MAX_LINE_CHARS]}"

    def _known(self, path: str) -> str:
        if path not in self.sizes:
            raise NotFoundError(f"There is no file {path!r}; list_files names those that exist")
        return path

    def _lines(self, path: str) -> list[str]:
        with (self.root / self._known(path)).open("rb") as opened:
            return opened.read(MAX_BYTES).decode("utf-8-sig", "replace").splitlines()


def _text_files(root: Path) -> Iterator[tuple[str, int]]:
    """Paths and sizes. Links and other file systems are not followed."""
    for folder, folders, names in islice(os.walk(root), MAX_FOLDERS):
        wanted = [name for name in folders if _is_wanted(name) and not os.path.ismount(Path(folder, name))]
        folders[:] = sorted(wanted)
        for name in sorted(names):
            path = Path(folder, name)
            if not _is_wanted(name) or name.lower().endswith(SECRET):
                continue
            if path.is_symlink() or not path.is_file():
                continue
            try:
                size = path.stat().st_size
                if size and _is_text(path):  # some empty system files would block their reader
                    yield path.relative_to(root).as_posix(), size
            except OSError:  # it may not be read
                continue


def _is_wanted(name: str) -> bool:
    return not name.startswith(".") and name.lower() not in SKIPPED and name.isprintable()


def _is_text(path: Path) -> bool:
    with path.open("rb") as opened:
        return b"\0" not in opened.read(SAMPLE_BYTES)
