"""A real model over HTTP, small and bad at it: what it writes must be caught, and the work goes on."""

import json

import pytest

import real_model
import refold
from refold.core.event import Called, Replaced
from refold.core.view import fold
from refold.dialects.rules.targets import check_request
from refold.summaries.providers import ModelSummarizer

SHORT = """{sections}Summarize the conversation under these headings, in few words:
{{{{headings}}}}

{{{{messages}}}}
"""


@pytest.fixture(scope="module")
def model():
    with real_model.running(window=2048) as model:
        yield model


@pytest.fixture(params=["openai", "anthropic"])
def summarizer(request, model):
    rest = {"api_key": "none", "window": model.window}
    if request.param == "openai":
        return ModelSummarizer(f"openai/{model.name}", base_url=model.openai_url, **rest)
    return ModelSummarizer(f"anthropic/{model.name}", base_url=model.anthropic_url, **rest)


@pytest.fixture
def opened(summarizer, tmp_path):
    """A short conversation and short prompts: the model takes its time."""

    def open(sections=""):
        (tmp_path / "system.md").write_text("You summarize conversations.")
        (tmp_path / "conversation.md").write_text(SHORT.format(sections=sections))
        settings = {"prompts": str(tmp_path), "max_tokens": 200, "timeout_s": 300}
        chat = refold.open(
            "deploy",
            store="memory://",
            model="gpt-5",
            config={"agents": {"default": {"summarizer": settings}}},
            summarizer=summarizer,
        )
        chat.append(list(messages()))
        return chat

    return open


def messages():
    yield {"role": "user", "content": "Deploy release 4.2.1 to staging. Never restart the database."}
    for n, said in enumerate(("port 8431 is taken by pid 2210", "build_77 ok", "E_TIMEOUT at host stage-3")):
        call = {"name": "run", "arguments": json.dumps({"command": f"deploy.sh --try {n}"})}
        yield {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": f"c{n}", "type": "function", "function": call}],
        }
        yield {"role": "tool", "tool_call_id": f"c{n}", "content": f"{said}\n" * 20}
    yield {"role": "user", "content": "Is it up?"}


def demand_sound(chat):
    fitted = chat.fit()
    assert not check_request("openai-chat", fitted.request)
    assert fold(chat.events()) == chat.view()
    text = json.dumps(fitted.messages)
    assert all(
        value in text for value in ("4.2.1", "Never restart the database.", "8431", "stage-3", "build_77")
    )


def test_a_summary_without_sections_is_used_or_asked_for_once_more_and_then_done_without(opened):
    chat = opened()
    result = chat.compact(keep_recent=1)
    (called,) = [event for event in chat.events() if isinstance(event, Called)]
    assert called.calls in (1, 2)
    assert called.usage.input > 0
    (edit,) = [event for event in chat.events() if isinstance(event, Replaced)]
    assert (edit.certificate.model is None) == (called.problem is not None)
    assert result.tokens_saved > 0
    demand_sound(chat)


def test_whatever_it_writes_only_what_is_true_is_shown(opened):
    chat = opened("---\nsections: [Notes]\n---\n")
    chat.compact(keep_recent=1)
    (called,) = [event for event in chat.events() if isinstance(event, Called)]
    (edit,) = [event for event in chat.events() if isinstance(event, Replaced)]
    assert (edit.certificate.model is None) == (called.problem is not None)
    text = edit.shown[0].text
    assert not any(line in text for line in edit.certificate.struck)
    demand_sound(chat)
