"""The text files of a folder, and the read-only tools by which an agent reads them.

Hidden files, links, key files and generated folders (`node_modules` and the like) are left out.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from refold.core.errors import NotFoundError

MAX_FILES = 2_000
MAX_FOLDERS = 2_000
MAX_FILE_BYTES = 1_000_000
MAX_SEARCHED_BYTES = 4_000_000
MAX_HITS = 30
MAX_LINE_CHARS = 400
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
        """Raises NotFoundError if there is no such folder."""
        if not root.is_dir():
            raise NotFoundError(f"{root} is not a folder; name one that exists, or none for this one")
        self.root = root
        self.sizes = dict(islice(_text_files(root), MAX_FILES))
        """By path relative to the folder, with / on every system."""

    @property
    def text_bytes(self) -> int:
        """Bytes of text that can be read."""
        return sum(min(size, MAX_FILE_BYTES) for size in self.sizes.values())

    def read_file(self, path: str, first: int = 1, lines: int = 100) -> str:
        """Read some lines of a file.

        Args:
            path: Relative to the folder.
            first: The first line to read, counting from 1.
            lines: The number of lines.
        """
        all_lines = self.lines(path)
        start = max(0, first - 1)
        part = all_lines[start : start + max(1, lines)]
        head = f"{path}: lines {first}-{first + len(part) - 1} of {len(all_lines)}"
        return "\n".join([head, *(line[:MAX_LINE_CHARS] for line in part)])

    def grep(self, text: str) -> str:
        """Find the lines of any file that contain a text.

        Args:
            text: What to look for, letter by letter.
        """
        hits: list[str] = []
        searched = 0
        for path, size in self.sizes.items():
            if searched > MAX_SEARCHED_BYTES or len(hits) > MAX_HITS:
                break
            searched += size
            with suppress(OSError):  # it was deleted meanwhile
                for n, line in enumerate(self.lines(path), 1):
                    if text in line:
                        hits.append(f"{path}:{n}: {line.strip()[:MAX_LINE_CHARS]}")
        return "\n".join(hits[:MAX_HITS]) or "No line has it."

    def lines(self, path: str) -> list[str]:
        if path not in self.sizes:
            raise NotFoundError(f"There is no file {path!r} in this folder")
        with (self.root / path).open("rb") as opened:
            return opened.read(MAX_FILE_BYTES).decode("utf-8-sig", "replace").splitlines()


def _text_files(root: Path) -> Iterator[tuple[str, int]]:
    """Paths and sizes. Links and other file systems are not followed."""
    for folder, folders, names in islice(os.walk(root), MAX_FOLDERS):
        folders[:] = sorted(
            name for name in folders if _is_wanted(name) and not os.path.ismount(Path(folder, name))
        )
        for name in sorted(filter(_is_wanted, names)):
            path = Path(folder, name)
            with suppress(OSError):  # it may not be read
                is_file = path.is_file() and not path.is_symlink()
                size = path.stat().st_size if is_file else 0
                if size and _is_text(path):  # some empty system files would block their reader
                    yield path.relative_to(root).as_posix(), size


def _is_wanted(name: str) -> bool:
    is_hidden = name.startswith(".") or name.lower() in SKIPPED or not name.isprintable()
    return not is_hidden and not name.lower().endswith(SECRET)


def _is_text(path: Path) -> bool:
    with path.open("rb") as opened:
        return b"\0" not in opened.read(SAMPLE_BYTES)
