"""The API over real HTTP: every route, what it refuses, who may see what, that its description is true."""

import hashlib
import json
import subprocess
import sys
from datetime import datetime
from urllib.parse import quote

import pytest

import refold
from apis import running, tool_loop
from mem0_stub import Mem0Stub
from refold.core.event import Named
from refold.serve.endpoint import ENDPOINTS
from refold.session.results import EXCERPT_CHARS
from refold.testing.scribe import Scribe
from served import until

AT = "/api/conversations/talk"
JSON = {"content-type": "application/json"}
TOKENS = {"ann": ("read", "append", "edit"), "bob": ("read",), "root": ("read", "append", "edit", "admin")}


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/log.db"


@pytest.fixture
def http(url):
    with running(url) as run:
        run.http.post("/api/conversations", json={"id": "talk", "model": "m", "title": "To Oslo"})
        yield run.http


@pytest.fixture
def talk(http):
    """With 61 messages, which are too many for the window."""
    http.post(f"{AT}/messages", json={"messages": tool_loop(30)})
    return http


def ok(answer, status=200):
    assert answer.status_code == status, answer.text
    return answer.json()


def why(answer, status):
    assert answer.status_code == status, answer.text
    assert set(answer.json()["error"]) == {"code", "message"}
    return answer.json()["error"]["message"]


# Conversations


def test_a_conversation_is_begun_once(http):
    row = ok(http.post("/api/conversations", json={"id": "new", "model": "gpt-5", "title": "A plan"}), 201)
    assert (row["id"], row["title"], row["model"], row["messages"], row["status"]) == (
        *("new", "A plan", "gpt-5"),
        *(0, "idle"),
    )
    assert "already" in why(http.post("/api/conversations", json={"id": "new"}), 409)
    assert len(ok(http.post("/api/conversations", json={}), 201)["id"]) == 32


def test_the_title_is_what_was_given_or_the_first_request_or_the_id(http):
    ok(http.post("/api/conversations", json={"id": "plain"}), 201)
    assert ok(http.get("/api/conversations/plain"))["title"] == "plain"
    said = [{"role": "user", "content": "Please  find\n" + "the way " * 30}]
    ok(http.post("/api/conversations/plain/messages", json={"messages": said}), 201)
    title = ok(http.get("/api/conversations/plain"))["title"]
    assert title.startswith("Please find the way")
    assert len(title) == EXCERPT_CHARS
    assert ok(http.patch("/api/conversations/plain", json={"title": "Mine"}))["title"] == "Mine"
    assert ok(http.patch("/api/conversations/plain", json={"model": "gpt-5"}))["model"] == "gpt-5"
    assert ok(http.get("/api/conversations/plain"))["title"] == "Mine"


def test_a_title_is_an_event_like_any_other_and_the_view_ignores_it(tmp_path):
    with refold.open("talk", store=f"sqlite:///{tmp_path}/a.db") as chat:
        chat.append({"role": "user", "content": "Hello"})
        before = chat.view()
        assert chat.name(title="A title", model="gpt-5") == 1
        assert chat.view().items == before.items
        named = list(chat.events())[-1]
        assert isinstance(named, Named)
        assert (named.title, named.model) == ("A title", "gpt-5")
        lines = list(chat.export())
    copy = refold.load(lines, store=f"sqlite:///{tmp_path}/b.db")
    assert list(copy.export()) == lines
    assert copy.record.live.state.title == "A title"
    command = [sys.executable, "-m", "refold", "log", "talk", "--store", f"sqlite:///{tmp_path}/a.db"]
    assert "title 'A title', model 'gpt-5'" in subprocess.run(command, capture_output=True, text=True).stdout


def test_the_list_is_paged_the_newest_first_and_looked_through_by_title_or_id(http):
    for n in range(12):
        ok(
            http.post(
                "/api/conversations", json={"id": f"c{n}", "title": f"Plan {'BLUE' if n % 3 else 'red'}"}
            ),
            201,
        )
    found, cursor = [], None
    while True:
        asked = {"limit": 5} | ({"cursor": cursor} if cursor else {})
        page = ok(http.get("/api/conversations", params=asked))
        found += [row["id"] for row in page["conversations"]]
        cursor = page["next"]
        if cursor is None:
            break
    assert found == [*(f"c{n}" for n in reversed(range(12))), "talk"]
    blue = ok(http.get("/api/conversations?q=blue"))["conversations"]
    assert [row["id"] for row in blue] == ["c11", "c10", "c8", "c7", "c5", "c4", "c2", "c1"]
    assert [row["id"] for row in ok(http.get("/api/conversations?q=C11"))["conversations"]] == ["c11"]
    assert "cursor" in why(http.get("/api/conversations?cursor=nonsense"), 400)


