"""How long results are needed, in conversations whose needs are known and in recorded ones."""

import json
from contextlib import closing
from fractions import Fraction
from math import comb
from pathlib import Path

import apsw
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import refold
from refold.cli import app
from refold.cli.bench.recorded import load
from refold.cli.bench.trace import DIALECT, text_of
from refold.config.config import load_config
from refold.config.validate import plain_fields as fields
from refold.core.event import Expiry
from refold.models.count import Units, counter
from refold.policies.learn_expiry import CONFIDENCE, ENOUGH, LEAST, lasts, propose, spared, tried
from refold.policies.usage import REDUCED, past

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"
COUNT = Units(counter("gpt-5")).message
ROOMY = {"gpt-5": {"window": 10_000_000}}
LONG = " ".join(f"row-{n}-{n * 7919}" for n in range(150))
"""A result of which little is left when it expires."""


def user(text):
    return {"role": "user", "content": text}


def says(text):
    return {"role": "assistant", "content": text}


def calls(tool, result, id="1", **arguments):
    """One step: a call, and its result."""
    call = {"id": id, "type": "function", "function": {"name": tool, "arguments": json.dumps(arguments)}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    return [asked, {"role": "tool", "tool_call_id": id, "content": result}]


def idle(steps):
    return [says(f"thinking about it {'again ' * n}") for n in range(steps)]


def read(*messages, config=None):
    with refold.open("a", store="memory://", model="gpt-5", config=config) as chat:
        chat.append([user("Help me."), *messages])
        return past(chat.events(), COUNT)


def needed(*messages):
    """For how many steps results were needed, by tool."""
    return [(need.of.tools[0], need.steps) for need in read(*messages).needs]


# What counts as a need


def test_a_result_is_needed_until_the_step_that_takes_a_value_from_it():
    told = calls("look", "the code is QX7-4411")
    assert needed(*told, *idle(3), says("It is QX7-4411.")) == [("look", 4)]
    assert needed(*told, says("It is QX7-4411.")) == [("look", 1)]
    assert needed(*told, *idle(3), says("It is done.")) == []


@pytest.mark.parametrize(
    "value", ["src/app/main.py", "2024-05-20", "4711.50", "get_user", "https://a.org/b?c=1", "$1200.50"]
)
def test_what_nobody_could_guess_is_a_value(value):
    told = calls("look", f"there is {value}:12: something")
    assert needed(*told, *idle(1), says(f"I see ({value}).")) == [("look", 2)]


def test_plain_words_are_none_unless_they_are_given_to_a_tool_as_a_whole():
    told = calls("look", "the shop in oslo sells red bicycles")
    assert needed(*told, says("There are red bicycles.")) == []
    assert needed(*told, *idle(1), *calls("buy", "done", what="red bicycles")) == [("look", 2)]


def test_a_value_that_somebody_said_before_is_not_the_results():
    assert needed(user("Cancel QX7-4411."), *calls("look", "QX7-4411 is open"), says("QX7-4411 it is")) == []
    assert needed(says("I look for QX7-4411"), *calls("look", "QX7-4411 is open"), says("QX7-4411!")) == []


def test_of_several_results_with_a_value_the_newest_is_the_one_that_is_needed():
    first, second = calls("look", "QX7-4411 is open"), calls("list", "QX7-4411, QX7-9032", id="2")
    assert needed(*first, *idle(5), *second, says("QX7-4411")) == [("list", 1)]


def test_what_the_agent_wrote_itself_is_needed_of_no_result_any_more():
    told = calls("look", "QX7-4411 is open, QX7-9032 is not")
    assert needed(*told, says("QX7-4411"), says("QX7-4411 and QX7-9032")) == [("look", 1), ("look", 2)]


def test_what_it_only_thought_may_be_gone_and_is_needed_again():
    thought = {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "QX7-4411", "signature": "s"}],
    }
    use = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "QX7-4411"}
    asked = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    assert needed(*asked, thought, *idle(1), says("QX7-4411")) == [("look", 1), ("look", 3)]


def test_what_is_taken_from_one_result_in_one_step_is_one_need():
    told = calls("look", "QX7-4411 QX7-9032 QX7-5555")
    assert needed(*told, says("QX7-4411, QX7-9032, QX7-5555")) == [("look", 1)]


