"""Documents cannot rot: every Python block runs, every link leads somewhere, every command exists."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import refold

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
ADAPTED = ("adk", "agent-framework", "langchain", "litellm", "mcp", "openai-agents", "pydantic-ai", "strands")
"""Pages of frameworks, each of which is run by tests/adapters in an environment of its own."""
BLOCKS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}-{n}")
    for page in PAGES
    if page.stem not in ADAPTED
    for n, block in enumerate(
        re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    )
]


@pytest.mark.parametrize("block", BLOCKS)
def test_every_python_block_runs(block, tmp_path):
    subprocess.run([sys.executable, "-c", block], cwd=tmp_path, check=True)


@pytest.mark.parametrize("page", ADAPTED)
def test_the_page_of_every_framework_is_run_by_its_tests(page):
    assert (ROOT / "docs" / "howto" / f"{page}.md").exists()
    assert f'"{page}.md"' in (ROOT / "tests" / "adapters" / f"test_{page.replace('-', '_')}.py").read_text()


def test_the_yaml_in_the_readme_is_a_valid_configuration(tmp_path):
    from refold.config import load_config

    (block,) = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "refold.yaml").write_text(block)
    assert load_config(tmp_path / "refold.yaml").models["my-model"].window == 8_000


def test_the_readme_names_the_commands_there_are():
    from refold.cli import COMMANDS, GROUPS

    named = set(re.findall(r"`refold (\w+)", (ROOT / "README.md").read_text()))
    assert named <= {*COMMANDS, *GROUPS}
    assert set(COMMANDS) - named <= {"list", "unpin", "delete", "fit"}


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
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_the_readme_prints_what_show_prints(tmp_path):
    """Where they differ, the README gets what this prints."""
    url = f"sqlite:///{tmp_path}/agent.db"
    models = {"m": {"window": 4_000, "max_output": 1_000}}
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


def test_the_example_runs(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "long_run.py"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert "nothing is lost" in done.stdout


@pytest.mark.parametrize("module", ["core", "policies", "stores", "formats", "tokens"])
def test_every_module_says_what_it_is_in_one_sentence(module):
    for file in (ROOT / "src" / "refold" / module).rglob("*.py"):
        first = file.read_text().split("\n", 1)[0]
        assert re.match(r'"""[A-Z].*[.:"]', first), f"{file.name}: {first}"


def test_every_error_of_the_tree_is_drawn_and_there_are_few():
    from refold.core import errors

    classes = [name for name, value in vars(errors).items() if isinstance(value, type)]
    assert len(classes) <= 10
    assert all(name in (errors.__doc__ or "") for name in classes)