def test_a_cursor_goes_on_though_its_conversation_was_erased(http):
    for n in range(6):
        ok(http.post("/api/conversations", json={"id": f"c{n}"}), 201)
    page = ok(http.get("/api/conversations?limit=3"))
    ok(http.delete("/api/conversations/c3"))
    rest = ok(http.get("/api/conversations", params={"cursor": page["next"]}))
    assert [row["id"] for row in rest["conversations"]] == ["c2", "c1", "c0", "talk"]


def test_a_row_follows_what_others_write(http, url):
    assert ok(http.get(AT))["messages"] == 0
    with refold.open("talk", store=url) as chat:
        chat.append({"role": "user", "content": "Hello"})
    (row,) = ok(http.get("/api/conversations"))["conversations"]
    assert (row["messages"], row["events"]) == (1, 2)
    assert datetime.fromisoformat(row["updated"]) >= datetime.fromisoformat(row["created"])


def test_one_conversation_tells_what_it_takes_and_saves(talk):
    before = ok(talk.get(AT))
    assert before["overflow"]["is_overflow"] is True
    assert (before["overflow"]["limit"], before["cost"]["input_price_per_million"]) == (8_000, 3.0)
    assert before["cost"]["saved_usd"] == 0
    ok(talk.post(f"{AT}/compact", json={"target_tokens": 2_000}))
    ok(talk.post(f"{AT}/messages", json={"messages": tool_loop(2, start=30)}), 201)
    after = ok(talk.get(AT))
    tokens = after["tokens"]
    assert tokens["shown"] < before["tokens"]["shown"] < tokens["recorded"]
    assert tokens["saved"] == round(1 - tokens["shown"] / tokens["recorded"], 4)
    assert (after["compactions"], after["edits"]) == (1, 1)
    steps = ok(talk.get(f"{AT}/steps"))["steps"]
    unsent = sum(
        said - sum(step["tokens"].values())
        for step, said in zip(steps[-2:], _said_before(talk, steps[-2:]), strict=True)
    )
    assert after["cost"]["saved_usd"] == pytest.approx(unsent * 3 / 1_000_000, abs=1e-6)
    assert after["cost"]["spent_usd"] == 0


def _said_before(http, steps):
    """Tokens that had been said when each step was made."""
    said = ok(http.get(f"{AT}/messages?limit=500"))["messages"]
    return [sum(one["tokens"] for one in said if one["at"] < step["at"]) for step in steps]


def test_what_summaries_cost_is_told_and_an_unknown_price_is_none(url):
    with running(url, summarizer=Scribe()) as run:
        run.http.post("/api/conversations", json={"id": "talk", "model": "nobody-knows-it"})
        run.http.post(f"{AT}/messages", json={"messages": tool_loop(3)})
        cost = ok(run.http.get(AT))["cost"]
    assert cost == {"saved_usd": None, "spent_usd": 0.0, "input_price_per_million": None}


def test_erasing_names_those_who_inherit(talk):
    ok(talk.post(f"{AT}/fork", json={"id": "fork", "at": 5}), 201)
    assert ok(talk.get(AT))["forks"] == ["fork"]
    assert ok(talk.get("/api/conversations/fork"))["parent"] == {"id": "talk", "at": 5}
    assert ok(talk.delete(AT)) == {"heirs": ["fork"]}
    why(talk.get(AT), 404)
    assert ok(talk.get("/api/conversations/fork"))["messages"] == 5
    ok(talk.post("/api/conversations", json={"id": "talk"}), 201)
    assert ok(talk.get(AT))["messages"] == 0
    ok(talk.delete("/api/conversations/fork?with_forks=1"))
    why(talk.get("/api/conversations/fork"), 404)


