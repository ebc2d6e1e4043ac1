"""Every requirement on the page has a test that says so, and every test that says so has one on the page."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("requirements", ROOT / "scripts" / "requirements.py")
assert spec
assert spec.loader
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)

PAGE = "| id | what | proven by |\n|---|---|---|\n| A1 | One. | |\n| B2b | Two. | `old` |\n"
TESTS = """
# proves: A1
def test_one(): ...


# proves: B2b, A1
@mark
class TestTwo(Contract):
    # proves: B2b
    async def test_inside(self):
        "# proves: C3, in a text"
"""


@pytest.fixture(scope="module")
def told():
    return [proof for file in script.files() for proof in script.proofs(*script.read(file))]


def test_the_page_is_what_the_script_writes(told):
    """Where this fails, run `python scripts/requirements.py`: it says what has no test, or is not known."""
    page = script.PAGE.read_text("utf-8")
    assert script.written(page, told) == page


def test_no_requirement_stands_twice_on_the_page():
    rows = re.findall(r"^\| ([A-Z]\d\w*) \|", script.PAGE.read_text("utf-8"), re.MULTILINE)
    assert rows == [id for id, _ in script.ROW.findall(script.PAGE.read_text("utf-8"))]
    assert len({*rows}) == len(rows)


def test_the_contracts_that_others_use_prove_requirements_too(told):
    assert any(proof.test.startswith("src/refold/testing/") for proof in told)


def test_tests_are_named_as_pytest_names_them():
    found = [(proof.id, proof.test) for proof in script.proofs(TESTS, "t.py")]
    assert found == [
        ("A1", "t.py::test_one"),
        ("B2b", "t.py::TestTwo"),
        ("A1", "t.py::TestTwo"),
        ("B2b", "t.py::TestTwo::test_inside"),
    ]


def test_a_row_has_all_tests_that_prove_it_and_none_that_did_once():
    page = script.written(PAGE, script.proofs(TESTS, "t.py"))
    assert page.endswith(
        "| A1 | One. | `t.py::test_one`<br>`t.py::TestTwo` |\n"
        "| B2b | Two. | `t.py::TestTwo`<br>`t.py::TestTwo::test_inside` |\n"
    )
    assert script.written(page, script.proofs(TESTS, "t.py")) == page


def test_a_requirement_without_a_test_is_named():
    with pytest.raises(ValueError, match=r"^no test says that it proves B2b$"):
        script.written(PAGE, script.proofs("# proves: A1\ndef test_one(): ...\n", "t.py"))


def test_a_comment_that_names_no_requirement_is_named():
    with pytest.raises(ValueError, match=r"^t\.py:1: there is no requirement C3 on the page$"):
        script.written(PAGE, script.proofs("# proves: C3\ndef test_one(): ...\n", "t.py"))


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("# proves A1\ndef test_one(): ...\n", "is not written like"),
        ("# proves: A1 B2b\ndef test_one(): ...\n", "is not written like"),
        ("# Proves: A1\ndef test_one(): ...\n", "is not written like"),
        ("#proves: A1\ndef test_one(): ...\n", "is not written like"),
        ("# proves: A1\n\ndef test_one(): ...\n", "there is no test right below"),
        ("# proves: A1\ndef one(): ...\n", "there is no test right below"),
        ("@mark\n# proves: A1\ndef test_one(): ...\n", "there is no test right below"),
        ("class Other:\n    # proves: A1\n    def test_one(self): ...\n", "there is no test right below"),
    ],
)
def test_a_comment_that_would_be_overlooked_is_named(source, problem):
    with pytest.raises(ValueError, match=rf"^t\.py:\d: .*{problem}"):
        list(script.proofs(source, "t.py"))
