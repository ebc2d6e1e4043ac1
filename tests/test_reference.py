"""The reference is what the code says, and nothing of the code is missing from it."""

import pkgutil
import re
import runpy
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec
import pytest
import typer

import refold
from refold.cli import app
from refold.config.config import Config, load_config
from refold.config.serving import ServeSettings
from refold.config.settings import AgentSettings, all_settings
from refold.config.validate import accepted_types, field_types, is_struct
from refold.core.errors import RefoldError
from refold.core.event import Event, Expiry
from refold.models.limits import ModelSettings
from refold.policies.expire import LENGTH, THRESHOLD
from refold.serve import api, events, gateway
from refold.serve import app as service_app
from refold.serve.openapi import description
from refold.serve.service import Service
from refold.session.api import DEFAULT_STORE
from refold.session.notify import CompactionEvent, MessageEvent
from refold.stores.memory import MemoryStore
from refold.stores.store import Key

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "reference.py"
WRITTEN = runpy.run_path(str(SCRIPT))


def read(name):
    return (ROOT / "docs" / "reference" / f"{name}.md").read_text()


def rows(name):
    """The tables of a page: the first cell of each row, without its marks, and the others."""
    lines = [re.split(r"(?<!\\)\|", line) for line in re.findall(r"^\| .* \|$", read(name), re.MULTILINE)]
    return {line[1].replace("`", "").strip(): [cell.strip() for cell in line[2:-1]] for line in lines}


@pytest.mark.parametrize("name", WRITTEN["PAGES"])
def test_the_page_is_what_the_script_writes(name):
    assert read(name) == WRITTEN["page"](name), "run python scripts/reference.py"


def test_all_pages_of_the_reference_are_written_by_it():
    assert {file.stem for file in (ROOT / "docs" / "reference").iterdir()} == set(WRITTEN["PAGES"])