def test_nothing_of_forks_that_are_erased_too_stays_in_memory(url):
    with running(url) as run:
        for id in ("talk", "other"):
            run.http.post("/api/conversations", json={"id": id, "model": "m"})
            ok(run.http.post(f"/api/conversations/{id}/messages", json={"messages": tool_loop(3)}), 201)
        for id, parent in (("fork", "talk"), ("fork of fork", "fork")):
            ok(run.http.post(f"/api/conversations/{parent}/fork", json={"id": id, "at": 5}), 201)
            ok(run.http.post(f"/api/conversations/{id}/messages", json={"messages": tool_loop(1)}), 201)
        assert len({one.conversation for one in run.service._sessions}) == 4
        ok(run.http.delete(f"{AT}?with_forks=1"))
        assert {one.conversation.conversation for one in run.service._sessions} == {"other"}


# What was said, and what is shown


def test_messages_are_paged_by_index_and_know_how_they_are_shown(talk):
    ok(talk.post(f"{AT}/compact", json={"target_tokens": 2_000}))
    ok(talk.post(f"{AT}/pin", json={"at": 3}))
    page = ok(talk.get(f"{AT}/messages?start=0&limit=4"))
    assert page["total"] == 61
    task, call, result, other = page["messages"]
    assert (task["index"], task["message"]["role"], task["shown"], task["edit"]) == (0, "user", "whole", None)
    (part,) = call["message"]["parts"]
    assert part == {"type": "tool-call", "call_id": "c0", "tool": "grep", "input": '{"n":0}'}
    assert result["message"]["parts"][0]["call_id"] == "c0"
    assert (result["tools"], result["is_pinned"], result["shown"]) == (["grep"], True, "whole")
    assert (other["shown"], other["edit"]) == ("hidden", 62)
    last = ok(talk.get(f"{AT}/messages?start=-2"))["messages"]
    assert [one["index"] for one in last] == [59, 60]
    assert ok(talk.get(f"{AT}/messages?start=61"))["messages"] == []
    assert [one["index"] for one in ok(talk.get(f"{AT}/messages?start=30&limit=3"))["messages"]] == [
        30,
        31,
        32,
    ]


def test_a_long_text_is_cut_and_says_so(http):
    said = [{"role": "user", "content": "z" * 2_001}, {"role": "user", "content": "z" * 2_000}]
    ok(http.post(f"{AT}/messages", json={"messages": said}), 201)
    found = ok(http.get(f"{AT}/messages"))["messages"]
    texts = [one["message"]["parts"][0]["text"] for one in found]
    assert texts == ["z" * 2_000 + "…", "z" * 2_000]


def test_media_are_named_not_sent(http):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    said = [{"role": "user", "content": [{"type": "text", "text": "See"}, image]}]
    ok(http.post(f"{AT}/messages", json={"messages": said}), 201)
    (one,) = ok(http.get(f"{AT}/messages"))["messages"]
    text, media = one["message"]["parts"]
    assert (text["text"], media["kind"]) == ("See", "image")
    assert "data" not in media
    assert "url" not in media


def test_messages_come_in_any_dialect_all_or_none(http):
    anthropic = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}
    asked = {"messages": [{"role": "user", "content": "Go"}, anthropic], "dialect": "anthropic"}
    assert ok(http.post(f"{AT}/messages", json=asked), 201) == {"places": [1, 2]}
    bad = {"messages": [{"role": "user", "content": "Go"}, {"role": "nobody", "content": "x"}]}
    assert "messages[1]" in why(http.post(f"{AT}/messages", json=bad), 400)
    assert ok(http.get(f"{AT}/messages"))["total"] == 2


def test_the_view_is_paged_and_can_be_had_as_it_was(talk):
    ok(talk.post(f"{AT}/compact", json={"target_tokens": 2_000}))
    now = ok(talk.get(f"{AT}/view"))
    summary = next(item for item in now["items"] if item["edit"] and item["edit"]["at"] == 62)
    assert summary["edit"]["kind"] == "summarize"
    assert summary["shown"][0]["is_summary"] is True
    assert now["tokens"]["shown"] == sum(item["tokens"] for item in now["items"])
    then = ok(talk.get(f"{AT}/view?at=61"))
    assert (then["at"], then["total_items"], then["tokens"]["shown"] > now["tokens"]["shown"]) == (
        61,
        61,
        True,
    )
    page = ok(talk.get(f"{AT}/view?at=61&start=2&limit=2"))
    assert [item["span"] for item in page["items"]] == [[3, 4], [4, 5]]
    assert "messages" not in now
    sent = ok(talk.get(f"{AT}/view?messages=1&limit=1"))["messages"]
    assert len(sent) == sum(len(item["shown"]) for item in now["items"])
    assert sent[0] == {"role": "user", "content": "Find the flight to Oslo."}
    why(talk.get(f"{AT}/view?at=999"), 404)


