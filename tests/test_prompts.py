"""What summarizers are asked: templates, the user's own in their place, and what is refused."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from refold.cli import app
from refold.config.config import load_config, with_database
from refold.config.prompts import (
    BUILT_IN,
    SECTIONS,
    VARIABLES,
    Template,
    conversation_template,
    load,
    message_template,
    profiles,
)
from refold.core.errors import SettingError
from refold.core.event import Expiry
from refold.core.expiry import merge_expiries
from refold.policies.evidence import Evidence, checked
from refold.policies.sections import SECTIONS as TITLES
from refold.session.validate import override_of
from refold.stores.memory import MemoryStore
from refold.stores.store import ToolSetting

ROOT = Path(__file__).parents[1]
PROFILES = ["coding", "content", "general", "research", "support"]
CONVERSATION = {
    name: f"<{name}>" for name in VARIABLES["conversation"] if name not in ("headings", "profile")
}
MESSAGE = {name: f"<{name}>" for name in VARIABLES["message"] if name != "prompt"}
LEFT = re.compile(r"\{\{|\}\}|\(none\)")
"""What a text has in which something was not filled."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The user's own, in the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("prompts").mkdir()
    return Path("prompts")


def write(file, text):
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return file


def agent(tools=None, **summarizer):
    expiring = {tool: {"expire": expire} for tool, expire in (tools or {}).items()}
    return {"agents": {"a": {"summarizer": summarizer, "tools": expiring}}}


# Those that come with refold


@pytest.mark.parametrize("profile", PROFILES)
def test_a_built_in_profile_renders_with_its_documented_variables_only(profile):
    template = conversation_template(profile)
    text = template.render(**CONVERSATION)
    assert (template.name, template.origin, template.models) == (profile, BUILT_IN, ())
    assert not LEFT.search(text)
    assert all(value in text for value in CONVERSATION.values())
    assert load(profile).text in text


def test_the_frames_render_with_their_documented_variables_only():
    assert not LEFT.search(load("system").render())
    assert not LEFT.search(load("conversation").render(**CONVERSATION, headings="h", profile="p"))
    text = message_template("Keep prices.").render(**MESSAGE)
    assert not LEFT.search(text)
    assert all(value in text for value in MESSAGE.values())
    assert text.endswith('{"summary": "…"}')
    assert message_template(None).render(**MESSAGE).count("(none)") == 1


def test_every_variable_is_used_by_what_comes_with_refold():
    for kind, known in VARIABLES.items():
        assert load(kind).variables == {*known}


# proves: E5
def test_the_sections_are_those_that_a_summary_is_read_into():
    assert {*SECTIONS} <= {*TITLES.values()}
    text = conversation_template("general").render(**CONVERSATION)
    assert "\n\n" + "\n".join(f"## {title}" for title in SECTIONS) + "\n\n" in text
    assert all(f"\n- {title}: " in text for title in SECTIONS)
    answer = "\n".join(f"## {title}\n- none" for title in SECTIONS).replace("none", "#7 (open) a page", 1)
    answer = answer.replace("## Work done\n- none", "## Work done\n- The page is done.")
    verdict = checked(answer, Evidence(("The page is done.",)))
    assert verdict.problem is None
    assert [(entry.section, entry.text) for entry in verdict.written.entries] == [
        ("done", "The page is done.")
    ]


def test_a_request_is_written_as_it_is_read_again():
    text = load("conversation").text
    form = re.search(r'"- (#PLACE \(STATE\))', text)[1]
    for state in ("done", "active", "superseded", "open"):
        assert f"`{state}`" in text
        line = form.replace("PLACE", "7").replace("STATE", state)
        answer = f"## Requests of the user\n- {line} a page\n## Work done\n- a page"
        assert checked(answer, Evidence(("a page",))).written.states == {7: state}


def test_what_is_quoted_is_fenced():
    for name in ("task", "rules", "requests", "previous", "messages", "focus"):
        assert f"<{name}>\n{{{{{name}}}}}\n</{name}>" in load("conversation").text
        assert f"<{name}>" in load("system").text
    for name in ("task", "content"):
        assert f"<{name}>\n{{{{{name}}}}}\n</{name}>" in load("message").text
    assert "<content>" in load("system").text


