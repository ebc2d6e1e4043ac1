"""Money: a view is made smaller before it must be only where that pays, and it is told what came of it."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

import refold
from refold.core.cache_cost import CacheTerms, Prices, batch, break_even, stake
from refold.core.event import Replaced
from refold.models.limits import find

MODEL = "claude-sonnet-4-5"
KEEP = 3_000


def config(**economy) -> dict:
    return {"agents": {"default": {"compact": {"economy": {"keep_tokens": KEEP, **economy}}}}}


def step(n: int) -> list[dict]:
    call = {
        "id": f"call_{n}",
        "type": "function",
        "function": {"name": "read", "arguments": f'{{"page": {n}}}'},
    }
    words = " ".join(f"word{n}x{k}" for k in range(120))
    return [
        {"role": "assistant", "content": f"Page {n} now.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"call_{n}", "content": words},
    ]


def talk(steps: int, model: str = MODEL, settings: dict | None = None):
    """A session after so many steps, and the report of every request."""
    chat = refold.open(
        "task", store="memory://", model=model, config=config() if settings is None else settings
    )
    chat.append({"role": "user", "content": "Read the book."}, dialect="openai-chat")
    reports = []
    for n in range(steps):
        reports.append(chat.fit(dialect="openai-chat").report)
        chat.append(step(n), dialect="openai-chat")
    return chat, reports


def acted(reports) -> list[int]:
    return [n for n, report in enumerate(reports) if report.edits]


prices = st.builds(lambda read, more: Prices(read, read * more), st.floats(0.01, 5), st.floats(1.01, 20))


@given(prices, st.integers(0, 10**6), st.integers(1, 10**6))
def test_at_the_break_even_what_was_saved_is_what_it_cost(prices, kept, removed):
    calls = break_even(prices, kept, removed)
    assert calls * removed * prices.read == pytest.approx(kept * (prices.write - prices.read))


@given(
    prices,
    st.integers(100, 10**5),
    st.integers(1, 5_000),
    st.floats(0.2, 5).filter(lambda x: abs(x - 1) > 0.05),
)
def test_no_other_size_of_a_batch_is_cheaper(prices, kept, per_step, times):
    def each_step(size: float) -> float:
        carried, anew = prices.read * size / 2, prices.read * prices.rewrite_ratio * kept
        return carried + anew * per_step / size

    best = batch(prices, kept, per_step)
    assert each_step(best) < each_step(best * times)


def test_a_loss_is_never_larger_than_what_may_be_lost():
    prices = Prices(0.1, 1.25)
    at_stake = stake(prices, 0.05, said=20_000, carried=400_000, shown=400_000, rewritten=0)
    assert at_stake == pytest.approx(0.05 * (400_000 + 12.5 * 20_000))
    terms = CacheTerms(prices, calls=1_000, stake=at_stake)
    most = int(at_stake / prices.rewrite_ratio)
    assert terms.accepts(terms.weigh(10_000, most))
    assert not terms.accepts(terms.weigh(10_000, most + 10))


def test_what_would_pay_only_after_the_calls_that_are_expected_is_left():
    prices = Prices(0.1, 1.25)
    terms = CacheTerms(prices, calls=10, stake=float("inf"))
    assert terms.accepts(terms.weigh(removed=1_000, kept=800))
    assert not terms.accepts(terms.weigh(removed=1_000, kept=1_000))


def test_what_would_not_pay_before_the_next_edit_waits_though_a_large_result_stays_in_sight():
    chat = refold.open("task", store="memory://", model=MODEL, config=config())
    chat.append({"role": "user", "content": "Read the book."}, dialect="openai-chat")
    acted_at = [0]
    for n in range(120):
        edits = chat.fit(dialect="openai-chat").report.edits
        if edits:
            worth = chat.savings()[-1].worth
            assert worth.after <= worth.calls == n - acted_at[-1]
            acted_at.append(n)
        call, result = step(n)
        large = " ".join(f"large{n}x{k}" for k in range(4_000)) if n % 20 == 19 else result["content"]
        chat.append([call, {**result, "content": large}], dialect="openai-chat")
    assert len(acted_at) > 3


def test_without_the_setting_nothing_is_done_before_the_threshold():
    _, reports = talk(60, settings={})
    assert acted(reports) == []


def test_where_it_pays_a_view_is_made_smaller_long_before_the_window_is_full():
    chat, reports = talk(120)
    assert len(acted(reports)) > 1
    assert all(reports[n].fired == ("economy",) for n in acted(reports))
    assert chat.view().tokens < sum(one.tokens for one in chat.get_all()) / 3
    firsts = [event for event in chat.events() if isinstance(event, Replaced) and event.worth]
    assert len(firsts) == len(acted(reports))
    for event in firsts:
        assert event.worth.after <= event.worth.calls
        assert event.worth.removed > 0
        assert event.worth.saved > 0
        assert not event.worth.was_forced


def test_where_the_prices_are_not_known_it_waits_for_the_window():
    settings = config()
    settings["models"] = {"nobody": {"window": 200_000, "max_output": 1_000}}
    _, reports = talk(120, "nobody", settings)
    assert acted(reports) == []


def test_a_short_conversation_is_left_alone():
    _, reports = talk(15)
    assert acted(reports) == []


def test_what_may_be_lost_decides_when_it_is_begun():
    first = {risk: acted(talk(120, settings=config(max_loss=risk))[1])[:1] for risk in (0.0, 0.02, 0.5)}
    assert first[0.0] == []  # nothing was saved yet that could be put at risk
    assert first[0.5] < first[0.02]


def test_when_the_cache_is_cold_anyway_there_is_nothing_to_wait_for(monkeypatch):
    warm, _ = talk(30)
    assert not warm.fit(dialect="openai-chat").report.edits
    now = time.time()
    monkeypatch.setattr("refold.session.triggers.time.time", lambda: now + 299)
    assert not warm.fit(dialect="openai-chat").report.edits
    monkeypatch.setattr("refold.session.triggers.time.time", lambda: now + 3_600)
    assert warm.fit(dialect="openai-chat").report.edits
    (event,) = [one for one in warm.events() if isinstance(one, Replaced) and one.worth]
    assert event.worth.was_cold
    assert event.worth.rewritten == 0


TOOL = {"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}


def test_with_tools_that_are_new_no_batch_is_waited_for_but_what_may_be_lost_still_counts():
    chat, _ = talk(14, settings=config(max_loss=1.0))
    assert not chat.fit(dialect="openai-chat").report.edits
    assert chat.fit(dialect="openai-chat", tools=[TOOL]).report.edits
    careful, _ = talk(14)
    assert not careful.fit(dialect="openai-chat", tools=[TOOL]).report.edits


def test_tools_that_come_and_go_are_not_new_each_time():
    chat, _ = talk(0)
    acted = 0
    for n in range(60):
        acted += bool(chat.fit(dialect="openai-chat", tools=[TOOL] if n % 2 else None).report.edits)
        chat.append(step(n), dialect="openai-chat")
    assert acted <= len([n for n in talk(60)[1] if n.edits]) + 1


def test_a_history_that_is_not_kept_here_is_not_made_smaller_for_money():
    """Nobody would remember what was hidden in the last request: each would be another one."""
    chat, _ = talk(120)
    history = whole(chat)
    assert refold.fit(history, model=MODEL, config=config(), dialect="openai-chat") == history


def whole(chat) -> list[dict]:
    with refold.open("copy", store="memory://", model=MODEL) as copy:
        copy.append([one.message for one in chat.get_all()])
        return copy.fit(dialect="openai-chat").messages


def test_what_somebody_took_back_stays_until_the_window_asks():
    chat, _ = talk(60, settings=config(max_loss=0.5))
    assert chat.view().items[-1].edit is None
    while any(item.edit is not None for item in chat.view().items):
        chat.undo()
    shown = chat.view().tokens
    assert not chat.fit(dialect="openai-chat").report.edits
    assert chat.view().tokens == shown


def test_its_edits_say_why():
    chat, _ = talk(120)
    edit = next(event for event in chat.events() if isinstance(event, Replaced))
    assert "costs more than to hide it" in edit.why
    assert "compact.economy" in edit.why


def test_an_explicit_expiry_and_the_window_ask_nobody_whether_they_pay():
    tools = {"read": {"expire": {"after_steps": 2, "mode": "remove"}}}
    settings = {"agents": {"default": {"tools": tools, "compact": {"economy": "on"}}}}
    _, reports = talk(8, settings=settings)
    assert acted(reports)
    small = {"models": {MODEL: {"window": 8_000, "max_output": 500}}, **config(keep_tokens=50_000)}
    chat, reports = talk(40, settings=small)
    assert any("threshold" in report.fired for report in reports)
    worths = [event.worth for event in chat.events() if isinstance(event, Replaced) and event.worth]
    assert worths
    assert all(worth.was_forced for worth in worths)


def test_the_task_is_there_and_everything_hidden_can_be_had():
    chat, _ = talk(120)
    messages = chat.fit(dialect="openai-chat").messages
    assert {"role": "user", "content": "Read the book."} in messages
    assert "word3x7" in chat.expand(next(hit.at for hit in chat.search("word3x7")))


def test_a_new_process_goes_on_with_the_same_numbers(tmp_path):
    url = f"sqlite:///{tmp_path}/agent.db"
    with refold.open("task", store=url, model=MODEL, config=config()) as chat:
        chat.append({"role": "user", "content": "Read the book."}, dialect="openai-chat")
        for n in range(80):
            chat.fit(dialect="openai-chat")
            chat.append(step(n), dialect="openai-chat")
        known = chat.record.live.state
        sums = (known.carried, known.shown, known.rewritten, known.fresh)
    assert known.carried > known.shown > 0
    assert known.rewritten > 0
    with refold.open("task", store=url, model=MODEL, config=config()) as again:
        state = again.record.live.state
        assert (state.carried, state.shown, state.rewritten, state.fresh) == sums


def test_what_was_expected_stands_beside_what_the_provider_reported():
    """The provider here is one whose cache works as it says: what was sent before, up to the first change."""
    chat, sent = talk(0)[0], []
    for n in range(120):
        messages = chat.fit(dialect="openai-chat").messages
        sizes = [len(str(message)) // 4 for message in messages]
        same = next((k for k, (a, b) in enumerate(zip(sent, messages, strict=False)) if a != b), len(sent))
        sent = messages
        asked, result = step(n)
        usage = {"prompt_tokens": sum(sizes), "completion_tokens": 30}
        usage["prompt_tokens_details"] = {"cached_tokens": sum(sizes[:same])}
        reply = {"object": "chat.completion", "model": MODEL, "usage": usage}
        chat.append({**reply, "choices": [{"message": asked, "finish_reason": "tool_calls"}]})
        chat.append(result, dialect="openai-chat")
    found = chat.savings()
    assert len(found) > 1
    limits = find(MODEL).limits.cached
    for one in found[:-1]:
        assert one.calls > one.worth.after
        assert one.saved > 0
        assert one.rewritten == pytest.approx(one.worth.rewritten, rel=0.5, abs=1_500)
    assert limits.rewrite_ratio == pytest.approx(11.5)


@pytest.mark.parametrize(
    ("economy", "message"), [({"max_loss": 2}, "too large"), ({"keep": 1}, "keep_tokens"), ("maybe", "on")]
)
def test_bad_settings_are_refused(economy, message):
    with pytest.raises(refold.RefoldError, match=message):
        refold.open("t", store="memory://", config={"agents": {"default": {"compact": {"economy": economy}}}})