def test_edits_tell_their_state(talk):
    ok(talk.post(f"{AT}/compact", json={"target_tokens": 4_000}))
    ok(talk.post(f"{AT}/compact", json={"target_tokens": 1_500}))
    undone = ok(talk.post(f"{AT}/undo", json={"why": "too much"}))
    assert (undone["of"], undone["covered_by"]) == (63, None)
    found = ok(talk.get(f"{AT}/edits"))
    assert found["total"] == 2
    assert [(one["at"], one["state"]) for one in found["edits"]] == [(62, "in force"), (63, "taken back")]
    assert found["edits"][0]["tokens"][0] > found["edits"][0]["tokens"][1]
    assert [one["at"] for one in ok(talk.get(f"{AT}/edits?start=-1"))["edits"]] == [63]


def test_two_views_are_compared(talk):
    ok(talk.post(f"{AT}/compact", json={"target_tokens": 2_000}))
    found = ok(talk.get(f"{AT}/diff?at=61"))
    assert (found["old"]["at"], found["new"]["at"]) == (61, None)
    signs = [change["sign"] for change in found["changes"]]
    assert signs.count("+") == 1
    assert signs.count("-") == found["old"]["messages"] - signs.count(" ")
    assert ok(talk.get(f"{AT}/diff?at=5&to=5"))["changes"][0]["sign"] == " "
    assert "at" in why(talk.get(f"{AT}/diff"), 400)


def test_steps_tell_what_each_call_of_the_model_saw_by_kind(url):
    usage = {"prompt_tokens": 77, "completion_tokens": 5, "total_tokens": 82}
    with refold.open("talk", store=url, model="gpt-5") as chat:
        chat.append({"role": "system", "content": "Be brief."})
        chat.append({"role": "user", "content": "Hello"})
        chat.append(
            {
                "id": "r1",
                "object": "chat.completion",
                "model": "gpt-5",
                "choices": [
                    {"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}
                ],
                "usage": usage,
            }
        )
        chat.append(tool_loop(3))
        chat.compact("summarize", keep_recent=2)
        chat.append({"role": "assistant", "content": "Done"})
        before = chat.view(at=list(chat.events())[-1].at - 1)
    with running(url) as run:
        found = ok(run.http.get(f"{AT}/steps"))
        steps = found["steps"]
        assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]
        assert steps[0]["sent"] == 77
        assert steps[0]["tokens"]["system"] > 0
        assert steps[0]["tokens"]["assistant"] == steps[0]["tokens"]["summary"] == 0
        assert steps[-1]["tokens"]["summary"] > 0
        assert sum(steps[-1]["tokens"].values()) == before.tokens
        assert steps[-1]["edits"] >= 1
        few = ok(run.http.get(f"{AT}/steps?limit=2"))["steps"]
        assert [step["step"] for step in few] == [1, 5]
        assert sum(step["edits"] for step in few) == sum(step["edits"] for step in steps)
        run.http.post(f"{AT}/messages", json={"messages": tool_loop(1, start=50)})
        assert len(ok(run.http.get(f"{AT}/steps"))["steps"]) == 6


def test_what_would_be_done_now_is_told(talk):
    assert ok(talk.get(f"{AT}/due"))["fired"] == ["threshold"]
    ok(talk.post(f"{AT}/compact", json={"target_tokens": 1_000}))
    assert ok(talk.get(f"{AT}/due"))["fired"] == []


