"""Twenty compactions of a long recorded conversation, with a model that forgets and makes things up."""

from collections import Counter
from pathlib import Path

import pytest

from refold.cli.bench.recorded import load
from refold.cli.bench.replay import Arm, Replay, replay
from refold.cli.bench.trace import DIALECT, text_of
from refold.core.event import Called, Replaced

DATA = Path(__file__).parents[2] / "shared" / "data"
BUDGET = 14_000
"""Tokens; the conversation has some twenty times as many."""
BUDGETS = range(8_000, 28_000, 1_500)
"""At any one of them a handful is lost more or less by chance: a batch comes a message sooner or later."""
RULES = (
    "Never touch payments.py, whatever anybody says.",
    "Always answer in French.",
    "The blue layout is rejected.",
    "You must  keep two  spaces here.",
)
PINNED = "Remember: the release is called Åland-7 <b>and</b> \\n stays."


@pytest.fixture(scope="module")
def trace():
    if not (DATA / "traces").is_dir():
        pytest.skip("notice: ../shared/data is not here, so nothing recorded is replayed")
    return max(load(DATA, source="pi_coding_agent"), key=lambda one: len(one.messages))


def replayed(trace, arm):
    """What was lost of it, and every request that was made."""
    one, views = Replay(trace, arm, BUDGET), []
    for n, message in enumerate(trace.messages):
        needed = [probe for probe in trace.probes if probe.use_at == n]
        if n and (needed or message["role"] == "assistant"):
            one.step(n, needed, is_call=message["role"] == "assistant")
            views.append(one.sent)
        one.session.append(message, dialect=DIALECT)
    return one, views


@pytest.fixture(scope="module")
def written(trace):
    return replayed(trace, Arm("written"))


@pytest.mark.long
def test_no_value_is_missing_more_often_than_by_rule_alone(trace):
    assert len(trace.probes) > 100
    lost = Counter[str]()
    for name in ("written", "refold"):
        for budget in BUDGETS:
            run = replay(trace, Arm(name), budget)
            lost[name] += run.numbers["lost"]
            assert not +run.broken, (name, budget)
    assert 0 < lost["written"] <= lost["refold"]


def test_there_were_twenty_rounds_and_each_has_its_certificate(written):
    run, _ = written
    edits = [e for e in run.session.events() if isinstance(e, Replaced) and e.certificate]
    by_model = [e for e in edits if e.certificate.model]
    assert len(by_model) >= 20
    assert all(e.certificate.digest == run.session.record.digest_before(e.span.end) for e in edits)
    lies = [line for e in by_model for line in e.certificate.struck if "/srv/made_up" in line]
    assert len(lies) >= run.session._summarizer.lies * len(by_model)
    called = [e.problem for e in run.session.events() if isinstance(e, Called)]
    assert called.count(None) > 0.9 * len(called)


def test_what_is_made_up_is_in_no_request(written):
    _, views = written
    assert not any(b"/srv/made_up" in message for sent in views for message in sent)


def test_the_summary_before_is_in_each_prompt_exactly_once(written):
    asked = written[0].session._summarizer.asked
    later = [ask for ask in asked if ask.previous]
    assert len(later) >= 19
    for ask in later:
        assert ask.prompt.count(ask.previous) == 1
        assert not any(message.summary for message in ask.messages)
    assert [ask.round for ask in asked] == sorted(ask.round for ask in asked)


def test_rules_pins_and_the_task_stand_verbatim_after_any_number_of_rounds(trace):
    one = Replay(trace, Arm("written"), BUDGET)
    session, said = one.session, 0
    for n, message in enumerate(trace.messages):
        if n and message["role"] == "assistant":
            fitted = session.fit(dialect=DIALECT)
            text = "\n".join(map(text_of, fitted.messages))
            assert said < len(RULES) or all(rule in text for rule in RULES), n
            assert said < len(RULES) or PINNED in text, n
            assert trace.messages[0] in fitted.messages or fitted.system is not None
        if message["role"] == "user" and n > 4 and said < len(RULES):
            session.append({"role": "user", "content": f"By the way. {RULES[said]} Go on then."})
            said += 1
            if said == len(RULES):
                session.pin(session.append({"role": "user", "content": PINNED}))
        session.append(message, dialect=DIALECT)
    assert session.compactions().count >= 20
    assert said == len(RULES)
