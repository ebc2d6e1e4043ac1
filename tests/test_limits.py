"""Model limits: how names are matched, what users may say, and what the packaged table holds."""

import importlib.util
import warnings
from datetime import date
from importlib.metadata import version
from pathlib import Path

import pytest

from refold.models import limits
from refold.models.limits import ModelLimits, ModelSettings, find, parts, provider_of, table

ROOT = Path(__file__).parents[1]
MODELS = table().models
PROVIDERS = ["openai", "anthropic", "google", "meta", "mistral", "deepseek", "qwen", "xai"]


@pytest.fixture(autouse=True)
def nothing_warned_yet(monkeypatch):
    monkeypatch.setattr(limits, "_warned", set())


# proves: C2
@pytest.mark.parametrize("id", MODELS)
def test_every_model_is_found_by_its_id(id):
    assert find(id).id == id
    assert find(id).limits == MODELS[id]


def test_every_other_name_leads_to_its_model():
    for name, id in table().aliases.items():
        assert find(name).id == id


# proves: C2
@pytest.mark.parametrize(
    ("name", "id"),
    [
        ("openai/gpt-5", "gpt-5"),
        ("anthropic/claude-sonnet-5", "claude-sonnet-5"),
        ("anthropic:claude-sonnet-5", "claude-sonnet-5"),
        ("openrouter/anthropic/claude-sonnet-4.5", "claude-sonnet-4-5"),
        ("bedrock/eu.anthropic.claude-sonnet-4-5-20250929-v1:0", "claude-sonnet-4-5"),
        ("us.meta.llama3-3-70b-instruct-v1:0", "llama-3.3-70b"),
        ("vertex_ai/claude-opus-4-1@20250805", "claude-opus-4-1"),
        ("models/gemini-2.5-pro", "gemini-2.5-pro"),
        ("azure/gpt-4o", "gpt-4o"),
        ("ft:gpt-4o-2024-08-06:acme::8x", "gpt-4o"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("ollama/llama3.1:8b", "llama-3.1-8b"),
    ],
)
def test_a_provider_before_the_name_does_not_matter(name, id):
    assert find(name).id == id


@pytest.mark.parametrize(
    ("name", "window", "max_output"),
    [
        ("openai/gpt-4o", 128_000, 16_384),
        ("openai/gpt-4o-mini", 128_000, 16_384),
        ("openai/gpt-4-turbo", 128_000, 4_096),
        ("openai/gpt-4", 8_192, 8_192),
        ("openai/gpt-3.5-turbo", 16_385, 4_096),
        ("anthropic/claude-3.5-sonnet", 200_000, 8_192),
        ("claude-3-5-sonnet-20240620", 200_000, 8_192),
        ("anthropic/claude-3-opus", 200_000, 4_096),
        ("anthropic/claude-3-sonnet", 200_000, 4_096),
        ("claude-3-haiku-20240307", 200_000, 4_096),
        ("google/gemini-pro", 32_000, 8_192),
        ("gemini-1.0-pro", 32_000, 8_192),
        ("google/gemini-1.5-pro", 1_000_000, 8_192),
        ("google/gemini-pro-1.5", 1_000_000, 8_192),
    ],
)
def test_models_of_the_years_before_are_known(name, window, max_output):
    limits = find(name).limits
    assert (limits.window, limits.max_output) == (window, max_output)


@pytest.mark.parametrize(
    ("name", "id"),
    [
        ("gpt-5-2025-08-07", "gpt-5"),
        ("gpt-4-0613", "gpt-4"),
        ("claude-sonnet-4-5-20250929", "claude-sonnet-4-5"),
        ("claude-sonnet-4-20250514", "claude-sonnet-4-0"),
        ("claude-opus-5@20260724", "claude-opus-5"),
        ("claude-3-5-haiku-latest", "claude-3-5-haiku"),
        ("gemini-3.1-pro-preview", "gemini-3.1-pro"),
        ("gemini-2.5-flash-lite-preview-09-2025", "gemini-2.5-flash-lite"),
        ("qwen/qwen3.8-max-0902", "qwen3.8-max"),
        ("deepseek/deepseek-v4-pro:free", "deepseek-v4-pro"),
    ],
)
def test_a_date_or_a_variant_after_the_name_does_not_matter(name, id):
    assert find(name).id == id


@pytest.mark.parametrize("name", ["GPT-5", "Gpt_5", "gpt 5", "OpenAI/GPT-5"])
def test_spelling_does_not_matter(name):
    assert find(name).id == "gpt-5"


# proves: C2
def test_the_longest_known_beginning_is_taken():
    assert find("gpt-5-something-new").id == "gpt-5"
    assert find("gpt-5-mini-something-new").id == "gpt-5-mini"
    assert find("gpt-4o-2024-05-13").id == "gpt-4o-2024-05-13"
    assert find("gpt-4-turbo-2024-04-09").id == "gpt-4-turbo"


@pytest.mark.parametrize("name", ["gpt-50", "gpt-5x", "gpt", "claude", "xgpt-5", "my-gpt-5", "o11", "模型"])
def test_a_name_that_only_looks_alike_is_unknown(name):
    with pytest.warns(UserWarning, match="not known"):
        assert find(name).id is None


@pytest.mark.parametrize(
    ("name", "id"),
    [
        ("gpt-5.99", "gpt-5.6-sol"),
        ("gpt-5.99-mini", "gpt-5.4-mini"),
        ("claude-opus-4-9", "claude-opus-4-8"),
        ("claude-opus-4-2", "claude-opus-4-1"),
        ("gemini-3.2-flash", "gemini-3-flash"),
        ("deepseek-v4.1-pro", "deepseek-v4-pro"),
    ],
)
def test_a_new_version_is_taken_for_the_newest_known_before_it(name, id):
    assert find(name).id == id


def test_a_size_is_never_taken_for_another():
    assert find("gpt-5.5-mini").id == "gpt-5.4-mini"
    assert find("gemini-3.8-flash-lite").id == "gemini-3.5-flash-lite"
    with pytest.warns(UserWarning, match="not known"):
        assert find("o3-nano").id is None


@pytest.mark.parametrize("name", ["claude-opus-77", "gpt-77", "grok-77", "claude-haiku-5"])
def test_another_first_number_or_an_older_version_is_another_model(name):
    with pytest.warns(UserWarning, match="not known"):
        assert find(name).id is None


# proves: C2
def test_an_unknown_model_gets_the_default_and_one_warning():
    with pytest.warns(
        UserWarning, match=r"my-model.*128,000.*4,096.*models: \{my-model: \{window: …"
    ) as caught:
        assert [find("my-model"), find("my-model")] == [limits.FoundModel(ModelLimits(128_000, 4_096))] * 2
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="other-model"):
        find("other-model")