def test_what_a_memory_store_learned_is_told_and_another_store_says_that_it_has_none(talk, tmp_path):
    assert "no memories" in talk.get(f"{AT}/memories").json()["error"]["message"]
    assert talk.get(f"{AT}/memories").status_code == 404
    with Mem0Stub() as stub, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEM0_API_KEY", stub.key)
        with running(f"mem0://ann?host={stub.host}&record=sqlite:///{tmp_path}/raw.db") as run:
            said = [{"role": "user", "content": "I like trains."}, {"role": "assistant", "content": "Noted."}]
            ok(run.http.post("/api/conversations", json={"id": "talk"}), 201)
            ok(run.http.post(f"{AT}/messages", json={"messages": said}), 201)

            def known() -> bool:
                found = ok(run.http.get(f"{AT}/memories?limit=5"))["memories"]
                return any("trains" in one["text"] for one in found)

            until(known)


def test_what_edits_were_to_save_is_told(http, url):
    economy = {"agents": {"default": {"compact": {"economy": {"keep_tokens": 1_000, "max_loss": 1.0}}}}}
    with refold.open("thrifty", store=url, model="gpt-5", config=economy) as chat:
        chat.append({"role": "user", "content": "Which hats do we have?"})
        for n in range(30):
            chat.fit()
            chat.append(tool_loop(1, start=n)[-2:])
        expected = [one.at for one in chat.savings()]
    assert expected
    found = ok(http.get("/api/conversations/thrifty/savings"))["savings"]
    assert [one["at"] for one in found] == expected
    assert all(one["worth"]["removed"] > 0 and one["saved"] is None for one in found)


# What can be done


def test_what_is_hidden_can_be_read_restored_pinned_corrected_and_explained(talk):
    ok(talk.post(f"{AT}/compact", json={"target_tokens": 2_000}))
    assert (
        ok(talk.post(f"{AT}/expand", json={"at": 3, "lines": [1, 2]}))["text"]
        == "HAT000 costs 0.\nHAT000 costs 0."
    )
    assert ok(talk.get(f"{AT}/explain?at=3"))["shown"] == "hidden"
    ok(talk.post(f"{AT}/restore", json={"at": 3, "why": "look again"}))
    assert ok(talk.get(f"{AT}/explain?at=3"))["shown"] == "whole"
    ok(talk.post(f"{AT}/pin", json={"at": 1}))
    assert 1 in ok(talk.get(AT))["pins"]
    ok(talk.post(f"{AT}/unpin", json={"at": 1}))
    assert ok(talk.get(AT))["pins"] == []
    ok(talk.post(f"{AT}/correct", json={"at": 3, "message": "HAT000 costs 1."}))
    (one,) = ok(talk.get(f"{AT}/messages?start=2&limit=1"))["messages"]
    assert one["shown"] == "corrected"
    assert "999" in why(talk.post(f"{AT}/expand", json={"at": 999}), 404)
    assert ok(talk.post(f"{AT}/expand", json={"at": "m3"})) == ok(talk.post(f"{AT}/expand", json={"at": 3}))
    assert ok(talk.post(f"{AT}/expand", json={"at": -1}))["text"]
    why(talk.post(f"{AT}/expand", json={"at": 3, "lines": "x"}), 404)


def test_compaction_can_be_tried_and_be_focused(talk):
    tried = ok(talk.post(f"{AT}/compact", json={"dry_run": True, "keep_recent": 4}))
    assert tried["tokens_saved"] > 0
    assert ok(talk.get(f"{AT}/edits"))["total"] == 0
    done = ok(
        talk.post(f"{AT}/compact", json={"strategy": "sliding-window", "keep_recent": 4, "focus": "Oslo"})
    )
    assert done["tokens_saved"] > 0
    assert done["compacted_range"][1] == 57
    assert ok(talk.get(f"{AT}/overflow"))["is_overflow"] is False


def test_the_export_can_be_loaded(talk, tmp_path):
    answer = talk.get(f"{AT}/export")
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    copy = refold.load(answer.text.splitlines(), store=f"sqlite:///{tmp_path}/copy.db")
    assert copy.get_count() == 61


def test_what_was_said_is_found_here_and_everywhere(talk):
    ok(talk.post("/api/conversations", json={"id": "other", "title": "The other"}), 201)
    said = {"messages": [{"role": "user", "content": "HAT007 flies on Monday"}]}
    ok(talk.post("/api/conversations/other/messages", json=said), 201)
    hits = ok(talk.get("/api/search?q=HAT007"))["hits"]
    assert {(hit["conversation"], hit["title"]) for hit in hits} == {
        ("talk", "To Oslo"),
        ("other", "The other"),
    }
    (hit,) = ok(talk.get("/api/search?q=HAT007&conversation=other"))["hits"]
    assert (hit["at"], hit["role"], hit["in_view"], hit["owner"]) == (1, "user", True, "default")
    why(talk.get("/api/search?q=HAT007&conversation=none"), 404)
    why(talk.get("/api/search"), 400)