def test_what_expiry_would_leave_cannot_be_missed():
    near, far = "row-0-0", "ordinary"
    (kept,) = read(*calls("look", f"{LONG} {far}"), *calls("use", "done", id="2", key=near)).needs
    (gone,) = read(*calls("look", f"{LONG} {far} {LONG}"), *calls("use", "done", id="2", key=far)).needs
    assert (bool(kept.only_in), bool(gone.only_in)) == (False, True)


# What was asked for again

SOON = {"agents": {"default": {"tools": {"look": {"expire": {"after_steps": 1, "length": 10}}}}}}


def expired():
    """A conversation in which the result at #2 is hidden by now, and who has it."""
    chat = refold.open("a", store="memory://", model="gpt-5", config=SOON)
    chat.append([user("Help me."), *calls("look", LONG), *idle(3)])
    chat.fit()
    assert "row-9-" not in chat.view().messages[2].text
    return chat


def test_what_an_agent_expands_was_needed():
    with expired() as chat:
        edit = chat.view().items[2].edit
        for n, place in enumerate((2, edit)):
            chat.append(calls("refold_expand", LONG, id=f"e{n}", at=place))
        chat.append(calls("refold_expand", "there is none", id="e2", at="who knows"))
        found = past(chat.events(), COUNT)
    assert [(need.of.at, need.steps, need.is_asked) for need in found.needs] == [(2, 4, True), (2, 5, True)]
    assert [(one.line.tools, one.had_expired) for one in found.results] == [(("look",), True)]


@pytest.mark.parametrize("verb", ["undo", "restore"])
def test_what_people_bring_back_was_needed(verb):
    with expired() as chat:
        chat.undo() if verb == "undo" else chat.restore(2)
        (need,) = past(chat.events(), COUNT).needs
    assert (need.of.at, need.steps, need.is_asked) == (2, 4, True)


def test_an_expanded_value_is_still_the_first_results():
    with expired() as chat:
        chat.append([*calls("refold_expand", LONG, id="e", at=2), says("row-9-71271")])
        needs = past(chat.events(), COUNT).needs
    assert sorted((need.of.at, need.steps, need.is_asked) for need in needs) == [(2, 4, True), (2, 5, False)]


# How long that makes results last


@given(st.integers(1, 2_000), st.sampled_from([0.5, 0.9, 0.95, 0.99, 0.999]))
def test_no_more_uses_are_spared_than_confidence_allows(seen, cover):
    def at_most(beyond):
        """How likely it is that no more of those seen come later than they should."""
        late = 1 - Fraction(str(cover))
        return sum(comb(seen, n) * late**n * (1 - late) ** (seen - n) for n in range(beyond + 1))

    spare, most = spared(seen, cover), 1 - Fraction(str(CONFIDENCE))
    assert at_most(0 if spare is None else spare + 1) > most
    assert spare is None or at_most(spare) <= most


@given(st.lists(st.integers(1, 300), min_size=1, max_size=400), st.sampled_from([0.8, 0.95, 0.99]))
def test_results_last_for_as_many_uses_as_were_wanted(steps, cover):
    after = lasts(steps, cover)
    assert sum(one <= after for one in steps) >= cover * len(steps)
    assert after >= LEAST
    assert spared(len(steps), cover) is not None or after >= max(steps)
    assert lasts([*steps, *steps], cover) <= max(after, max(steps))


def worked(results=ENOUGH, wait=3, text=LONG, tail=30, tool="look"):
    """A conversation in which each result's word is given to a tool after some steps, and then no more."""
    said, names = [], [f"name number {chr(97 + n % 26)}{n // 26}" for n in range(results)]
    for n, name in enumerate(names):
        said += calls(tool, f"{text} {name} {text}", id=f"{tool}{n}", page=n)
        said += [*idle(wait - 1), *calls("pick", "ok", id=f"{tool}p{n}", who=name)]
    return [*said, *idle(tail)]


def learned(*pasts, cover=0.99):
    return {lesson.tool: lesson for lesson in propose(pasts, cover)}