# proves: E5
def test_all_profiles_are_known():
    assert profiles() == PROFILES


# Rendering


@given(st.text(), st.text())
def test_values_are_inserted_as_they_are_and_never_scanned_again(one, other):
    template = Template("t", "a {{one}} b {{ other }} c {{one}}", "here")
    shown, also = (text if text.strip() else "(none)" for text in (one, other))
    assert template.render(one=one, other=other) == f"a {shown} b {also} c {shown}"


def test_braces_in_values_and_braces_that_are_no_variables_are_left_alone():
    template = message_template('{"a": {"b": "{{tool}}"}} { {content} } \\1 {% if %} {{content}}')
    assert template.render(tool="{{content}}", content="{{tool}} \\1") == (
        '{"a": {"b": "{{content}}"}} { {content} } \\1 {% if %} {{tool}} \\1'
    )


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "(none)"), ("", "(none)"), (" \n", "(none)"), (0, "0"), (1.5, "1.5")]
)
def test_what_is_empty_reads_none(value, shown):
    assert Template("t", "{{x}}", "here").render(x=value) == shown


def test_a_variable_that_is_not_given_at_all_is_a_mistake_of_the_caller():
    with pytest.raises(KeyError, match="content"):
        message_template("{{content}}").render(tool="grep")


def test_words_follow_from_tokens_and_headings_from_sections_unless_they_are_given():
    template = Template("t", "{{max_tokens}} {{max_words}} {{headings}}", "here", sections=("A", "B"))
    assert template.render(max_tokens=1_000) == "1000 600 ## A\n## B"
    assert template.render(max_tokens=1_000, max_words=9, headings="C") == "1000 9 C"


# The user's own


# proves: A10, E5
@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_of_the_users_takes_the_place_of_the_built_in_one(folder, name):
    file = write(folder / f"{name}.md", "Mine, for {{task}}.")
    template = conversation_template(name, folder)
    assert template.origin == f"built-in + {file}"
    text = template.render(**CONVERSATION)
    assert "Mine, for <task>." in text
    assert load(name).text not in text
    assert conversation_template(name).origin == BUILT_IN


def test_a_frame_of_the_users_takes_the_place_of_the_built_in_one(folder):
    write(folder / "system.md", "Be brief.")
    write(folder / "conversation.md", "{{messages}} | {{profile}} | {{headings}}")
    write(folder / "message.md", "{{content}} | {{prompt}}")
    assert load("system", folder).render() == "Be brief."
    conversation = conversation_template("general", folder)
    assert conversation.origin == "prompts/conversation.md + built-in"
    assert conversation.render(messages="M").startswith(f"M | {load('general').text} | ## Requests")
    assert message_template(None, folder).render(content="C") == "C | (none)"
    assert message_template("Keep ids of {{tool}}.", folder).render(content="C", tool="ls") == (
        "C | Keep ids of ls."
    )


def test_what_has_the_material_in_it_is_the_whole_prompt(folder):
    file = write(folder / "legal.md", "Sum up {{messages}}")
    template = conversation_template("legal", folder)
    assert (template.text, template.origin, template.sections) == (
        "Sum up {{messages}}",
        str(file),
        SECTIONS,
    )
    assert message_template("Sum up {{ content }}").text == "Sum up {{ content }}"


# proves: E5
def test_any_other_file_in_the_folder_is_a_profile(folder):
    write(folder / "legal.md", "Deadlines.")
    write(folder / "system.md", "Be brief.")
    write(folder / "tools" / "grep.md", "Lines.")
    (folder / "old.md").mkdir()
    assert profiles(folder) == sorted([*PROFILES, "legal"])


def test_an_empty_file_says_nothing(folder):
    write(folder / "general.md", "")
    assert "\n(none)\n" in conversation_template("general", folder).text


# Front matter