# What is refused


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/api/conversations", '{"id": "a", "colour": "red"}', "unknown field `colour`"),
        ("/api/conversations", '{"id": 5}', "$.id"),
        ("/api/conversations", '{"id": ""}', "$.id"),
        ("/api/conversations", '{"id": "a\\nb"}', "$.id"),
        ("/api/conversations", '{"id": "a", "model": "\\u0001"}', "$.model"),
        ("/api/conversations", "[]", "Expected `object`"),
        ("/api/conversations", "{", "truncated"),
        ("/api/conversations", "[" * 5_000, "body"),
        (f"{AT}/messages", '{"messages": []}', "$.messages"),
        (f"{AT}/messages", '{"messages": ["x"]}', "messages[0]"),
        (f"{AT}/messages", '{"messages": [{"role": "user"}], "dialect": "latin"}', "$.dialect"),
        (f"{AT}/pin", '{"at": -1}', "$.at"),
        (f"{AT}/pin", '{"at": true}', "$.at"),
        (f"{AT}/pin", "{}", "`at`"),
        (f"{AT}/compact", '{"strategy": "magic"}', "$.strategy"),
        (f"{AT}/compact", '{"keep_recent": -1}', "$.keep_recent"),
    ],
)  # fmt: skip
def test_a_bad_body_is_refused_with_where_and_why(http, path, body, says):
    assert says in why(http.post(path, content=body, headers=JSON), 400)


@pytest.mark.parametrize(
    "path",
    ["?limit=0", "?limit=501", "?limit=x", "?colour=red", "?limit=1&limit=2", "/talk/messages?start=1.5",
     "/talk/view?at=-1", "/talk/steps?limit=2001", "/talk/explain", "/talk/view?messages=1&at=0"],
)  # fmt: skip
def test_a_bad_query_is_refused(http, path):
    why(http.get(f"/api/conversations{path}"), 400)


@pytest.mark.parametrize(
    "endpoint", [one for one in ENDPOINTS if "{id}" in one.path], ids=lambda one: one.operation
)
def test_what_is_not_there_is_not_found(http, endpoint):
    path = endpoint.path.replace("{id}", "nothing%2Fhere")
    body = {"at": 0, "id": "x", "message": "x", "messages": [{"role": "user", "content": "x"}], "title": "x"}
    known = endpoint.body.__struct_fields__ if endpoint.body else ()
    given = {name: value for name, value in body.items() if name in known}
    asked = {"at": 0} if endpoint.operation in ("diff", "explain") else {}
    answer = http.request(endpoint.method, path, params=asked, json=given if endpoint.body else None)
    assert "nothing/here" in why(answer, 404) if endpoint.operation != "create" else True


def test_what_cannot_be_done_somewhere_says_what_can(http):
    for path in {one.path for one in ENDPOINTS}:
        allowed = {one.method for one in ENDPOINTS if one.path == path}
        for method in {"GET", "POST", "PUT", "PATCH", "DELETE"} - allowed:
            answer = http.request(method, path.replace("{id}", "talk"), headers=JSON)
            why(answer, 405)
            assert set(answer.headers["allow"].split(", ")) == allowed
    why(http.get("/api/nothing"), 404)


def test_ids_of_any_kind_can_be_used(http):
    for id in (
        "a/b",
        "a b",
        "ä漢🙂",
        "a?b#c",
        "%41",
        "<img src=x onerror=alert(1)>",
        "..%2f",
        "a/messages/b",
        "a/messages",
        "a/view",
    ):
        ok(http.post("/api/conversations", json={"id": id}), 201)
        assert ok(http.get(f"/api/conversations/{quote(id, safe='')}"))["id"] == id
        ok(
            http.post(f"/api/conversations/{quote(id, safe='')}/messages", json={"messages": tool_loop(1)}),
            201,
        )


def test_text_that_no_json_can_hold_is_answered_all_the_same(http, url):
    with refold.open("talk", store=url) as chat:
        chat.append(refold.Message("user", "a lone \ud800 surrogate"))
    (one,) = json.loads(http.get(f"{AT}/messages").content)["messages"]
    assert one["message"]["parts"][0]["text"] == "a lone \ud800 surrogate"