def test_results_last_as_long_as_they_were_needed_and_longer_where_few_were_seen():
    look = learned(read(*worked(wait=3)))["look"]
    assert look.expire is not None
    assert look.steps == [3] * ENOUGH
    assert 3 < look.expire.after_steps < 9
    many = learned(*[read(*worked(wait=3))] * 15)["look"]
    assert many.expire == Expiry(3, REDUCED.mode, REDUCED.compact_mode, REDUCED.length)
    assert (look.trial.late, many.trial.late) == (0, 0)


def test_tools_are_left_alone_for_a_reason():
    far = [calls("far", f"{LONG} name number {n} {LONG}", id=f"f{n}") for n in range(ENOUGH)]
    uses = [calls("pick", "ok", id=f"u{n}", who=f"name number {n}") for n in range(ENOUGH)]
    late = [message for one in (*far, *uses) for message in one]
    lessons = learned(read(*late), read(*worked(ENOUGH - 1, tool="rare"), *worked(text="", tool="short")))
    assert not any(lesson.expire for lesson in lessons.values())
    assert {tool: lesson.why for tool, lesson in lessons.items()} == {
        "rare": "too few results",
        "far": "needed for long",
        "short": "already small",
        "pick": "already small",
    }


def test_what_nobody_takes_up_lasts_only_as_long_as_it_takes_to_read_it():
    quiet = [calls("look", LONG.replace("row", f"r{n}"), id=str(n)) for n in range(60)]
    lesson = learned(read(*(message for one in quiet for message in one)))["look"]
    assert lesson.expire is not None
    assert (lesson.used, lesson.expire.after_steps) == (0, LEAST)


def together(n, name):
    """Results of two tools in one message, of which only one is needed, and late."""
    uses = [{"type": "tool_use", "id": f"{tool}{n}", "name": tool, "input": {}} for tool in ("look", "list")]
    results = [
        {"type": "tool_result", "tool_use_id": f"look{n}", "content": f"{LONG} {name} {LONG}"},
        {"type": "tool_result", "tool_use_id": f"list{n}", "content": LONG, "is_error": n % 2 == 0},
    ]
    pick = {"type": "tool_use", "id": f"p{n}", "name": "pick", "input": {"who": name}}
    done = {"type": "tool_result", "tool_use_id": f"p{n}", "content": "ok"}
    answered = [{"role": "assistant", "content": uses}, {"role": "user", "content": results}]
    return [
        *answered,
        *idle(4),
        {"role": "assistant", "content": [pick]},
        {"role": "user", "content": [done]},
    ]


def test_results_that_came_in_one_message_last_as_long_as_the_one_that_is_needed_longest():
    said = [message for n in range(ENOUGH) for message in together(n, f"name number {n} of all")]
    lessons = learned(read(*said, *idle(40)))
    after = {tool: lessons[tool].expire.after_steps for tool in ("look", "list")}
    assert lessons["list"].needs == ()
    assert min(after.values()) >= 5
    assert sum(one.is_error for one in lessons["list"].results) == ENOUGH // 2
    assert lessons["look"].trial.missed == 0


@pytest.mark.parametrize("after", [2, 4, 7])
def test_a_replay_saves_and_misses_what_a_session_does(after):
    one = [message for n in range(5) for message in together(n, f"name number {n} of all")]
    said = [user("Help me."), *one, *worked(5, wait=5), *idle(5)]
    rules = {"look": Expiry(after, REDUCED.mode, REDUCED.compact_mode, REDUCED.length)}
    trials = tried([read(*said[1:])], rules).values()
    agent = {"dedupe": "off", "tools": {"look": {"expire": fields(rules["look"])}}}
    saved = missed = 0
    with refold.open("a", store="memory://", model="gpt-5", config=config(agent)) as chat:
        for message in said:
            if message["role"] == "assistant":
                shown = "\n".join(text_of(one) for one in chat.fit(dialect="anthropic").messages)
                saved += sum(one.tokens for one in chat.get_all()) - chat.view().tokens
                missed += any(who not in shown for who in names([message]))
            chat.append(message)
    assert sum(trial.saved for trial in trials) == saved > 0
    assert sum(trial.missed for trial in trials) == missed


