"""Settings: where they come from, and what is refused."""

import pytest

import refold
from refold.config import Compact, load_config
from refold.core.errors import SettingError
from refold.tokens.limits import ModelLimits, find


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


@pytest.mark.parametrize("off", ["off", '"off"', "false"])
def test_off_is_off_however_yaml_reads_it(tmp_path, off):
    (tmp_path / "a.yaml").write_text(f"agents: {{a: {{compact: {off}}}}}")
    assert load_config(tmp_path / "a.yaml").agent("a").is_off


def test_the_answers_reserve_is_never_more_than_the_model_can_say():
    config = load_config({"models": {"m": {"window": 100_000, "max_output": 1_000}}})
    assert config.budget(config.agent(None), find("m", config.models).limits).output_reserve == 1_000
    assert config.budget(config.agent(None), ModelLimits()).window == 128_000


@pytest.mark.parametrize(
    ("value", "where", "what"),
    [
        ({"stor": "x"}, "config.stor", "known here: store, models, agents"),
        ({"agents": {"a": {"compct": {}}}}, "config.agents.a.compct", "model, compact"),
        ({"agents": {"a": {"compact": {"max": 1}}}}, "config.agents.a.compact.max", "max_tokens"),
        (
            {"agents": {"a": {"compact": {"max_tokens": 0}}}},
            "config.agents.a.compact.max_tokens",
            "too small",
        ),
        ({"agents": {"a": {"compact": {"threshold_percent": 2}}}}, "threshold_percent", "at most 1"),
        ({"agents": {"a": {"compact": {"strategy": "magic"}}}}, "a.compact.strategy", "'sliding-window'"),
        ({"agents": {"a": {"compact": "maybe"}}}, "config.agents", "maybe"),
        ({"models": {"m": {"window": "big"}}}, "config.models.m.window", "int"),
        ({"models": {"m": {"window": 0}}}, "config.models.m.window", "too small"),
        ({"models": []}, "config.models", "object"),
        ({"store": 5}, "config.store", "str"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(value, where, what):
    with pytest.raises(SettingError) as caught:
        load_config(value)
    assert where in str(caught.value)
    assert what in str(caught.value)


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
    with pytest.raises(SettingError, match="configured are: b"):
        load_config({"agents": {"b": {}}}).agent("a")


def test_the_defaults_are_the_budgets():
    from refold.core.budget import Budget

    assert {name: getattr(Budget(), name) for name in Compact.__struct_fields__ if name != "strategy"} == {
        name: getattr(Compact(), name) for name in Compact.__struct_fields__ if name != "strategy"
    }