# Who may see what


@pytest.fixture
def tokens(url):
    hashed = [
        {"hash": hashlib.sha256(name.encode()).hexdigest(), "owner": name, "scopes": scopes}
        for name, scopes in TOKENS.items()
    ]
    with running(url, tokens=hashed) as run:

        def ask(name, method, path, **what):
            return run.http.request(method, path, headers={"authorization": f"Bearer {name}"}, **what)

        yield ask


def test_nobody_sees_what_is_another_owners(tokens):
    ok(tokens("ann", "POST", "/api/conversations", json={"id": "talk"}), 201)
    said = {"messages": [{"role": "user", "content": "a secret plan"}]}
    ok(tokens("ann", "POST", f"{AT}/messages", json=said), 201)
    assert ok(tokens("bob", "GET", "/api/conversations"))["conversations"] == []
    assert ok(tokens("bob", "GET", "/api/search?q=plan"))["hits"] == []
    for endpoint in ENDPOINTS:
        if "{id}" in endpoint.path and endpoint.method == "GET":
            asked = {"at": 0} if endpoint.operation in ("diff", "explain") else {}
            path = endpoint.path.replace("{id}", "talk")
            why(tokens("bob", "GET", path, params=asked), 404)
            why(tokens("bob", "GET", path, params=asked | {"owner": "ann"}), 403)
    assert [
        row["owner"] for row in ok(tokens("root", "GET", "/api/conversations?owner=ann"))["conversations"]
    ] == ["ann"]


def test_a_token_allows_what_its_scopes_say(tokens):
    why(tokens("bob", "POST", "/api/conversations", json={"id": "talk"}), 403)
    ok(tokens("ann", "POST", "/api/conversations", json={"id": "talk"}), 201)
    ok(tokens("ann", "PATCH", AT, json={"title": "x"}))
    why(tokens("ann", "DELETE", AT), 403)
    ok(tokens("root", "DELETE", AT, params={"owner": "ann"}))
    needs = {one.operation: one.scope for one in ENDPOINTS}
    assert {verb for verb, need in needs.items() if need == "edit"} == {
        *("restore", "undo", "pin", "unpin", "correct", "fork", "compact", "rename"),
    }
    assert {verb for verb, need in needs.items() if need == "append"} == {"create", "append"}
    assert {verb for verb, need in needs.items() if need == "admin"} == {"erase"}


# Its description


def test_the_description_has_every_route_and_field_in_words(http):
    found = ok(http.get("/api/openapi.json"))
    assert found["openapi"] == "3.1.0"
    known = {(method.upper(), path) for path, one in found["paths"].items() for method in one}
    assert known == {(one.method, one.path) for one in ENDPOINTS}
    for path in found["paths"].values():
        for operation in path.values():
            assert operation["summary"]
            assert {"400", "401", "403", "404", "405", "413", "429", "503"} <= set(operation["responses"])
    row = found["components"]["schemas"]["ViewTokens"]["properties"]
    assert row["saved"]["description"] == "The share of the recorded tokens that is not shown, from 0 to 1."


@pytest.mark.parametrize(
    ("which", "phases"),
    [("--exclude-operation-id", "coverage,fuzzing"), ("--include-operation-id", "fuzzing")],
)
def test_the_description_is_true(talk, tmp_path, which, phases):
    """Requests made from the schema: never a 500, and never an answer that it does not describe.

    Which cursor or query makes sense, and which of two settings exclude each other, no schema can say; and
    methods that are known nowhere are refused before it is known where they would go.
    """
    config = tmp_path / "schemathesis.toml"
    config.write_text('[parameters]\n"path.id" = "talk"\n"query.owner" = "default"\n')
    left_out = "positive_data_acceptance,unsupported_method,allow_header_conformance"
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", config, "run"]
    command += [f"{talk.base_url}/api/openapi.json", which, "erase", "--exclude-path-regex", "events$"]
    command += ["--exclude-checks", left_out, "--max-examples", "4", "--phases", phases, "--no-color"]
    done = subprocess.run(
        [*command, "--seed", "8"], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout[-6_000:] + done.stderr[-2_000:]