# proves: A10
def test_front_matter_names_models_and_sections_and_is_no_part_of_the_text(folder):
    front = "---\nmodels: [openai/a, anthropic/b]\nsections:\n- Deadlines\n- Next action\n---\n"
    write(folder / "legal.md", f"{front}\nKeep dates.\n\n---\nAnd names.\n")
    own = load("legal", folder)
    assert own.text == "Keep dates.\n\n---\nAnd names."
    template = conversation_template("legal", folder)
    assert template.models == own.models == ("openai/a", "anthropic/b")
    assert template.sections == ("Deadlines", "Next action")
    assert "\n## Deadlines\n## Next action\n" in template.render(**CONVERSATION)
    inline = message_template("---\nmodels: [m]\n---\nKeep dates.")
    assert (inline.models, "---" in inline.text) == (("m",), False)


def test_what_guidance_says_in_front_beats_its_frame_and_unset_is_as_in_the_frame(folder):
    write(folder / "conversation.md", "---\nmodels: [frame]\nsections: [A]\n---\n{{messages}}{{profile}}")
    write(folder / "legal.md", "---\nmodels: [own]\nsections:\n---\n")
    template = conversation_template("legal", folder)
    assert (template.models, template.sections) == (("own",), ("A",))
    assert conversation_template("general", folder).models == ("frame",)


@pytest.mark.parametrize(
    "text", ["---\n---\nText", "---\n# nothing\n---\nText", "\ufeff---\n---\r\nText\r\n"]
)
def test_front_matter_may_be_empty(folder, text):
    (folder / "legal.md").write_bytes(text.encode())
    assert load("legal", folder).text == "Text"


@pytest.mark.parametrize(
    ("front", "what"),
    [
        ("model: [a]", "unknown field `model`; known here: models, sections"),
        ("models: a", "$.models"),
        ("sections: [1]", "$.sections[0]"),
        ("- a", "known here: models, sections"),
        ("models: [a", "did not find expected"),
    ],
)
def test_front_matter_that_is_wrong_is_refused_with_what_is_allowed(folder, front, what):
    file = write(folder / "legal.md", f"---\n{front}\n---\n")
    with pytest.raises(SettingError) as caught:
        load("legal", folder)
    assert caught.value.where == str(file)
    assert what in caught.value.problem


# What is refused


def test_an_unknown_variable_is_named_with_file_line_and_the_known_ones(folder):
    file = write(folder / "message.md", "---\nmodels: [m]\n---\nOf {{content}}\nin {{lenght}}")
    with pytest.raises(SettingError) as caught:
        load("message", folder)
    assert caught.value.where == f"{file}:5"
    assert caught.value.problem == (
        "{{lenght}} is not known; known here:"
        " task, tool, message_type, turn_added, content, original_length, prompt, length, max_tokens"
    )


@pytest.mark.parametrize(
    ("name", "text", "known"),
    [
        ("system", "{{task}}", "known here: none"),
        ("general", "{{profile}}", "known here: task, rules"),
        ("general", "{{#if focus}}", "{{#if focus}} is not known"),
        ("conversation", "{{messages}} {{content}}", "known here: task, rules"),
        ("conversation", "{{profile}}", "has no {{messages}}"),
        ("message", "Sum it up", "has no {{content}}"),
    ],
)
def test_a_template_has_only_the_variables_of_its_kind_and_what_it_is_about(folder, name, text, known):
    write(folder / f"{name}.md", text)
    with pytest.raises(SettingError, match=re.escape(known)):
        load(name, folder)


def test_a_file_that_cannot_be_read_is_named(folder):
    (folder / "legal.md").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingError, match=r"^prompts/legal\.md: cannot be read"):
        load("legal", folder)


@pytest.mark.parametrize("name", ["legal", "../prompts/legal", "system", ""])
def test_a_profile_that_is_not_known_is_refused_with_those_that_are(folder, name):
    write(folder.parent / "legal.md", "")
    with pytest.raises(SettingError, match="coding, content, general, research, support"):
        conversation_template(name, folder)


# Of messages, looked up


def test_a_prompt_is_a_text_or_a_file_in_the_folder_or_else_in_the_working_directory(folder):
    write(folder / "tools" / "grep.md", "In the folder.")
    write(Path("here.txt"), "In the working directory.")
    for prompt, text, origin in (
        ("tools/grep.md", "In the folder.", "prompts/tools/grep.md"),
        ("here.txt", "In the working directory.", "here.txt"),
        (str(Path("here.txt").absolute()), "In the working directory.", str(Path("here.txt").absolute())),
        ("Keep names.", "Keep names.", "prompt"),
        ("Keep names of\nREADME.md", "Keep names of\nREADME.md", "prompt"),
    ):
        template = message_template(prompt, folder)
        assert f"in particular:\n{text}\n" in template.text
        assert template.origin == f"built-in + {origin}"
    write(folder / "here.txt", "In the folder too.")
    assert "In the folder too." in message_template("here.txt", folder).text
    assert message_template(" ", folder) == message_template(None, folder)


