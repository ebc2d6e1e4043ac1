"""Writes into docs/requirements.md which tests prove each requirement, as the tests themselves say.

python scripts/requirements.py [--check] [ID …]

A test says it in a comment right above it: `# proves: A8, E6`. It is a comment, since the contracts of
refold.testing are tests of other projects too, whose pytest knows no marks of ours, and since nothing need be
imported to read it. With ids, only the tests that prove those are printed.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeGuard

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "requirements.md"
ROW = re.compile(r"^\| ([A-Z]\d+[a-z]?) \| (.+?) \|[^|]*\|$", re.MULTILINE)
SAID = re.compile(r"# proves: ([A-Z]\d+[a-z]?(?:, [A-Z]\d+[a-z]?)*)")
MEANT = re.compile(r"#\W*proves?\b", re.IGNORECASE)
"""Whatever looks as if it were to be one."""
Tests = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Proof(NamedTuple):
    """One comment."""

    id: str
    test: str
    """As pytest names it: the file, the class if it is in one, the test."""
    where: str


def files() -> list[Path]:
    return sorted([*ROOT.glob("tests/**/*.py"), *ROOT.glob("src/refold/testing/*.py")])


def read(file: Path) -> tuple[str, str]:
    """Its source, and its name from here."""
    return file.read_text("utf-8"), file.relative_to(ROOT).as_posix()


def proofs(source: str, file: str) -> Iterator[Proof]:
    """What the tests of a file say that they prove; raises ValueError where a comment is no good."""
    if not MEANT.search(source):
        return
    tests = {
        min([test.lineno, *(d.lineno for d in test.decorator_list)]): name for name, test in _tests(source)
    }
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or not MEANT.match(token.string):
            continue
        where = f"{file}:{token.start[0]}"
        said, test = SAID.fullmatch(token.string), tests.get(token.start[0] + 1)
        if not said:
            raise ValueError(f"{where}: {token.string!r} is not written like '# proves: A8, E6'")
        if not test:
            raise ValueError(f"{where}: there is no test right below {token.string!r}")
        yield from (Proof(id, f"{file}::{test}", where) for id in said[1].split(", "))


def _tests(source: str) -> Iterator[tuple[str, Tests]]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and re.match(r"Test|\w+Contract$", node.name):
            yield node.name, node
            yield from ((f"{node.name}::{test.name}", test) for test in node.body if _is_test(test))
        elif _is_test(node):
            yield node.name, node


def _is_test(node: ast.stmt) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")


def written(page: str, told: Iterable[Proof]) -> str:
    """The page with the tests that prove each row of it; raises ValueError where one has none."""
    tests: dict[str, list[str]] = {id: [] for id, _ in ROW.findall(page)}
    for proof in told:
        if proof.id not in tests:
            raise ValueError(f"{proof.where}: there is no requirement {proof.id} on the page")
        tests[proof.id].append(proof.test)
    if unproven := [id for id, named in tests.items() if not named]:
        raise ValueError(f"no test says that it proves {', '.join(unproven)}")
    return ROW.sub(
        lambda row: f"| {row[1]} | {row[2]} | {'<br>'.join(f'`{t}`' for t in tests[row[1]])} |", page
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ids", nargs="*", metavar="ID", help="print the tests that prove these")
    parser.add_argument(
        "--check", action="store_true", help="change nothing; leave with 1 where the page is old"
    )
    given = parser.parse_args()
    page = PAGE.read_text("utf-8")
    try:
        told = [proof for file in files() for proof in proofs(*read(file))]
        if given.ids:
            print(*dict.fromkeys(p.test for p in told if p.id in given.ids), sep="\n")
            return 0
        new = written(page, told)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if given.check and new != page:
        print("docs/requirements.md is old; run python scripts/requirements.py", file=sys.stderr)
        return 1
    if new != page:
        PAGE.write_text(new, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
