"""Settings: where they come from, and what is refused."""

import math
import textwrap
from pathlib import Path

import pytest
import yaml

import refold
from refold.config.config import Config, load_config, with_database
from refold.config.serving import Limits
from refold.config.settings import AgentSettings, Compact, Economy, Setting, SummarizerSettings, ToolSettings
from refold.config.validate import accepted_types, field_types
from refold.core.budget import Budget
from refold.core.errors import SettingError
from refold.core.event import Expiry
from refold.core.expiry import merge_expiries, most_aggressive
from refold.models.limits import ModelLimits, ModelSettings, find
from refold.policies.dedupe import Dedupe
from refold.policies.prune import Cap, Prune
from refold.session.validate import Override, override_of
from refold.stores.memory import MemoryStore
from refold.stores.store import ToolSetting

ROOT = Path(__file__).parents[1]
STRUCTS = (Config, AgentSettings, Compact, SummarizerSettings, ToolSettings, Expiry, Prune, Cap, Dedupe)
PROMISED = """
store: sqlite:///agent.db
agents:
  researcher:
    model: gpt-5
    compact:                     # D; `compact: off` turns everything off
      token_threshold: 6000
      turn_threshold: 10
      message_threshold: 30
      max_tokens: 4000
      strategy: summarize        # summarize | sliding-window | hierarchical
      keep_recent: 10
      system_reserve: 2000       # E2
      output_reserve: 4000
      safety_buffer: 5000
      threshold_percent: 0.80
      prune: {protect: 40000, minimum: 20000, keep_turns: 2, exclude_tools: [skill]}
    summarizer: {models: [openai/gpt-4o-mini, anthropic/claude-haiku-4-5], profile: coding, max_tokens: 800}
    tools:
      web_search:
        expire: {after_steps: 2, mode: compact, compact_mode: first-n-chars, length: 500, prompt: null}
    dedupe: {similarity: 0.9}
    counter: auto              # auto | estimate (the 4-character rule)
"""
AS_TOML = """
store = "sqlite:///agent.db"
[agents.researcher]
model = "gpt-5"
counter = "auto"
dedupe = {similarity = 0.9}
[agents.researcher.compact]
token_threshold = 6000
turn_threshold = 10
message_threshold = 30
max_tokens = 4000
strategy = "summarize"
keep_recent = 10
system_reserve = 2000
output_reserve = 4000
safety_buffer = 5000
threshold_percent = 0.80
prune = {protect = 40000, minimum = 20000, keep_turns = 2, exclude_tools = ["skill"]}
[agents.researcher.summarizer]
models = ["openai/gpt-4o-mini", "anthropic/claude-haiku-4-5"]
profile = "coding"
max_tokens = 800
[agents.researcher.tools.web_search.expire]
after_steps = 2
mode = "compact"
compact_mode = "first-n-chars"
length = 500
"""


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a file into the folder where the test runs, and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(text, name="agent.yaml"):
        Path(name).write_text(textwrap.dedent(text))
        return name

    return write


def agent(**settings):
    return {"agents": {"a": settings}}


def expiring(tool="grep", **expire):
    return {"tools": {tool: {"expire": expire}}}


# What can be set


# proves: D1, D2
def test_all_that_is_promised_can_be_set(written):
    config = load_config(written(PROMISED))
    assert config == load_config(written(AS_TOML, "agent.toml")) == load_config(yaml.safe_load(PROMISED))
    assert config.agent("researcher") == AgentSettings(
        model="gpt-5",
        compact=Compact(
            token_threshold=6_000,
            turn_threshold=10,
            message_threshold=30,
            max_tokens=4_000,
            prune=Prune(40_000, 20_000, exclude_tools=("skill",)),
        ),
        summarizer=SummarizerSettings(("openai/gpt-4o-mini", "anthropic/claude-haiku-4-5"), "coding", 800),
        tools={"web_search": ToolSettings(Expiry(2, "compact", "first-n-chars", 500))},
    )


def test_yaml_and_toml_say_the_same(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "store: memory://\nmodels: {m: {window: 8000}}\n"
        "agents: {default: {model: m, compact: {max_tokens: 900}}}\n"
    )
    (tmp_path / "a.toml").write_text(
        'store = "memory://"\n[models.m]\nwindow = 8000\n'
        '[agents.default]\nmodel = "m"\ncompact = {max_tokens = 900}\n'
    )
    config = load_config(tmp_path / "a.yaml")
    assert config == load_config(str(tmp_path / "a.toml")) == load_config(config)
    chat = refold.open("x", config=config)
    assert chat.model == "m"
    assert chat.fit().report.limit == 8_000
    assert config.budget(config.agent(None), find("m", config.models).limits).target == 900