@pytest.mark.parametrize("prompt", ["nowhere.md", "nowhere.txt", "x" * 9_000 + ".md", "\0.md"])
def test_a_prompt_whose_file_is_not_there_is_refused_with_where_it_was_looked_for(folder, prompt):
    with pytest.raises(SettingError) as caught:
        message_template(prompt, folder)
    assert caught.value.where == prompt
    assert f"{folder.absolute() / prompt} or {Path(prompt).absolute()}" in caught.value.problem
    assert "set the text itself" in caught.value.problem


# proves: A10
def test_the_override_beats_the_agents_prompt_which_beats_the_tools_which_beats_the_default(folder):
    every = {"grep": {"expire": {"prompt": "Of the tool."}}, "ls": {"expire": {"prompt": "Of the tool."}}}
    own = agent({"grep": {"prompt": "Of the agent."}, "ps": {"compact_mode": "ai-summary"}})
    config = load_config({"tools": every, **own})
    tools = config.prompts("a").tools
    said = {tool: re.search(r"in particular:\n(.*)\n", one.text)[1] for tool, one in tools.items()}
    assert said == {"grep": "Of the agent.", "ls": "Of the tool.", "ps": "(none)"}
    asked = override_of({"prompt": "Of the request."}).tools[0]["*"]
    now = merge_expiries(config.agent("a").tools["grep"].expire, asked)
    assert "Of the request." in message_template(now.prompt).text


# In the settings


def test_the_prompts_of_an_agent_are_those_of_its_settings(folder):
    write(folder / "coding.md", "Mine.")
    prompts = load_config(agent(prompts="prompts", profile="coding")).prompts("a")
    assert prompts.conversation == conversation_template("coding", folder)
    assert (prompts.system, prompts.message) == (load("system"), message_template(None))
    assert load_config(None).prompts().conversation == conversation_template("general")


@pytest.mark.parametrize(
    ("settings", "where", "what"),
    [
        (agent(profile="codng"), "summarizer.profile", "coding, content, general"),
        (agent(prompts="nowhere"), "summarizer.prompts", "nowhere: there is no such folder"),
        (
            agent(prompts="prompts", profile="bad"),
            "summarizer.profile",
            "prompts/bad.md:1: {{x}} is not known",
        ),
        (agent({"grep": {"prompt": "no.md"}}), "tools.grep.expire.prompt", "no.md: there is no such file"),
        (agent({"grep": {"prompt": "\n{{x}}"}}), "tools.grep.expire.prompt", "prompt:2: {{x}} is not known"),
    ],
)
def test_a_prompt_that_is_wrong_is_told_with_its_setting_when_the_configuration_is_loaded(
    folder, settings, where, what
):
    write(folder / "bad.md", "{{x}}")
    with pytest.raises(SettingError) as caught:
        load_config(settings)
    assert caught.value.where == f"config.agents.a.{where}"
    assert what in caught.value.problem


def test_the_setting_that_is_told_is_the_one_that_was_set(folder):
    write(folder / "bad.md", "{{x}}")
    for text, where in (
        ("agents:\n  a:\n    summarizer: {prompts: prompts}", r"a\.yaml:3: agents\.a\.summarizer\.prompts"),
        ("tools:\n  ls: {expire: {prompt: bad.md}}", r"a\.yaml:2: tools\.ls\.expire\.prompt"),
    ):
        write(folder / "conversation.md", "{{messages}}" if "tools" in text else "{{x}}")
        Path("a.yaml").write_text(text)
        Path("bad.md").write_text("{{x}}")
        with pytest.raises(SettingError, match=f"^{where}: "):
            load_config("a.yaml")
    write(folder / "general.md", "{{x}}")
    with pytest.raises(
        SettingError, match=r"^config\.agents\.a\.summarizer\.prompts: prompts/general\.md:1: "
    ):
        load_config(agent(prompts="prompts"))