@pytest.mark.filterwarnings("ignore:The model")
def test_names_without_end_are_neither_searched_nor_remembered(monkeypatch):
    monkeypatch.setattr(limits, "_MOST_WARNINGS", 3)
    for n in range(9):
        assert find(f"{n}" + "." * 1_000_000).id is None
    assert [len(name) for name in limits._warned] == [256] * 3


@pytest.mark.parametrize("name", [None, ""])
def test_no_model_gets_the_default_without_a_warning(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find(name) == limits.FoundModel(ModelLimits())


# proves: C2
def test_what_a_user_says_of_a_model_of_their_own_is_taken():
    mine = {"my-model": ModelSettings(window=8_000, max_output=1_000)}
    for name in ("my-model", "My_Model", "local/my-model", "my-model-v2", "my-model:latest"):
        assert find(name, mine) == limits.FoundModel(ModelLimits(8_000, 1_000), "my-model")
    with pytest.warns(UserWarning, match="my-modelling"):
        assert find("my-modelling", mine).id is None


def test_a_name_with_a_provider_is_meant_as_it_stands():
    mine = {"azure/gpt-5": ModelSettings(window=100_000)}
    assert find("azure/gpt-5-2025-08-07", mine).limits.window == 100_000
    assert find("openai/gpt-5", mine).limits.window == 400_000


def test_what_a_user_leaves_out_stays_as_the_table_has_it():
    known = MODELS["claude-opus-5"]
    found = find("anthropic/claude-opus-5", {"claude-opus-5": ModelSettings(max_output=4_096)})
    assert found.limits.max_output == 4_096
    assert (found.limits.window, found.limits.output, found.limits.flags) == (
        known.window,
        known.output,
        known.flags,
    )


def test_a_users_entry_yields_to_one_that_explains_more_of_the_name():
    mine = {"gpt-5": ModelSettings(window=9_000)}
    assert find("gpt-5-mini", mine).id == "gpt-5-mini"
    assert find("gpt-5-2025-08-07", mine).limits.window == 9_000


def test_a_smaller_window_makes_the_rest_smaller():
    found = find("gpt-5", {"gpt-5": ModelSettings(window=9_000)}).limits
    assert (found.max_output, found.max_input) == (9_000, None)
    assert find("mine", {"mine": ModelSettings(window=2_000)}).limits.max_output == 2_000


@pytest.mark.parametrize(
    ("name", "provider"),
    [
        ("my-claude-proxy", "anthropic"),
        ("claude-opus-77", "anthropic"),
        ("azure/gpt-77", "openai"),
        ("o3-mini", "openai"),
        ("gemini-77", "google"),
        ("ollama/llama77", "meta"),
        ("ollama/qwen77", "qwen"),
        ("groq/deepseek-r1-distill-llama-70b", "deepseek"),
        ("open-mixtral-8x7b", "mistral"),
        ("xai/grok-77", "xai"),
        ("my-model", None),
        (None, None),
    ],
)
def test_the_maker_is_known_by_the_family(name, provider):
    assert provider_of(name) == provider


def test_the_family_and_the_table_agree_on_the_maker():
    assert {id: provider_of(id) for id in MODELS} == {id: entry.provider for id, entry in MODELS.items()}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_every_provider_has_models_with_limits_and_prices(provider):
    priced = [entry for entry in MODELS.values() if entry.provider == provider and entry.input]
    assert priced
    assert all(entry.output for entry in priced)


def test_every_entry_makes_sense():
    default = ModelLimits()
    for id, entry in MODELS.items():
        assert entry.provider in PROVIDERS, id
        assert date.fromisoformat(entry.date or "") <= date.fromisoformat(table().date), id
        assert 0 < entry.max_output <= entry.window, id
        assert entry.max_input is None or entry.max_input < entry.window, id
        assert default.max_output <= entry.max_output, id
        assert (entry.cache_read or 0) <= (entry.input or 0) <= (entry.output or 0), id
        assert entry.cache_write is None or entry.cache_write >= (entry.input or 0), id
        assert set(entry.flags) <= {"system-inside", "no-prefill", "binds-thinking"}, id
        assert not entry.flags or entry.provider == "anthropic", id


def test_no_two_names_are_spellings_of_one():
    names = [*MODELS, *table().aliases]
    assert len({parts(name) for name in names}) == len(names)


def test_what_recorded_requests_showed_is_flagged():
    assert "system-inside" in find("claude-opus-4-8").limits.flags
    assert "system-inside" in find("claude-fable-5").limits.flags
    assert "no-prefill" not in find("claude-sonnet-4-5").limits.flags


def test_the_table_is_small_and_has_a_model_a_line():
    text = Path(limits.__file__).with_name("models.json").read_text("utf-8")
    assert len(text) < 60_000
    assert len(text.splitlines()) == len(MODELS) + len(table().aliases) + 5


def test_the_table_is_what_the_script_writes():
    """Where this fails, run `python scripts/models.py`."""
    pytest.importorskip("genai_prices", reason="genai-prices, from which the table is made, is not installed")
    if table().source != f"genai-prices {version('genai-prices')}":
        pytest.skip(f"the table was made from {table().source}, another version is installed")
    spec = importlib.util.spec_from_file_location("models", ROOT / "scripts" / "models.py")
    assert spec
    assert spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    made, _ = script.build(date.fromisoformat(table().date))
    assert script.text(made) == script.TABLE.read_text("utf-8")
