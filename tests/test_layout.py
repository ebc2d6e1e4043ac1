"""The layout of the code: rooms, names, and what faces may know of a session."""

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

ROOT = Path(__file__).parents[1]
TWICE = {
    "RefoldPlugin": "promised for Google ADK and for Strands, which both take plugins",
}
"""Class names that are defined more than once, and why."""


def measured():
    loader = SourceFileLoader("measure", str(ROOT / "scripts" / "measure"))
    spec = spec_from_loader("measure", loader)
    module = module_from_spec(spec)
    loader.exec_module(module)
    return {name: (value, goal) for name, value, goal in module.sizes()}


def test_a_class_name_means_one_thing():
    _, goal = measured()["class names defined more than once"]
    repeated = set(goal.split()[2:])
    assert repeated <= TWICE.keys()


def test_no_face_reaches_through_a_session():
    assert measured()["faces that reach through a session"][0] == "0"


def test_the_rooms_are_few_and_so_are_the_layers():
    found = measured()
    assert int(found["entries directly in src/refold"][0]) <= 15
    assert int(found["import layers"][0]) <= 8


def test_every_package_says_what_is_inside():
    for package in (ROOT / "src" / "refold").rglob("__init__.py"):
        assert package.read_text().startswith('"""'), package
