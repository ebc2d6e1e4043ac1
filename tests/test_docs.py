"""Documents cannot rot: every Python block runs, every link leads somewhere, every command exists."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import refold
from refold.cli import COMMANDS, app
from refold.config.config import load_config

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
ADAPTED = ("adk", "agent-framework", "langchain", "litellm", "mcp", "openai-agents", "pydantic-ai", "strands")
"""Pages of frameworks, each of which is run by tests/adapters in an environment of its own."""
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
A_SCREEN_AND_A_HALF = 80


def blocks(language):
    found = (
        (page, block)
        for page in PAGES
        for kind, block in FENCED.findall(page.read_text())
        if kind == language
    )
    return [
        pytest.param(block, id=f"{page.relative_to(ROOT)}-{n}")
        for n, (page, block) in enumerate(found)
        if page.stem not in ADAPTED
    ]


@pytest.mark.parametrize("block", blocks("python"))
def test_every_python_block_runs(block, tmp_path):
    subprocess.run([sys.executable, "-c", block], cwd=tmp_path, check=True)


@pytest.mark.parametrize("page", ADAPTED)
def test_the_page_of_every_framework_is_run_by_its_tests(page):
    assert (ROOT / "docs" / "howto" / f"{page}.md").exists()
    assert f'"{page}.md"' in (ROOT / "tests" / "adapters" / f"test_{page.replace('-', '_')}.py").read_text()


@pytest.mark.parametrize("block", blocks("yaml"))
def test_every_yaml_block_is_a_valid_configuration(block, tmp_path):
    (tmp_path / "refold.yaml").write_text(block)
    config = load_config(tmp_path / "refold.yaml")
    assert config.origins, "nothing is set in it"


def commands(page):
    """What is typed: the lines of sh blocks, those after a $, and what begins with refold in a text."""
    text = page.read_text()
    for kind, block in FENCED.findall(text):
        lines = block.replace("\\\n", " ").splitlines()
        typed = lines if kind == "sh" else [line[2:] for line in lines if line.startswith("$ ")]
        yield from (line for line in typed if re.match(r"(\w+=\S* )*refold ", line))
    yield from re.findall(r"`(refold [^`]+)`", FENCED.sub("", text))


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name != "CHANGELOG.md"],  # which tells of the past, and only in part
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_every_command_that_a_page_names_is_there_with_its_options(page):
    known = typer.main.get_command(app)
    for line in commands(page):
        words = shlex.split(line, comments=True)
        name, *rest = words[words.index("refold") + 1 :]
        if name != "--help":
            assert name in known.commands or name == "COMMAND", line
            command = known.commands.get(name, known)
            context = command.context_class(command, help_option_names=["-h", "--help"])
            command.make_parser(context).parse_args(rest)  # refuses options that there are not


def test_the_page_of_verbs_names_the_commands_there_are():
    named = set(re.findall(r"`refold (\w+)", (ROOT / "docs" / "verbs.md").read_text()))
    assert named == {*COMMANDS, "bench"}


def test_the_readme_is_read_in_a_few_minutes():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def test_the_architecture_lists_the_folders_there_are():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    code = text.partition("\n## The code\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `([\w.]+)/?` \|", code, re.MULTILINE)
    entries = {entry.name for entry in (ROOT / "src" / "refold").iterdir() if entry.name[0] not in "_."}
    assert set(listed) == entries - {"py.typed"}
    assert len(listed) == len(set(listed))


def test_every_file_that_a_page_names_exists():
    roots = (ROOT, ROOT / "src" / "refold")
    folders = {entry.name for root in roots for entry in root.iterdir() if entry.is_dir()}
    named = [
        (page.name, name)
        for page in PAGES
        if page.name != "CHANGELOG.md"  # which tells of the past
        for name in re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", page.read_text())
    ]
    known = [(page, name) for page, name in named if name.partition("/")[0] in folders]
    assert known
    assert not [one for one in known if not any((root / one[1]).exists() for root in roots)]


def test_no_page_has_something_left_to_fill_in():
    for page in PAGES:
        assert not re.search(r"^[A-Z]{3,}$|\bTBD\b|\?\?\?", page.read_text(), re.MULTILINE), page.name


@pytest.mark.parametrize("script", ["try", "test", "environment"])
def test_the_scripts_are_plain_sh(script):
    shell = shutil.which("dash") or shutil.which("sh")
    assert shell
    subprocess.run([shell, "-n", ROOT / "scripts" / script], check=True)
    assert "[[" not in (ROOT / "scripts" / script).read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", FENCED.sub("", page.read_text())):
        if not target.startswith("https://"):
            led = page.parent / target if target else page
            assert led.exists(), target
            assert not anchor or anchor in anchors(led), f"{target}#{anchor}"


def anchors(page):
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def linked(section=""):
    """Pages that the index links to, in one of its sections or in any."""
    text = (ROOT / "docs" / "README.md").read_text()
    part = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0] if section else text
    found = {(ROOT / "docs" / target).resolve() for target in re.findall(r"\]\(([^)#]+)", part)}
    assert found, section
    return found


def test_the_index_leads_to_every_page():
    pages = {page for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert pages - linked() == {ROOT / "docs" / "README.md"}


def test_every_page_that_says_how_to_do_something_is_at_most_a_screen_and_a_half():
    pages = linked("How to")
    assert set((ROOT / "docs" / "howto").iterdir()) <= pages
    lengths = {page.name: len(page.read_text().splitlines()) for page in pages}
    assert not {name: lines for name, lines in lengths.items() if lines > A_SCREEN_AND_A_HALF}


def test_the_tutorial_prints_what_its_commands_print(tmp_path):
    """All of it in one folder, from the beginning; where they differ, the page gets what this prints."""
    page = (ROOT / "docs" / "tutorial.md").read_text()
    env = {**os.environ, "REFOLD_STORE": "sqlite:///agent.db", "COLUMNS": "100", "NO_COLOR": "1"}
    compared = 0
    for kind, block in FENCED.findall(page):
        if kind == "python":
            subprocess.run([sys.executable, "-c", block], cwd=tmp_path, env=env, check=True)
        elif block.startswith("$ "):
            typed, _, printed = block[2:].partition("\n")
            command = [sys.executable, "-m", *shlex.split(typed)]
            done = subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, text=True)
            assert printed.strip() == "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())
            compared += 1
    assert compared


def test_the_readme_prints_what_show_prints(tmp_path):
    """Where they differ, the README gets what this prints."""
    url = f"sqlite:///{tmp_path}/agent.db"
    models = {"m": {"window": 3_000, "max_output": 1_000}}
    config = {"models": models, "agents": {"default": {"compact": {"keep_recent": 4}}}}
    with refold.open("booking", store=url, model="m", config=config) as chat:
        for message in json.loads((ROOT / "examples" / "booking.json").read_text()):
            chat.fit()
            chat.append(message)
        chat.pin(3)
    command = [sys.executable, "-m", "refold", "show", "booking", "--store", url]
    wide = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    shown = subprocess.run(command, env=wide, check=True, capture_output=True, text=True).stdout
    printed = "\n".join(line.rstrip() for line in shown.strip().splitlines())
    assert f"```\n$ refold show booking\n{printed}\n```" in (ROOT / "README.md").read_text(), printed


def test_the_ladder_page_has_what_is_left_of_messages():
    """Where they differ, the page gets what this prints."""
    expire = {"after_steps": 2, "mode": "compact", "compact_mode": "skeleton", "length": 160}
    agent = {"tools": {"search_flights": {"expire": expire}}, "summarizer": {"max_tokens": 200}}
    chat = refold.open("booking", store="memory://", model="gpt-5", config={"agents": {"default": agent}})
    chat.append(json.loads((ROOT / "examples" / "booking.json").read_text()))
    chat.fit()
    skeleton = chat.view().messages[5].text
    chat.compact(keep_recent=3)
    left = [skeleton, chat.view().messages[2].text]
    page = (ROOT / "docs" / "ladder.md").read_text()
    assert re.findall(r"^```text\n(.*?)\n```", page, re.MULTILINE | re.DOTALL) == left, "\n\n".join(left)


@pytest.mark.parametrize("module", ["core", "policies", "stores", "dialects", "models"])
def test_every_module_says_what_it_is_in_one_sentence(module):
    for file in (ROOT / "src" / "refold" / module).rglob("*.py"):
        first = file.read_text().split("\n", 1)[0]
        assert re.match(r'"""[A-Z`].*[.:?"]', first), f"{file.name}: {first}"


def test_every_error_of_the_tree_is_drawn_and_there_are_few():
    from refold.core import errors

    types = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
    classes = [name for name, value in types.items() if issubclass(value, errors.RefoldError)]
    assert len(classes) <= 10
    assert all(name in (errors.__doc__ or "") for name in classes)