def test_a_folder_of_one_source_serves_the_profile_of_another(folder):
    write(folder / "legal.md", "Deadlines.")
    config = load_config([agent(prompts="prompts"), agent(profile="legal")])
    assert config.prompts("a").conversation.name == "legal"


def test_a_prompt_in_the_database_is_checked_with_the_rest():
    store = MemoryStore()
    store.set_setting(ToolSetting("a", "grep", Expiry(prompt="nowhere.md")))
    with pytest.raises(SettingError, match=r"^database: agents\.a\.tools\.grep\.expire\.prompt: nowhere\.md"):
        with_database(load_config(None), store)


# On the command line


def told(*args, code=0):
    done = CliRunner().invoke(app, ["config", "--store", "sqlite:///chats.db", *args])
    assert done.exit_code == code, done.output
    return done


def rows(*args):
    """Which prompts an agent has, and where that was set."""
    found = json.loads(told("--json", *args).stdout)["agents"]["a"]
    return {row["name"]: (row["value"], row["origin"]) for row in found if row["name"].startswith("prompts.")}


def test_the_prompts_in_force_are_told_with_what_led_to_them(folder):
    write(folder / "coding.md", "Mine.")
    write(folder / "message.md", "{{content}}{{prompt}}")
    text = """
tools: {ls: {expire: {compact_mode: ai-summary, prompt: Keep names.}}}
agents:
  a:
    summarizer:
      prompts: prompts
      profile: coding
    tools:
      grep: {expire: {compact_mode: ai-summary}}
      ps: {expire: {compact_mode: skeleton}}
"""
    Path("refold.yaml").write_text(text)
    assert rows() == {
        "prompts.system": ("built-in", "default"),
        "prompts.conversation.coding": ("built-in + prompts/coding.md", "refold.yaml:7"),
        "prompts.message": ("prompts/message.md", "refold.yaml:6"),
        "prompts.message.ls": ("prompts/message.md + prompt", "refold.yaml:2"),
        "prompts.message.grep": ("prompts/message.md", "refold.yaml:6"),
    }
    assert re.search(
        r"^prompts\.message\.grep +prompts/message\.md +refold\.yaml:6$", told().stdout, re.MULTILINE
    )


def test_without_a_setting_the_prompts_in_force_are_the_built_in_ones(folder):
    Path("refold.yaml").write_text("agents: {a: {}}")
    assert set(rows().values()) == {("built-in", "default")}
    assert "prompts.conversation.general" in rows()


def test_a_prompt_that_is_not_there_is_not_set_in_the_database(folder):
    assert "nowhere.md" in told("--set", "a.grep.prompt=nowhere.md", code=2).stderr
    assert not Path("chats.db").exists()
    write(Path("grep.md"), "Lines.")
    told("--set", "a.grep.prompt=grep.md")
    assert rows()["prompts.message.grep"] == ("built-in + grep.md", "database")


# The page


def test_every_variable_is_on_the_page_with_its_kind():
    page = (ROOT / "docs" / "prompts.md").read_text()
    tables = dict(
        re.findall(r"^\| variable, of (\w+)s \| \|\n\|---\|---\|\n((?:\|.*\n)+)", page, re.MULTILINE)
    )
    for kind, table in tables.items():
        rows = re.findall(r"^\| (.*?) \|", table, re.MULTILINE)
        assert re.findall(r"`(\w+)`", " ".join(rows)) == list(VARIABLES[kind])
    assert tables.keys() == {"conversation", "message"}
    assert f"{', '.join(SECTIONS[:-1])}, and {SECTIONS[-1]}." in " ".join(page.split())
    assert all(f"`{name}.md`" in page for name in (*VARIABLES, *PROFILES))


def test_front_matter_without_an_end_is_refused(tmp_path):
    (tmp_path / "mine.md").write_text("---\nmodels: [openai/gpt-4o-mini]\nTell it short.")
    with pytest.raises(SettingError, match="has no end"):
        conversation_template("mine", tmp_path)


def test_a_frame_is_no_profile(tmp_path):
    with pytest.raises(SettingError, match="a frame, not a profile"):
        conversation_template("system", tmp_path)
