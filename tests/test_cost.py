"""What conversations cost, measured: on some whose charges are known, and on recorded ones."""

import json
from pathlib import Path

import pytest
from benchmarks import lengths, made, ways
from benchmarks.lengths import pieces
from typer.testing import CliRunner

import refold
from refold.cli import app
from refold.cli.bench.cost import DEFAULT, MIN_CACHED, SUMMARY_TOKENS, WAYS, WITH_ECONOMY, Charges, replay
from refold.cli.bench.recorded import load
from refold.cli.bench.trace import Trace
from refold.core.errors import SettingError
from refold.core.expiry import EXPAND, SEARCH
from refold.dialects.rules.targets import check_request
from refold.models.limits import find

MODEL = "claude-sonnet-5"
DATA = Path(__file__).parents[2] / "shared" / "data"
APPEND_ONLY, AS_IT_IS, ECONOMY = WAYS


def talk(steps: int, name: str = "made", size: int = 150) -> Trace:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Read {name}."}]
    for n in range(steps):
        call = {"id": f"c{n}", "type": "function", "function": {"name": "look", "arguments": f'{{"n":{n}}}'}}
        words = " ".join(f"{name}{n}x{k}" for k in range(size))
        messages.append({"role": "assistant", "content": f"Now {n}.", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{n}", "content": words})
    messages.append({"role": "assistant", "content": "Done."})
    return Trace(name, messages, ())


def test_a_request_is_charged_what_begins_the_request_before_as_read_and_all_else_as_written():
    said, charges = talk(40).messages, Charges(MODEL)
    charges.send(said[:20])
    assert (charges.read, charges.written) == (0, charges.size(said[:20]))
    charges.send(said[:22])
    assert charges.read == charges.size(said[:20])
    assert charges.written == charges.size(said[:22])
    changed = [*said[:10], {"role": "user", "content": "Wait."}, *said[11:22]]
    charges.send(changed)
    assert charges.read == charges.size(said[:20]) + charges.size(said[:10])
    limits = find(MODEL).limits
    assert charges.usd == pytest.approx(
        (charges.read * limits.cache_read + charges.written * limits.cache_write) / 1e6
    )


def test_what_is_too_short_for_a_cache_is_never_read_from_it():
    said, charges = talk(5, size=5).messages, Charges(MODEL)
    charges.send(said[:4])
    charges.send(said[:6])
    assert 0 < charges.written < MIN_CACHED
    assert charges.read == 0


def test_sending_everything_costs_what_sending_everything_costs():
    assert replay(talk(30), APPEND_ONLY, MODEL).index == 1


@pytest.mark.parametrize("way", [APPEND_ONLY, *ways.OTHERS], ids=lambda way: way.name)
def test_what_others_send_is_a_request_that_a_provider_takes_and_has_the_task(way):
    """A straw man would prove nothing."""
    trace, charges = talk(120), Charges(MODEL)
    keep = way.begin(charges)
    sizes = []
    for n, message in enumerate(trace.messages):
        if message["role"] == "assistant":
            sent = list(keep(trace.messages[:n]))
            charges.send(sent)
            assert not check_request("openai-chat", {"messages": sent})
            assert trace.messages[1] in sent
            sizes.append(charges.size(sent))
    assert (max(sizes) > ways.TRIGGER) == (way is APPEND_ONLY)


def test_a_summary_of_others_is_paid_for():
    charges = Charges(MODEL)
    said = talk(120).messages
    ways.SummarizeOldest(charges)(said[:-1])
    assert charges.summaries_usd > SUMMARY_TOKENS * find(MODEL).limits.output / 1e6


def test_economy_is_cheaper_than_sending_everything_and_the_default_sends_everything():
    trace = talk(150)
    assert replay(trace, AS_IT_IS, MODEL).index == 1
    row = replay(trace, ECONOMY, MODEL)
    assert row.index < 0.7
    assert row.edits > 1
    assert row.cached > 0.9


WANTED = {EXPAND: lambda n: {"at": 2 * n + 3}, SEARCH: lambda n: {"query": f"made{n}x7", "limit": 3}}


def with_a_large_result() -> list[dict]:
    """200 steps; the first result has 43,000 characters, every other 2,900."""
    made, large = talk(200, size=290).messages, talk(1, size=4_000).messages
    return [*large[:4], *made[4:]]


def looked_up(
    tool: str, model: str, is_large: bool, texts: list[str] | None = None
) -> tuple[float, list[str]]:
    """What 200 steps cost of which every tenth is a look-up, and what the look-ups answered.

    They are for one large result, or for a smaller one each. Where `texts` are given, a tool of another name
    answers with them.
    """
    made = with_a_large_result() if is_large else talk(200).messages
    said, answered = list[dict](), list[str]()
    whole, charges = Charges(model), Charges(model)
    with refold.open("c", store="memory://", model=model, config=WITH_ECONOMY) as chat:
        for n, message in enumerate(made[:-1]):
            step = (n - 2) // 2
            is_look_up = n > 1 and step % 10 == 9
            if message["role"] == "assistant":
                whole.send(said)
                charges.send(chat.fit(dialect="openai-chat").messages)
            if is_look_up and message["role"] == "assistant":
                wanted = WANTED[tool](0 if is_large else max(0, step - 37))
                name = tool if texts is None else "look_up"
                function = {"name": name, "arguments": json.dumps(wanted)}
                message = {**message, "tool_calls": [{**message["tool_calls"][0], "function": function}]}
            elif is_look_up:
                text = chat.call(tool, wanted) if texts is None else texts[len(answered)]
                answered.append(text)
                message = {**message, "content": text}
            said.append(message)
            chat.append(message, dialect="openai-chat")
    return charges.usd / whole.usd, answered


# proves: X29
@pytest.mark.parametrize(
    ("tool", "model", "is_large"),
    [(EXPAND, MODEL, False), (EXPAND, MODEL, True), (SEARCH, MODEL, False), (SEARCH, "gpt-5", False)],
)
def test_a_look_up_costs_what_it_would_cost_by_a_tool_of_another_name(tool, model, is_large):
    own, texts = looked_up(tool, model, is_large)
    other, _ = looked_up(tool, model, is_large, texts)
    assert any(text.startswith("[refold #") for text in texts) or tool == SEARCH
    assert own == pytest.approx(other, abs=0.05)
    assert own < 0.5


def test_a_model_without_known_prices_is_refused():
    with pytest.raises(SettingError, match="not known"):
        Charges("gpt-4")


def test_the_table_of_a_length_has_every_way(monkeypatch, capsys):
    monkeypatch.setattr(lengths, "MODELS", (MODEL,))
    monkeypatch.setattr(lengths, "ALL_WAYS", [APPEND_ONLY, ways.OTHERS[0]])
    monkeypatch.setattr(made, "STEPS", (8,))
    lengths.main(steps="8", jobs=1, brief=True)
    assert "8 steps, claude-sonnet-5" in capsys.readouterr().out


def test_conversations_are_cut_and_joined_to_the_length_that_is_asked_for():
    found = pieces([talk(25, "a"), talk(25, "a"), talk(5, "b"), talk(9, "c")], 20)
    assert [piece.source for piece in found] == ["a", "a", "mixed"]
    for piece in found:
        assert sum(message["role"] == "assistant" for message in piece.messages) == 20
        assert [message["role"] for message in piece.messages[:2]] == ["system", "user"]
        calls = [call["id"] for m in piece.messages for call in m.get("tool_calls", ())]
        assert len(calls) == len(set(calls))
    assert "Read a." in str(found[1].messages[1])


def test_nothing_is_said_twice_but_for_the_beginning_of_a_piece():
    found = pieces([talk(90, "a")], 20)
    results = [m["content"] for piece in found for m in piece.messages if m["role"] == "tool"]
    assert len(results) == len(set(results)) >= 70


def test_the_command_compares_configurations_on_ones_own_history(tmp_path):
    (tmp_path / "chat.json").write_text(json.dumps(talk(130).messages))
    (tmp_path / "a.yaml").write_text("agents: {default: {compact: {economy: {keep_tokens: 2000}}}}\n")
    policy = str(tmp_path / "a.yaml")
    command = ["bench", "cost", str(tmp_path / "chat.json"), "--models", MODEL, "--policy", policy]
    run = CliRunner().invoke(app, [*command, "--json"])
    assert run.exit_code == 0, run.output
    rows = {row["way"]: row for row in json.loads(run.stdout)}
    assert [rows[name]["index"] for name in ("append only", DEFAULT)] == [1, 1]
    assert rows[policy]["edits"] > 0
    for flags in (["--brief"], []):
        assert "a.yaml" in CliRunner().invoke(app, [*command, *flags]).stdout


@pytest.mark.skipif(not DATA.exists(), reason="notice: ../shared/data is not here, so nothing is replayed")
@pytest.mark.parametrize(
    ("model", "steps", "average", "worst"),
    [(model, *bar) for model in (MODEL, "gpt-5") for bar in ((40, 1.0, 1.05), (200, 0.6, 1.05))],
)
def test_recorded_conversations_cost_less_with_economy_and_hardly_ever_more(model, steps, average, worst):
    found = [replay(one, ECONOMY, model) for one in pieces(load(DATA, least=2_000), steps)]
    assert sum(row.index for row in found) / len(found) <= average
    assert max(row.index for row in found) <= worst