@pytest.mark.parametrize(
    ("switch", "is_on"), [("off", 0), ('"off"', 0), ("false", 0), ("on", 1), ('"on"', 1)]
)
def test_on_and_off_are_so_however_yaml_reads_them(written, switch, is_on):
    names = ("compact", "repair", "dedupe", "handles")
    text = ", ".join(f"{name}: {switch}" for name in names)
    a = load_config(written(f"agents: {{a: {{{text}}}}}")).agent("a")
    assert (not a.is_off, a.repairs, a.deduping is not None, a.shows_handles) == (is_on,) * 4
    inner = load_config(written(f"agents: {{a: {{compact: {{prune: {switch}, cap: {switch}}}}}}}")).agent("a")
    assert (inner.compaction.pruning is not None, inner.compaction.capping is not None) == (is_on,) * 2


def test_a_switch_that_is_on_has_the_defaults_and_a_struct_is_on():
    a = load_config(agent(compact={"prune": True, "cap": {"share": 0.5}}, dedupe="on")).agent("a")
    assert (a.compaction.pruning, a.compaction.capping, a.deduping) == (Prune(), Cap(0.5), Dedupe())
    assert load_config(agent(compact=True)).agent("a").compaction == Compact()


def test_null_is_as_if_it_were_not_there(written):
    a = "{compact: null, model: ~, tools: {grep: {expire: {after_steps: null}}}, dedupe: }"
    config = load_config(written(f"agents: {{a: {a}, b: }}\ntools:"))
    assert config.agent("a") == AgentSettings(tools={"grep": ToolSettings()})
    assert config.agent("b") == AgentSettings()
    assert config.origin("agents", "a", "model") == "default"


# proves: A7
def test_a_tool_has_defaults_for_every_agent_and_an_agents_own_beat_them_field_by_field():
    every = expiring(after_steps=5, mode="compact") | {"agents": {"a": expiring(after_steps=0), "b": {}}}
    config = load_config(every)
    assert config.agent("a").tools["grep"].expire == Expiry(after_steps=0, mode="compact")
    assert config.agent("b").tools["grep"].expire == Expiry(after_steps=5, mode="compact")
    assert config.agent(None).tools["grep"].expire == Expiry(after_steps=5, mode="compact")


def test_the_answers_reserve_is_never_more_than_the_model_can_say():
    config = load_config({"models": {"m": {"window": 100_000, "max_output": 1_000}}})
    assert config.budget(config.agent(None), find("m", config.models).limits).output_reserve == 1_000
    assert config.budget(config.agent(None), ModelLimits()).window == 128_000


# What is refused