def names(said):
    """What tools were given in these conversations."""
    for message in said:
        blocks = message["content"] if isinstance(message["content"], list) else []
        yield from (block["input"]["who"] for block in blocks if block.get("input"))
        given = [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        yield from (one["who"] for one in given if "who" in one)


def config(agent):
    return {"models": ROOMY, "agents": {"default": agent}}


def test_what_was_learned_is_tried_where_it_was_not_learned():
    near, far = [read(*worked(wait=2, tail=60)) for _ in range(2)], [read(*worked(wait=30)) for _ in range(2)]
    alike, apart = learned(*near, *near)["look"], learned(near[0], far[0], near[1], far[1], cover=0.6)["look"]
    assert alike.unseen is not None
    assert (alike.unseen.uses, alike.unseen.missed) == (4 * ENOUGH, 0)
    assert apart.unseen is not None
    assert apart.unseen.missed == 2 * ENOUGH > apart.trial.missed
    assert learned(*near, far[0])["look"].unseen is None


# The command


def run(*args, code=0):
    result = CliRunner().invoke(app, ["learn", *map(str, args)])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Five conversations with tools, in the folder where commands are run."""
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path}/refold.db"
    for n in range(5):
        with refold.open(f"chat-{n}", store=url, model="gpt-5") as chat:
            chat.append([user("Help me."), *worked(wait=3), *worked(3, tool="rare: tool")])
    return url


def test_what_is_printed_is_a_configuration(store, tmp_path):
    run("-o", "learned.yaml")
    text = Path("learned.yaml").read_text()
    assert run().stdout == text
    told = json.loads(run("--json").stdout)
    (look,) = (one for one in told["tools"] if one["proposed"])
    assert fields(load_config("learned.yaml").agent("default").tools["look"].expire) == look["proposed"]
    assert (look["results"], look["uses"], look["steps"]["longest"]) == (5 * ENOUGH, 5 * ENOUGH, 3)
    assert f"saves {look['learned_from']['saved']:,} of {look['learned_from']['tokens']:,} tokens" in text
    assert f"saves {look['not_learned_from']['saved']:,}" in text
    assert "now: never expires → compact after" in text
    assert f"rare: tool: too few results (15, and {ENOUGH} are the least)" in text


def test_odd_names_of_tools_and_agents_are_still_yaml(store):
    odd = 'off: "a#b'
    with refold.open("odd", store=store, model="gpt-5") as chat:
        chat.append([user("Help me."), *worked(tool=odd), *worked(tool="no")])
    run("odd", "--agent", "yes", "-o", "learned.yaml")
    assert {odd, "no"} <= load_config("learned.yaml").agent("yes").tools.keys()


def test_one_conversation_is_learned_from_alone(store):
    told = json.loads(run("chat-1", "--json").stdout)
    assert told["conversations"] == 1
    assert all(one["not_learned_from"] is None for one in told["tools"])
    assert "no conversation 'chat-9'" in run("chat-9", code=1).output


def test_what_is_in_force_now_is_named_be_it_in_a_file_or_in_the_database(store):
    tools = "tools:\n  look: {expire: {after_steps: 9, mode: remove}}\n"
    Path("refold.yaml").write_text(f"{tools}agents: {{ann: {{}}, bob: {{}}}}\n")
    assert "now: remove after 9 steps → compact after" in run("--agent", "ann").stdout
    assert CliRunner().invoke(app, ["config", "--set", "bob.look.after_steps=1"]).exit_code == 0
    assert "now: remove after 1 step → compact after" in run("--agent", "bob").stdout
    assert "now: remove after 9 steps → compact after" in run("--agent", "ann").stdout
    assert "configured: ann, bob" in run("--agent", "eve", code=2).output


def test_what_a_fork_shares_is_counted_once(store):
    before = json.loads(run("--json").stdout)
    with refold.open("chat-0", store=store) as chat, chat.fork("again") as fork:
        fork.append(says("Done."))
    after = json.loads(run("--json").stdout)
    assert after["conversations"] == before["conversations"] + 1
    count = [
        [(one["tool"], one["results"], one["uses"]) for one in told["tools"]] for told in (before, after)
    ]
    assert count[0] == count[1]


def test_a_damaged_conversation_is_left_out_and_named(store, tmp_path):
    first = "SELECT min(place) FROM refold_entry WHERE place & 0xffffffff = 5"
    with closing(apsw.Connection(str(tmp_path / "refold.db"))) as connection:
        connection.execute(f"UPDATE refold_entry SET body = x'78ff' WHERE place = ({first})")
    result = run("--json")
    assert json.loads(result.stdout)["conversations"] == 4
    assert "chat-0 is skipped" in result.stderr


def test_where_there_is_nothing_to_learn_from_it_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "There is no store" in run(code=1).output
    with refold.open("a", store="sqlite:///refold.db") as chat:
        chat.append([user("Hello."), says("Hello.")])
    assert "without tool results" in run(code=1).output
    assert "without tool results" in run("--json", "--owner", "ann", code=1).output
    assert run("--cover", "1", code=2).output


def test_nothing_to_propose_is_a_configuration_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refold.open("a", store="sqlite:///refold.db", model="gpt-5") as chat:
        chat.append([user("Help me."), *worked(3)])
    run("-o", "learned.yaml")
    assert load_config("learned.yaml").agents == {}
    assert f"look: too few results (3, and {ENOUGH} are the least)" in Path("learned.yaml").read_text()


# On recorded conversations

SOURCES = ("tau_bench_airline", "livemcpbench", "swe_agent")


@pytest.fixture(scope="module", params=SOURCES)
def recorded(request):
    """Traces with their probes, and what they teach."""
    traces = load(DATA, request.param, least=0) if DATA.exists() else []
    if not traces:
        pytest.skip(f"no recorded conversations of {request.param} at {DATA}")
    return traces, [learned_from(trace) for trace in traces]


def learned_from(trace):
    with refold.open("a", store="memory://", model="gpt-5") as chat:
        chat.append(list(trace.messages), dialect=DIALECT)
        return past(chat.events(), COUNT)


def lost(traces, rules):
    """Probes whose value stands nowhere in the view at the moment of use."""
    tools = {tool: {"expire": fields(rule)} for tool, rule in rules.items()}
    missing = 0
    for trace in traces:
        with refold.open("a", store="memory://", model="gpt-5", config=config({"tools": tools})) as chat:
            for n, message in enumerate(trace.messages):
                needed = [probe.value for probe in trace.probes if probe.use_at == n]
                if n and (needed or message["role"] == "assistant"):
                    fitted = chat.fit(dialect=DIALECT)
                    shown = "\n".join([*map(text_of, fitted.messages), str(fitted.system)]) if needed else ""
                    missing += sum(value not in shown for value in needed)
                chat.append(message, dialect=DIALECT)
    return missing


def probes(traces):
    return sum(len(trace.probes) for trace in traces)


def proposed(pasts, cover):
    return {one.tool: one.expire for one in propose(pasts, cover) if one.expire is not None}


@pytest.mark.parametrize("cover", [0.95, 0.99])
def test_what_one_half_teaches_loses_no_more_of_what_the_other_really_needed_than_it_says(recorded, cover):
    traces, pasts = recorded
    rules = [proposed(pasts[half::2], cover) for half in (0, 1)]
    assert all(rules)
    assert lost(traces[1::2], rules[0]) + lost(traces[::2], rules[1]) <= (1 - cover) * probes(traces)


def test_settings_that_nobody_learned_lose_more_than_that(recorded):
    traces, pasts = recorded
    rules = {one.tool: Expiry(1, "remove") for one in propose(pasts, 0.99)}
    assert lost(traces, rules) > (1 - 0.99) * probes(traces)


def test_the_page_shows_what_the_command_prints(tmp_path, monkeypatch):
    """Where they differ, the page gets what this prints."""
    file = DATA / "traces" / "swe_agent.jsonl"
    if not file.exists():
        pytest.skip(f"no recorded conversations at {DATA}")
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["import", str(file)]).exit_code == 0
    printed = run().stdout
    assert f"```yaml\n{printed}```" in (ROOT / "docs" / "howto" / "learn.md").read_text(), printed