def test_a_stale_page_is_named(tmp_path):
    """In a copy of the folder, where one page is not as it should be."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "reference.py").write_text(SCRIPT.read_text())
    (tmp_path / "docs" / "reference").mkdir(parents=True)
    for name in WRITTEN["PAGES"]:
        (tmp_path / "docs" / "reference" / f"{name}.md").write_text(read(name))
    check = [sys.executable, tmp_path / "scripts" / "reference.py", "--check"]
    assert subprocess.run(check, check=False).returncode == 0
    (tmp_path / "docs" / "reference" / "errors.md").write_text("")
    told = subprocess.run(check, check=False, capture_output=True, text=True)
    assert (told.returncode, told.stdout) == (1, "docs/reference/errors.md is stale\n")


# What there is


def structs(struct, seen):
    """A struct of settings, and all that can be set in it."""
    if struct not in seen:
        seen.add(struct)
        for hint in field_types(struct).values():
            for kind in (hint, *accepted_types(hint), *get_args(hint)):
                for inner in (kind, *get_args(kind)):
                    if is_struct(inner):
                        structs(inner, seen)
    return seen


def test_every_setting_is_in_the_reference():
    found = structs(Config, set())
    assert {AgentSettings, Expiry, ModelSettings, ServeSettings} <= found
    names = {re.split(r"\.", name)[-1] for name in rows("settings")}
    for struct in found:
        for field in set(field_types(struct)) - {"origins", "tree"}:
            assert field in names, f"{struct.__name__}.{field}"


def test_every_setting_has_the_default_that_is_in_force():
    page = rows("settings")
    for setting in load_config(None).in_force():
        default = "" if setting.value in (None, ()) else f"`{setting.shown}`"
        assert page[setting.name][0] == default, setting
    assert {".".join(path) for path, _ in all_settings(ServeSettings())} <= set(page)


def test_defaults_that_are_told_in_words_are_those_of_the_code():
    page = rows("settings")
    assert f"unset, {LENGTH}." in page["expire.length"][-1]
    assert f"unset, {THRESHOLD}." in page["expire.threshold"][-1]
    assert f"unset, `{DEFAULT_STORE}`." in page["store"][-1]


def test_every_event_of_the_record_and_all_its_fields_are_in_the_reference():
    page = read("events")
    for kind in get_args(Event):
        part = page.partition(f"\n### {kind.__name__}\n")[2].partition("\n###")[0]
        for field in kind.__struct_fields__:
            assert f"\n| `{field}` | " in part, f"{kind.__name__}.{field}"


def test_everything_that_callbacks_are_told_is_in_the_reference():
    page = read("events")
    for struct in (MessageEvent, CompactionEvent):
        part = page.partition(f"\n### {struct.__name__}\n")[2].partition("\n##")[0]
        for name in (*struct.__struct_fields__, *get_args(get_type_hints(struct)["kind"])):
            assert f"\n| `{name}` | " in part, f"{struct.__name__}: {name}"


def test_everything_that_is_told_over_http_is_in_the_reference():
    told = {}
    tool = {"grep": {"expire": {"after_steps": 0, "length": 40}}}
    config = {"agents": {"default": {"tools": tool}}}
    key = Key("default", "c")

    def watch(event):
        if not events.is_stored(event):
            take(events.live_frame(key, event))

    def take(text):
        for frame in text.decode().strip().split("\n\n") if text else ():
            kind, data = frame.split("\n")
            told.setdefault(kind.removeprefix("event: "), set()).update(msgspec.json.decode(data[6:]))

    chat = refold.open("c", store="memory://", model="gpt-5", config=config, on_event=watch)
    call = {"id": "c1", "type": "function", "function": {"name": "grep", "arguments": "{}"}}
    chat.append({"role": "user", "content": "Where is it?"})
    chat.append({"role": "assistant", "content": None, "tool_calls": [call]})
    chat.append({"role": "tool", "tool_call_id": "c1", "content": "here\n" * 500})
    chat.append({"role": "assistant", "content": "There."})
    chat.fit()
    chat.expand(2, reason="to see it")
    chat.restore(2)
    chat.correct(3, "Here.")
    chat.pin(3)
    chat.undo()
    chat.name(title="A search")
    for n in range(30):
        chat.append({"role": "user" if n % 2 else "assistant", "content": f"word {n} " * 200})
    chat.compact(keep_recent=2)
    for event in chat.events():
        take(b"".join(events.stored_frames(key, event)))
    assert {"message-compacted", "compaction:complete", "restored", "undone", "message-expanded"} <= set(told)
    page = rows("events")
    for kind, facts in told.items():
        missing = {fact for fact in facts if f"`{fact}`" not in page[kind][-1]}
        assert not missing, kind
    assert set(events.KINDS.values()) <= set(page)


def test_every_error_is_in_the_reference():
    for module in pkgutil.walk_packages(refold.__path__, "refold."):
        if not module.name.startswith(("refold.testing", "refold.adapters", "refold.__main__")):
            import_module(module.name)  # adapters need their frameworks
    found = {kind.__name__ for kind in family(RefoldError) if not kind.__name__.startswith("_")}
    assert len(found) > 5
    assert found == set(rows("errors")) - {"error"}


def family(kind):
    return {kind, *(one for below in kind.__subclasses__() for one in family(below))}


def test_every_command_and_every_option_is_in_the_reference():
    page = read("cli")
    for name, command in typer.main.get_command(app).commands.items():
        part = page.partition(f"\n## refold {name}\n")[2].partition("\n## ")[0]
        for option in (option for parameter in command.params for option in parameter.opts):
            assert not option.startswith("-") or option in part, f"{name} {option}"
        assert part, name


def test_every_route_is_in_the_reference():
    service = Service(load_config(None), MemoryStore())
    live = {route.path for part in (service_app, gateway, api) for route in part.routes(service)}
    named = {row.split("/", 1)[-1] for row in rows("http") if "/" in row}
    assert {path.lstrip("/") for path in live - {"/api/{rest:path}"}} == named
    methods = {f"{m.upper()} {path}" for path, known in description()["paths"].items() for m in known}
    assert methods <= set(rows("http"))


def test_every_public_name_and_every_verb_of_a_session_is_in_the_reference():
    titles = set(re.findall(r"^##+ (.*)$", read("python"), re.MULTILINE))
    named = {name for title in titles for name in title.split(", ")}
    verbs = {name for name, one in vars(refold.Session).items() if callable(one) and not name.startswith("_")}
    assert set(refold.__all__) | {f"Session.{verb}" for verb in verbs} == named