# proves: D2
@pytest.mark.parametrize(
    ("value", "where", "what"),
    [
        ({"stor": "x"}, "config.stor", "known here: store, models, agents, tools"),
        ({"origins": {}}, "config.origins", "known here: store, models, agents, tools"),
        (agent(compct={}), "config.agents.a.compct", "model, compact"),
        (agent(compact={"max": 1}), "config.agents.a.compact.max", "max_tokens"),
        (
            agent(compact={"max_tokens": 0}),
            "config.agents.a.compact.max_tokens",
            "0 is too small: expected 1",
        ),
        (agent(compact={"threshold_percent": 2}), "a.compact.threshold_percent", "at most 1"),
        (agent(compact={"threshold_percent": 0}), "a.compact.threshold_percent", "more than 0"),
        (agent(compact={"strategy": "magic"}), "a.compact.strategy", "'summarize', 'sliding-window'"),
        (agent(compact="maybe"), "config.agents.a.compact", "or on, off, got 'maybe'"),
        (agent(compact={"prune": {"keep": 1}}), "a.compact.prune.keep", "protect, minimum, keep_turns"),
        (agent(compact={"prune": 5}), "a.compact.prune", "some of protect"),
        (agent(compact={"cap": {"share": 1.5}}), "a.compact.cap.share", "at most 1"),
        (agent(repair="maybe"), "config.agents.a.repair", "expected on, off, got 'maybe'"),
        (
            {"serve": {"inject_tools": "no"}},
            "config.serve.inject_tools",
            "expected auto, or on, off, got 'no'",
        ),
        (
            {"serve": {"tokens": [{"scopes": ["fly"]}]}},
            "config.serve.tokens.0.scopes",
            "expected a list of 'read', 'append', 'edit', 'admin', got a list",
        ),
        (agent(counter=5), "config.agents.a.counter", "expected one of 'auto', 'estimate', got 5"),
        (
            agent(summarizer={"models": "gpt-5"}),
            "a.summarizer.models",
            "expected a list of texts, got 'gpt-5'",
        ),
        (agent(summarizer={"timeout_s": 0}), "a.summarizer.timeout_s", "more than 0"),
        (agent(summarizer={"wait_s": math.nan}), "a.summarizer.wait_s", "nan"),
        (agent(summarizer={"window": 0}), "a.summarizer.window", "0 is too small: expected 1"),
        (agent(summarizer={"max_calls": 1.5}), "a.summarizer.max_calls", "expected a whole number"),
        (agent(summarizer={"max_cost": math.inf}), "a.summarizer.max_cost", "too large"),
        (agent(summarizer={"prompts": 5}), "a.summarizer.prompts", "expected a text, got 5"),
        (
            agent(summarizer={"profile": "cooking"}),
            "a.summarizer.profile",
            "coding, content, general, research, support",
        ),
        (
            agent(summarizer={"base_urls": "https://host"}),
            "a.summarizer.base_urls",
            "expected names, each with a text, got 'https://host'",
        ),
        (
            agent(summarizer={"base_urls": {"openai": 5}}),
            "a.summarizer.base_urls.openai",
            "expected a text, got 5",
        ),
        (
            agent(summarizer={"base_urls": {"google": "https://host"}}),
            "a.summarizer.base_urls.google",
            "is not known; known here: openai, anthropic",
        ),
        (
            agent(summarizer={"base_urls": {"openai": "host/v1"}}),
            "a.summarizer.base_urls.openai",
            "expected an address such as https://host/v1, got 'host/v1'",
        ),
        (agent(dedupe={"similarity": 0}), "a.dedupe.similarity", "more than 0"),
        (agent(**expiring(mode="x")), "a.tools.grep.expire.mode", "'none', 'remove', 'compact'"),
        (agent(**expiring(after_steps=True)), "a.tools.grep.expire.after_steps", "expected a whole number"),
        (agent(**expiring(length="9")), "a.tools.grep.expire.length", "expected a whole number, got '9'"),
        (agent(**expiring(threshold=1.1)), "a.tools.grep.expire.threshold", "at most 1"),
        (agent(**expiring(after=1)), "a.tools.grep.expire.after", "known here: after_steps, mode"),
        (
            expiring(after_steps=-1),
            "config.tools.grep.expire.after_steps",
            "-1 is too small: expected 0 or more",
        ),
        (expiring(length=10**40), "config.tools.grep.expire.length", "too large"),
        ({"tools": {"grep": 5}}, "config.tools.grep", "expected some of expire, got 5"),
        ({"agents": {1: {}}}, "config.agents.1", "write it in quotes"),
        ({"models": {"m": {"window": "big"}}}, "config.models.m.window", "a whole number, got 'big'"),
        ({"models": {"m": {"window": 0}}}, "config.models.m.window", "too small"),
        ({"models": []}, "config.models", "expected names, each with its settings, got a list"),
        ({"store": 5}, "config.store", "expected a text, got 5"),
        (5, "config", "expected a file, a dict, a Config or a list of these, got int"),
        (agent(compact={"max_tokens": 5_000, "token_threshold": 4_000}), "a.compact.max_tokens", "4,000"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(value, where, what):
    with pytest.raises(SettingError) as caught:
        load_config(value)
    assert caught.value.where.endswith(where)
    assert what in caught.value.problem


# proves: D2
@pytest.mark.parametrize(
    ("config", "meant"),
    [
        (agent(compact={"token_treshold": 1}), "token_threshold"),
        (agent(compact={"maxTokens": 1}), "max_tokens"),
        ({"agnets": {}}, "agents"),
        (agent(turn_threshold=3), "compact.turn_threshold"),
        (agent(tools={"grep": {"after_steps": 3}}), "expire.after_steps"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_known_one_that_it_is_most_like(config, meant):
    with pytest.raises(SettingError, match=rf"is not known \(did you mean {meant}\?\); known here: "):
        load_config(config)


def test_an_unknown_setting_that_is_like_no_other_is_refused_without_a_guess():
    with pytest.raises(SettingError, match="colour: is not known; known here: "):
        load_config(agent(colour="red"))


def test_a_share_that_is_given_in_percent_is_refused_with_the_number_to_write():
    with pytest.raises(SettingError, match=r"80 is too large: expected at most 1; for 80 % write 0\.8$"):
        load_config(agent(compact={"threshold_percent": 80}))


def test_a_summarizer_in_a_file_may_be_the_name_of_a_model_or_a_list_of_names(written):
    one = load_config(written("agents: {a: {summarizer: openai/gpt-4o-mini}}"))
    assert one.agents["a"].summarizer == SummarizerSettings(models=("openai/gpt-4o-mini",))
    assert one.origin("agents", "a", "summarizer", "models").endswith(":1")
    several = load_config(agent(summarizer=["openai/gpt-4o-mini", "anthropic/claude-haiku-4-5"]))
    assert several.agents["a"].summarizer.models == ("openai/gpt-4o-mini", "anthropic/claude-haiku-4-5")
    with pytest.raises(SettingError, match="summarizer: expected a text or a list of texts"):
        load_config(agent(summarizer=5))


def test_the_place_of_what_is_wrong_is_its_line(written):
    text = """
        agents:
          a:
            tools:
              grep:
                expire: {after_steps: 2,
                         mode: gone}
        """
    with pytest.raises(SettingError, match=r"^agent\.yaml:7: agents\.a\.tools\.grep\.expire\.mode: expected"):
        load_config(written(text))
    with pytest.raises(SettingError, match=r"^agent\.yaml:3: agents\.a\.tool: is not known"):
        load_config(written("agents:\n  a:\n    tool: {}\n"))
    with pytest.raises(SettingError, match=r"^agent\.toml: agents\.a\.tool: is not known"):
        load_config(written("[agents.a.tool]", "agent.toml"))
    with pytest.raises(SettingError, match=r"^agent\.yaml: expected settings"):
        load_config(written("- 1"))


@pytest.mark.parametrize("struct", [*STRUCTS[1:], ModelSettings])
def test_no_number_may_be_negative(struct):
    for name, hint in field_types(struct).items():
        if not {int, float}.isdisjoint(accepted_types(hint)):
            with pytest.raises(SettingError, match=f"{name}: -1 is too small"):
                load_config(_setting(struct, {name: -1}))


def _setting(struct, values):
    match struct.__name__:
        case "AgentSettings":
            return agent(**values)
        case "Compact":
            return agent(compact=values)
        case "Prune" | "Cap":
            return agent(compact={struct.__name__.lower(): values})
        case "SummarizerSettings":
            return agent(summarizer=values)
        case "Dedupe":
            return agent(dedupe=values)
        case "ModelSettings":
            return {"models": {"m": values}}
    return {"tools": {"grep": {"expire": values}}}


def test_settings_made_in_python_are_checked_too():
    with pytest.raises(SettingError, match=r"config\.agents\.a\.compact\.max_tokens: -5"):
        load_config(Config(agents={"a": AgentSettings(compact=Compact(max_tokens=-5))}))
    made = load_config(agent(compact=Compact(max_tokens=5)))
    assert made.agent("a").compaction.max_tokens == 5


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for name, text in (("a.yaml", "a: [1"), ("a.toml", "a = ["), ("b.yaml", "- 1"), ("c.yaml", "a: b: c")):
        (tmp_path / name).write_text(text)
        with pytest.raises(SettingError, match=name):
            load_config(tmp_path / name)
    (tmp_path / "d.yaml").write_bytes(b"\xff\xfe\x00")
    for name in ("none.yaml", "d.yaml"):
        with pytest.raises(SettingError, match=name):
            load_config(tmp_path / name)


def test_an_agent_that_is_not_configured_is_refused():
    with pytest.raises(SettingError, match="configured: b"):
        load_config({"agents": {"b": {}}}).agent("a")


def test_the_defaults_are_the_budgets():
    shared = set(Compact.__struct_fields__) & set(Budget.__struct_fields__)
    assert shared >= {"max_tokens", "token_threshold", "threshold_percent", "safety_buffer"}
    assert all(getattr(Budget(), name) == getattr(Compact(), name) for name in shared)


# Where it came from


def test_every_value_knows_where_it_came_from(written):
    config = load_config(written(PROMISED))
    researcher = ("agents", "researcher")
    assert config.origin(*researcher, "tools", "web_search", "expire", "after_steps") == "agent.yaml:21"
    assert config.origin(*researcher, "compact", "keep_recent") == "agent.yaml:12"
    assert config.origin(*researcher, "compact", "cap", "share") == "default"
    assert config.origin("store") == "agent.yaml:2"
    assert load_config(written(AS_TOML, "a.toml")).origin(*researcher, "compact", "keep_recent") == "a.toml"
    assert load_config(yaml.safe_load(PROMISED)).origin("store") == "config"
    assert load_config(Config(store="memory://")).origin("store") == "config"
    assert config.place(*researcher, "model") == "agent.yaml:5: agents.researcher.model"


def test_what_a_merge_key_brings_stands_where_it_is_written(written):
    text = """
        agents:
          a: &base
            model: gpt-5
            counter: estimate
          b:
            <<: *base
            model: gpt-6
        """
    config = load_config(written(text))
    assert config.agent("b") == AgentSettings(model="gpt-6", counter="estimate")
    assert config.origin("agents", "b", "counter") == "agent.yaml:5"
    assert config.origin("agents", "b", "model") == "agent.yaml:8"


def test_every_setting_in_force_is_listed_once_with_its_origin(written):
    text = """
        tools: {grep: {expire: {mode: remove}}}
        agents:
          a:
            compact: {cap: off}
            tools:
              grep:
                expire:
                  after_steps: 3
        """
    rows = load_config(written(text)).in_force("a")
    told = list(map(str, rows))
    assert "after_steps = 3 (tool 'grep', agent.yaml:9)" in told
    assert "mode = remove (tool 'grep', agent.yaml:2)" in told
    assert "length = unset (tool 'grep', default)" in told
    assert "compact.cap = off (agent.yaml:5)" in told
    assert "compact.prune.keep_turns = 2 (default)" in told
    assert "handles = on (default)" in told
    names = [row.name for row in rows]
    assert len(set(names)) == len(names)
    assert [row.name for row in load_config(agent(compact=False)).in_force("a") if "compact" in row.name] == [
        "compact"
    ]


def test_all_settings_of_every_struct_are_in_force_somewhere():
    names = {part for row in load_config(expiring(after_steps=1)).in_force() for part in row.path}
    for struct in STRUCTS[1:]:
        assert set(field_types(struct)) <= names
    assert Setting(("summarizer", "models"), ("a", "b"), "x").shown == "[a, b]"


def test_addresses_are_by_provider_and_merged_one_by_one(written):
    first = agent(summarizer={"base_urls": {"openai": "http://a", "anthropic": "http://b"}})
    second = written("agents: {a: {summarizer: {base_urls: {openai: https://c/v1, anthropic: null}}}}")
    config = load_config([first, second])
    assert config.agent("a").summarizer.base_urls == {"openai": "https://c/v1", "anthropic": "http://b"}
    assert [str(row) for row in config.in_force("a") if "base_urls" in row.name] == [
        "summarizer.base_urls.openai = https://c/v1 (agent.yaml:1)",
        "summarizer.base_urls.anthropic = http://b (config)",
    ]
    assert "summarizer.base_urls = unset (default)" in map(str, load_config(None).in_force())


def test_of_several_sources_later_ones_beat_earlier_ones(written):
    first = {"store": "memory://a", **agent(model="m", dedupe=False, **expiring(after_steps=1, length=9))}
    second = written(
        "agents: {a: {tools: {grep: {expire: {after_steps: 2}}}, dedupe: {similarity: 0.5}}, b: {}}"
    )
    config = load_config([first, second])
    assert config.agent("a") == AgentSettings(
        model="m", dedupe=Dedupe(0.5), tools={"grep": ToolSettings(Expiry(after_steps=2, length=9))}
    )
    assert config.agent("b") == AgentSettings()
    expire = ("agents", "a", "tools", "grep", "expire")
    assert [config.origin(*expire, name) for name in ("after_steps", "length")] == ["agent.yaml:1", "config"]
    assert load_config([second, first]).agent("a").tools["grep"].expire.after_steps == 1
    assert load_config([]) == load_config(None) == Config()


# proves: D2
def test_of_two_agents_the_later_ones_compact_is_taken_whole():
    first = agent(model="m", compact={"max_tokens": 500, "prune": {"keep_turns": 9}})
    both = load_config([first, agent(compact={"keep_recent": 3})])
    assert both.agent("a") == AgentSettings(model="m", compact=Compact(keep_recent=3))
    assert both.origin("agents", "a", "compact", "max_tokens") == "default"
    assert load_config([first, agent(counter="estimate")]).agent("a").compaction.max_tokens == 500
    assert load_config([first, agent(compact=False)]).agent("a").is_off


# As it was written before


# proves: D5
def test_a_transform_is_read_as_the_compact_it_was_with_a_warning(written):
    text = """
        agents:
          a:
            transforms:
              - {type: assistant, input: x, output: y, agent_id: z, token_limit: 9000}
              - type: assistant
                token_limit: 6000
        """
    with pytest.warns(DeprecationWarning, match=r"agent\.yaml:4: .*write compact: \{token_threshold: 6000\}"):
        config = load_config(written(text))
    assert config.agent("a") == AgentSettings(compact=Compact(token_threshold=6_000))
    assert config.origin("agents", "a", "compact", "token_threshold") == "agent.yaml:7"


# proves: D5
def test_where_there_is_a_compact_too_it_counts():
    old = {"type": "assistant", "token_limit": 6_000}
    with pytest.warns(DeprecationWarning, match="compact"):
        config = load_config(agent(transforms=[old], compact={"max_tokens": 5}))
    assert config.agent("a").compact == Compact(max_tokens=5)


# proves: D5
@pytest.mark.parametrize(
    ("transforms", "where", "what"),
    [
        ([{"type": "user"}], "transforms.0.type", "expected one of 'assistant', got 'user'"),
        ([{"token_limit": 5}], "transforms.0", "allowed: 'assistant'"),
        ([{"type": "assistant", "limit": 5}], "transforms.0.limit", "token_limit"),
        ([{"type": "assistant", "token_limit": -1}], "transforms.0.token_limit", "0 or more"),
        ({"type": "assistant"}, "transforms", "expected a list"),
        ([5], "transforms.0", "expected some of type"),
    ],
)
def test_other_transforms_are_refused_with_what_is_allowed(transforms, where, what):
    with pytest.raises(SettingError) as caught:
        load_config(agent(transforms=transforms))
    assert caught.value.where == f"config.agents.a.{where}"
    assert what in caught.value.problem


# In the database, and for one request


# proves: A13
def test_the_database_beats_the_file_field_by_field(written):
    store = MemoryStore()
    store.set_setting(ToolSetting("", "grep", Expiry(after_steps=7, mode="remove")))
    store.set_setting(ToolSetting("a", "grep", Expiry(after_steps=0)))
    store.set_setting(ToolSetting("new", "ls", Expiry(length=5)))
    tools = "tools: {grep: {expire: {length: 9, mode: none}}}"
    file = load_config(written(f"agents: {{a: {{model: m, compact: {{keep_recent: 10}}, {tools}}}}}"))
    config = with_database(file, store)
    assert config.agent("a").tools["grep"].expire == Expiry(after_steps=0, mode="remove", length=9)
    assert config.agent(None).tools["grep"].expire == Expiry(after_steps=7, mode="remove")
    assert config.agent("new").tools["ls"].expire == Expiry(length=5)
    expire = ("agents", "a", "tools", "grep", "expire")
    origins = [config.origin(*expire, name) for name in ("after_steps", "mode", "length", "prompt")]
    assert origins == ["database", "database", "agent.yaml:1", "default"]
    assert config.origin("agents", "a", "compact", "keep_recent") == "agent.yaml:1"
    assert with_database(config, store) == config


def test_without_settings_in_the_database_the_configuration_stays_as_it_is():
    config = load_config(agent(model="m"))
    assert with_database(config, MemoryStore()) is config
    assert with_database(config, object()) is config


# proves: A4
def test_an_override_has_what_is_asked_and_nothing_else():
    assert override_of(None) == override_of({}) == override_of({"off": None, "length": None}) == Override()
    asked = {"after_steps": 0, "mode": "compact", "length": 200, "prompt": None, "keep_originals": False}
    assert override_of(asked) == Override(None, False, ({"*": Expiry(0, "compact", length=200)},))
    assert override_of({"off": True}).off
    some = {"length": 9, "tools": {"web_*": {"expire": {"mode": "remove"}}, "*": {"after_steps": 1}}}
    assert override_of(some).tools == ({"web_*": Expiry(mode="remove"), "*": Expiry(1, length=9)},)


@pytest.mark.parametrize(
    ("override", "where", "what"),
    [
        ({"of": True}, "override.of", "known here: off, keep_originals, after_steps, mode"),
        ({"off": 1}, "override.off", "expected true or false, got 1"),
        ({"keep_originals": "no"}, "override.keep_originals", "expected true or false, got 'no'"),
        ({"after_steps": -1}, "override.after_steps", "0 or more"),
        ({"mode": "compress"}, "override.mode", "'none', 'remove', 'compact'"),
        ({1: 1}, "override.1", "is not a name"),
        ({"tools": {"a": {"after_steps": -1}}}, "override.tools.a.after_steps", "0 or more"),
        ({"tools": {"a": {"after": 1}}}, "override.tools.a.after", "did you mean after_steps?"),
        ({"tools": ["a"]}, "override.tools", "expected names, each with its settings"),
        ([], "override", "expected a dict"),
    ],
)
def test_an_override_that_is_wrong_is_refused_with_what_is_allowed(override, where, what):
    with pytest.raises(SettingError) as caught:
        override_of(override)
    assert caught.value.where == where
    assert what in caught.value.problem


def test_later_wishes_beat_earlier_ones_field_by_field_and_unset_is_not_zero():
    assert merge_expiries() == Expiry()
    both = merge_expiries(
        Expiry(after_steps=3, mode="remove", threshold=0.5), Expiry(after_steps=0, length=0)
    )
    assert both == Expiry(after_steps=0, mode="remove", length=0, threshold=0.5)
    assert merge_expiries(both, Expiry()) == both


# proves: A7
@pytest.mark.parametrize(
    ("wishes", "shared"),
    [
        ([], Expiry()),
        ([Expiry(), Expiry(after_steps=3)], Expiry(after_steps=3)),
        ([Expiry(after_steps=3), Expiry(after_steps=0)], Expiry(after_steps=0)),
        (
            [Expiry(2, "compact", "ai-summary", 900), Expiry(5, "remove", "first-n-chars", 90)],
            Expiry(2, "remove", "first-n-chars", 90),
        ),
        ([Expiry(1, "none", length=1), Expiry(5, "compact", length=90)], Expiry(5, "compact", length=90)),
        ([Expiry(mode="remove"), Expiry(5, "compact")], Expiry(5, "compact")),
        ([Expiry(1, "none"), Expiry(mode="remove")], Expiry()),
        (
            [Expiry(1, strategy="relevance", threshold=0.2), Expiry(1, strategy="age", threshold=0.6)],
            Expiry(1, strategy="age", threshold=0.6),
        ),
        ([Expiry(1, prompt="first"), Expiry(0, prompt="second")], Expiry(0, prompt="first")),
    ],
)
def test_results_of_one_message_share_the_most_aggressive_wish_of_those_that_expire(wishes, shared):
    assert most_aggressive(wishes) == shared


def test_settings_under_an_older_name_are_read_with_a_warning(written):
    text = """
        serve:
          plain_http: true
          limits: {take_s: 5, body_pause_s: 3, body_idle_s: 4}
        agents:
          a: {compact: {economy: {risk: 0.2}}, summarizer: {run_in: worker}}
        """
    with pytest.warns(DeprecationWarning, match="is deprecated; write") as warned:
        config = load_config(written(text))
    assert config.serve.allow_insecure_upstreams
    assert config.serve.limits == Limits(write_timeout_s=5, body_idle_s=4)
    assert config.origin("serve", "limits", "write_timeout_s") == "agent.yaml:4"
    assert config.agent("a").compaction.economizing == Economy(max_loss=0.2)
    assert config.agent("a").summarizer.executor == "worker"
    told = [str(one.message).rpartition("/")[2] for one in warned]
    assert sorted(told) == [
        "agent.yaml:3: serve.plain_http: is deprecated; write allow_insecure_upstreams instead",
        "agent.yaml:4: serve.limits.body_pause_s: is deprecated; write body_idle_s instead",
        "agent.yaml:4: serve.limits.take_s: is deprecated; write write_timeout_s instead",
        "agent.yaml:6: agents.a.compact.economy.risk: is deprecated; write max_loss instead",
        "agent.yaml:6: agents.a.summarizer.run_in: is deprecated; write executor instead",
    ]
