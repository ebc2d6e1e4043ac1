"""Recorded traffic through the gateway's own part, and a real model behind it."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

import real_model
from gates import gate
from refold.config.config import load_config
from refold.dialects import replies
from refold.serve.incoming import ClientDialect, read_request
from refold.serve.recorder import Recorder
from refold.serve.service import Service
from refold.stores.memory import MemoryStore
from test_dialects import RECORDED, compact, exchanges, recorded

OFF = {"agents": {"default": {"compact": False}}}


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    service = Service(load_config(OFF | {"serve": {"inject_tools": "off"}}), MemoryStore())
    yield Recorder(service)
    service.close()


def unmarked(value: Any) -> Any:
    """Without marks for caches: the gateway sets those in messages itself."""
    match value:
        case dict():
            return {key: unmarked(one) for key, one in value.items() if key != "cache_control"}
        case list():
            return list(map(unmarked, value))
    return value


@recorded
@pytest.mark.parametrize("name", list(RECORDED)[:3])
def test_every_recorded_request_goes_upstream_as_it_came(name: str, recorder: Recorder) -> None:
    dialect = cast(ClientDialect, RECORDED[name])
    passed = 0
    for n, exchange in enumerate(exchanges(name)):
        request = exchange["request"]
        incoming = read_request(dialect, json.dumps(request).encode())
        if exchange["status"] != 200 or incoming.provider_history:
            continue
        prepared = recorder.prepare(incoming._replace(owner="o", conversation=f"c{n}"))
        sent = json.loads(prepared.body)
        if isinstance(request.get("input"), str):
            request["input"] = [{"role": "user", "content": request["input"]}]
        for key in {*sent, *request} - {"messages"}:
            assert compact(sent.get(key)) == compact(request.get(key)), key
        assert compact(unmarked(sent.get("messages"))) == compact(unmarked(request.get("messages")))
        assert sum("cache_control" in json.dumps(one) for one in sent.get("messages", ())) <= 4
        passed += 1
    assert passed > 20


@recorded
@pytest.mark.parametrize("name", list(RECORDED)[:3])
def test_every_recorded_answer_is_known_again_when_it_is_sent_back(name: str, recorder: Recorder) -> None:
    dialect = cast(ClientDialect, RECORDED[name])
    known = 0
    for n, exchange in enumerate(exchanges(name)):
        request, reply = exchange["request"], exchange["response"]
        incoming = read_request(dialect, json.dumps(request).encode())
        if exchange["status"] != 200 or incoming.provider_history or replies.take(reply) is None:
            continue
        placed = recorder.prepare(incoming._replace(owner="o", conversation=f"c{n}")).placed
        recorder.record_reply(placed, reply, reply)
        field = "input" if dialect == "openai-responses" else "messages"
        history = (
            request[field]
            if isinstance(request[field], list)
            else [{"role": "user", "content": request[field]}]
        )
        again = {
            **request,
            field: [*history, *_sent_back(dialect, reply), {"role": "user", "content": "Go on"}],
        }
        incoming = read_request(dialect, json.dumps(again).encode())
        next = recorder.prepare(incoming._replace(owner="o", conversation=f"c{n}"))
        assert next.placed.key == placed.key
        known += 1
    assert known > 20


def _sent_back(dialect: ClientDialect, reply: dict[str, Any]) -> list[Any]:
    """As a client would that leaves reasoning out."""
    match dialect:
        case "openai-chat":
            return [reply["choices"][0]["message"]]
        case "openai-responses":
            return [item for item in reply["output"] if item["type"] != "reasoning"]
    kept = [block for block in reply["content"] if "thinking" not in block["type"]]
    return [{"role": "assistant", "content": kept}]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_real_model_answers_in_both_dialects_for_longer_than_its_window(stream: bool) -> None:
    with real_model.running(window=768) as model:
        upstream = cast(Any, SimpleNamespace(openai=model.openai_url, url=model.anthropic_url))
        models = {"models": {model.name: {"window": model.window, "max_output": 40}}}
        with gate(MemoryStore(), upstream, config=models) as gated:
            for talk in (_chat, _messages):
                history = [{"role": "user", "content": "Tell me about harbors."}]
                for n in range(5):
                    answer = talk(gated, model.name, history, stream)
                    assert answer.strip()
                    history += [
                        {"role": "assistant", "content": answer},
                        {
                            "role": "user",
                            "content": f"{n}: and what of " + "ships and cranes and cargo " * 30,
                        },
                    ]
            assert len(gated.conversations()) == 2
            assert all(len(gated.said(key)) == 10 for key in gated.conversations())


def _chat(gated: Any, model: str, history: list[Any], stream: bool) -> str:
    client = gated.openai()
    request = {"model": model, "messages": history, "max_completion_tokens": 8}
    if not stream:
        return client.chat.completions.create(**request).choices[0].message.content
    chunks = client.chat.completions.create(**request, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def _messages(gated: Any, model: str, history: list[Any], stream: bool) -> str:
    client = gated.anthropic()
    request = {"model": model, "messages": history, "max_tokens": 8}
    if not stream:
        return client.messages.create(**request).content[0].text
    with client.messages.stream(**request) as events:
        return events.get_final_text()
