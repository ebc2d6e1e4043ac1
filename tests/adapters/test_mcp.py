"""`refold mcp` as clients see it: the official client and the real command, over pipes and over HTTP."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager, nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from shutil import which
from threading import Timer
from urllib.parse import quote

import pytest

mcp = pytest.importorskip("mcp")

import anyio
import apsw
from mcp import ClientSession, StdioServerParameters, stdio_client
from mcp.client import streamable_http

import refold
from refold.adapters.mcp_tools import MAX_ANSWER_CHARS

pytestmark = pytest.mark.anyio
SMALL = {
    "models": {"m": {"window": 1_000, "max_output": 200, "provider": "openai"}},
    "agents": {"default": {"compact": {"strategy": "sliding-window", "prune": "off"}, "dedupe": "off"}},
}
TOOLS = {
    "list_conversations": ["after"],
    "show_view": ["conversation", "at"],
    "expand": ["conversation", "at", "lines", "items", "chars", "match"],
    "search": ["query", "conversation", "limit"],
    "explain": ["conversation", "at"],
    "undo": ["conversation", "at"],
    "append": ["conversation", "messages"],
}
ODD = ["run/0", "../up", "/etc/passwd", "100%", "50%2F50", "Zoë ⟶ 東京", "a?b#c", "..", 'it\'s "quoted"']
PATIENCE_S = 60
numbers = count()


# Servers and clients


@pytest.fixture(scope="module")
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    return f"sqlite:///{tmp_path_factory.mktemp('mcp')}/agent.db"


def command(url, *options):
    return [sys.executable, "-m", "refold", "mcp", "--store", url, *options]


@contextmanager
def started(*args, **rest):
    """A process that is killed when it takes much too long, so that no test waits for ever."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(args, text=True, encoding="utf-8", **{**pipes, **rest}) as process:
        timer = Timer(PATIENCE_S, process.kill)
        timer.start()
        try:
            yield process
        finally:
            timer.cancel()
            process.kill()


@contextmanager
def serving(url, *options):
    """The address of a server, once it listens."""
    with started(*command(url, "--http", "0", *options), stderr=subprocess.DEVNULL) as process:
        told = process.stdout.readline()
        yield re.search(r"http://127\.0\.0\.1:\d+/mcp", told)[0]


class Client:
    """A session, and what comes over the wire as plain JSON, whatever the SDK makes of it."""

    def __init__(self, session, begun):
        self.session, self.begun = session, wire(begun)

    async def call(self, name, /, **arguments):
        """What a tool answers; it must not fail."""
        text, is_error = await self.answer(name, **arguments)
        assert not is_error, text
        return text

    async def ask(self, name, /, **arguments):
        return json.loads(await self.call(name, **arguments))

    async def refusal(self, name, /, **arguments):
        text, is_error = await self.answer(name, **arguments)
        assert is_error, text
        assert "Traceback" not in text
        return text

    async def answer(self, name, /, **arguments):
        with anyio.fail_after(PATIENCE_S):
            result = wire(await self.session.call_tool(name, arguments))
        (block,) = result["content"]
        assert len(block["text"]) <= MAX_ANSWER_CHARS
        assert "structuredContent" not in result
        return block["text"], result.get("isError", False)

    async def read(self, uri):
        with anyio.fail_after(PATIENCE_S):
            (content,) = wire(await self.session.read_resource(uri))["contents"]
        assert content["mimeType"] == "application/json"
        assert len(content["text"]) <= MAX_ANSWER_CHARS
        return json.loads(content["text"])


def wire(value):
    return value.model_dump(mode="json", by_alias=True, exclude_none=True)


@asynccontextmanager
async def over_stdio(url, *options):
    _, *args = command(url, *options)
    server = StdioServerParameters(command=sys.executable, args=args)
    async with stdio_client(server) as (read, write), ClientSession(read, write) as session:
        yield Client(session, await session.initialize())


@asynccontextmanager
async def at_address(address):
    connect = (
        getattr(streamable_http, "streamable_http_client", None) or streamable_http.streamablehttp_client
    )
    async with connect(address) as (read, write, *_), ClientSession(read, write) as session:
        yield Client(session, await session.initialize())


@asynccontextmanager
async def over_http(url, *options):
    with serving(url, *options) as address:
        async with at_address(address) as client:
            yield client


DOORS = {"stdio": over_stdio, "http": over_http}


@pytest.fixture(scope="module", params=DOORS)
async def client(request, url, anyio_backend):
    async with DOORS[request.param](url) as client:
        yield client


# Conversations


def user(text, **rest):
    return {**rest, "role": "user", "content": text}


def call(id, name="ls"):
    function = {"name": name, "arguments": f'{{"path": "{id}"}}'}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": id, "type": "function", "function": function}],
    }


def result(id, text):
    return {"role": "tool", "tool_call_id": id, "content": text}


@pytest.fixture
def name():
    """Of a conversation that is not there yet."""
    return f"task-{next(numbers)}"


@pytest.fixture
def chat(url, name):
    """A conversation of which the oldest calls and results are hidden, and a word that is only in those."""
    with refold.open(name, store=url, model="m", config=SMALL) as session:
        session.append([{"role": "system", "content": "Be brief."}, user("Which files are large?")])
        for n in range(6):
            session.append([call(f"c{n}"), result(f"c{n}", f"{name}x{n}\n" * 12)])
        session.fit()
    return session


def again(url, name, owner=None):
    """What anybody else sees of a conversation."""
    return refold.open(name, store=url, owner=owner)


def hidden(url, name):
    """The places of what was said and is not shown."""
    return [one.at for one in again(url, name).get_all() if one.was_compacted]


def edits(url, name):
    return [event.at for event in again(url, name).events() if hasattr(event, "span")]


# What there is


async def test_it_says_who_it_is_and_how_to_begin(client):
    assert client.begun["serverInfo"] == {"name": "refold", "version": refold.__version__}
    assert {"tools", "resources"} <= client.begun["capabilities"].keys()
    assert "list_conversations" in client.begun["instructions"]


async def test_every_tool_and_argument_is_described(client):
    tools = {tool["name"]: tool for tool in wire(await client.session.list_tools())["tools"]}
    assert {name: [*tool["inputSchema"]["properties"]] for name, tool in tools.items()} == TOOLS
    for tool in tools.values():
        assert tool["description"]
        for about in tool["inputSchema"]["properties"].values():
            assert about["description"]
            kinds = [one["type"] for one in about.get("anyOf", [about])]
            assert kinds in (["integer", "null"], ["integer", "string"]) or kinds == [about["type"]]


async def test_tools_that_only_read_say_so(client):
    tools = wire(await client.session.list_tools())["tools"]
    writing = {tool["name"] for tool in tools if not tool["annotations"]["readOnlyHint"]}
    assert writing == {"undo", "append"}
    assert not any(tool["annotations"].get("destructiveHint") for tool in tools)


async def test_conversations_are_listed_the_newest_first(client, url, name):
    for n in range(2):
        again(url, f"{name}-{n}").append(user(f"Hello {n}"))
    newest, older, *_ = (await client.ask("list_conversations"))["conversations"]
    assert (newest["id"], newest["title"], newest["messages"]) == (f"{name}-1", "Hello 1", 1)
    assert older["id"] == f"{name}-0"
    again(url, f"{name}-1").append(user("Once more"))
    assert (await client.ask("list_conversations"))["conversations"][0]["messages"] == 2


async def test_a_view_shows_what_the_model_sees_and_which_edits_hide_the_rest(client, url, chat):
    shown = await client.ask("show_view", conversation=chat.conversation)
    assert shown["tokens"] == chat.record.live.tokens
    texts = [one["text"] for item in shown["items"] for one in item["shown"]]
    assert "Which files are large?" in texts
    assert f"{chat.conversation}x5" in texts[-1]
    assert not any(f"{chat.conversation}x0" in text for text in texts)
    (edit,) = [item for item in shown["items"] if "edit" in item]
    assert (edit["edit"]["at"], edit["edit"]["kind"]) == (edits(url, chat.conversation)[-1], "window")
    assert edit["span"][0] == hidden(url, chat.conversation)[0]


async def test_a_view_can_be_had_as_it_was(client, chat):
    for at in (3, "#3"):
        shown = await client.ask("show_view", conversation=chat.conversation, at=at)
        assert [item["span"] for item in shown["items"]] == [[0, 1], [1, 2], [2, 3], [3, 4]]


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({}, "{0}x0\n" * 12),
        ({"lines": "2-3"}, "{0}x0\n{0}x0"),
        ({"lines": [2, 3]}, "{0}x0\n{0}x0"),
        ({"lines": 2}, "{0}x0"),
        ({"chars": "0-4"}, "task"),
        ({"chars": [0, 4], "match": None, "lines": ""}, "task"),
        ({"chars": [-2, None]}, "0\n"),
    ],
)
async def test_what_is_hidden_is_read_in_full_or_in_part(client, url, chat, part, expected):
    at = hidden(url, chat.conversation)[1]
    text = await client.call("expand", conversation=chat.conversation, at=at, **part)
    assert text == expected.format(chat.conversation)


async def test_lines_are_found_by_a_text_that_looks_like_json(client, url, name):
    again(url, name).append(user('one\nnull\n["a"]\nlast'))
    for text in ("null", '["a"]', "/^la.t$/"):
        found = await client.call("expand", conversation=name, at=0, match=text)
        assert found == ("last" if text[0] == "/" else text)


async def test_items_of_a_list_are_read(client, url, name):
    again(url, name).append(user(json.dumps([{"n": n} for n in range(9)])))
    assert await client.call("expand", conversation=name, at=0, items="2-3") == '{"n": 1}, {"n": 2}'


async def test_an_edit_is_expanded_to_all_that_it_hides(client, url, chat):
    text = await client.call("expand", conversation=chat.conversation, at=edits(url, chat.conversation)[-1])
    assert text == again(url, chat.conversation).expand(edits(url, chat.conversation)[-1])
    assert f"{chat.conversation}x0" in text


async def test_a_message_is_expanded_by_its_id_or_counted_from_the_newest(client, url, name):
    again(url, name).append(user("one"), id="first")
    again(url, name).append(user("two"))
    for at, text in (("first", "one"), (-1, "two"), ("-2", "one"), ("#1", "two")):
        assert await client.call("expand", conversation=name, at=at) == text


async def test_what_is_hidden_is_found_in_one_conversation_or_in_all(client, url, chat):
    word = f"{chat.conversation}x0"
    for where in ({}, {"conversation": chat.conversation}, {"conversation": None, "limit": 1}):
        (hit,) = (await client.ask("search", query=f'"{word}"', **where))["hits"]
        assert (hit["conversation"], hit["in_view"]) == (chat.conversation, False)
        assert word in hit["excerpt"]
        assert word in await client.call("expand", conversation=hit["conversation"], at=hit["at"])
    assert (await client.ask("search", query="nobodysaidthat"))["hits"] == []


async def test_it_explains_why_something_is_hidden(client, url, chat):
    at = hidden(url, chat.conversation)[0]
    told = await client.ask("explain", conversation=chat.conversation, at=at)
    assert (told["at"], told["shown"]) == (at, "hidden")
    assert told["causes"][0]["kind"] == "window"
    assert "compact.strategy" in told["causes"][0]["why"]
    task = await client.ask("explain", conversation=chat.conversation, at=1)
    assert (task["shown"], task["causes"]) == ("whole", [])
    assert "the task" in task["stays"][0]


# What is changed


async def test_undoing_shows_again_what_was_hidden(client, url, chat):
    before, edit = hidden(url, chat.conversation), edits(url, chat.conversation)[-1]
    done = await client.ask("undo", conversation=chat.conversation)
    assert done["of"] == edit
    assert hidden(url, chat.conversation) == []
    assert done["tokens"] == again(url, chat.conversation).record.live.tokens
    await client.ask("undo", conversation=chat.conversation, at=done["at"])
    assert hidden(url, chat.conversation) == before
    await client.ask("undo", conversation=chat.conversation, at=before[0])
    assert hidden(url, chat.conversation) == []
    assert len(again(url, chat.conversation).get_all()) == 14


async def test_what_is_appended_is_stored_in_a_new_conversation_and_in_an_old_one(client, url, name):
    assert (await client.ask("append", conversation=name, messages=[user("Hello")]))["places"] == [0]
    again(url, name).append({"role": "assistant", "content": "Hi."})
    more = [user("Which files?"), call("c1"), result("c1", "a.txt")]
    assert (await client.ask("append", conversation=name, messages=more))["places"] == [2, 3, 4]
    stored = again(url, name).get_all()
    assert [one.message.text for one in stored] == ["Hello", "Hi.", "Which files?", "", "a.txt"]
    assert stored[4].tools == ("ls",)


async def test_a_message_with_an_id_is_stored_once(client, url, name):
    first = await client.ask("append", conversation=name, messages=[user("Hello", id="m1")])
    both = [user("Hello", id="m1"), user("And you?", id="m2")]
    assert first["places"] == [0]
    for _ in range(2):
        assert (await client.ask("append", conversation=name, messages=both))["places"] == [0, 1]
    assert [(one.id, one.message.text) for one in again(url, name).get_all()] == [
        ("m1", "Hello"),
        ("m2", "And you?"),
    ]
    assert again(url, name).fit().messages[0] == user("Hello")


async def test_parallel_results_in_one_message_share_its_id(client, url, name):
    calls = [{"type": "tool_use", "id": f"t{n}", "name": "ls", "input": {}} for n in range(2)]
    results = [{"type": "tool_result", "tool_use_id": f"t{n}", "content": f"r{n}"} for n in range(2)]
    messages = [
        user("Go on", id="a"),
        {"id": "b", "role": "assistant", "content": calls},
        {"id": "c", "role": "user", "content": [*results, {"type": "text", "text": "More?"}]},
        user("Well?", id="d"),
    ]
    for _ in range(2):
        assert (await client.ask("append", conversation=name, messages=messages))["places"] == [0, 1, 2, 5]
    texts = [one.message.text for one in again(url, name).get_all()]
    assert texts == ["Go on", "", "r0", "r1", "More?", "Well?"]


async def test_messages_are_stored_all_or_none(client, url, name):
    told = await client.refusal("append", conversation=name, messages=[user("Hello"), {"role": "frog"}])
    assert told.startswith("messages[1].role: 'frog' is not one of system")
    assert again(url, name).get_count() == 0
    for id in ("", 7, None):
        told = await client.refusal("append", conversation=name, messages=[user("Hello", id=id)])
        assert told.startswith("messages[0].id: expected a text")
    assert again(url, name).get_count() == 0


# What fails


@pytest.mark.parametrize(
    ("tool", "arguments", "told"),
    [
        ("show_view", {"conversation": "nope"}, "There is no conversation 'nope'; list_conversations shows"),
        ("expand", {"conversation": "nope", "at": 0}, "There is no conversation 'nope'"),
        ("search", {"conversation": "nope", "query": "a"}, "There is no conversation 'nope'"),
        ("explain", {"conversation": "nope", "at": 0}, "There is no conversation 'nope'"),
        ("undo", {"conversation": "nope"}, "There is no conversation 'nope'"),
        ("append", {"conversation": "", "messages": []}, "conversation: expected a text of at least one"),
        ("show_view", {"conversation": "CHAT", "at": 999}, "has no place 999"),
        ("show_view", {"conversation": "CHAT", "at": -1}, "has no place -1"),
        ("expand", {"conversation": "CHAT", "at": 999}, "#999: there is no such place"),
        ("expand", {"conversation": "CHAT", "at": 1, "lines": "x"}, "lines: expected two numbers"),
        ("expand", {"conversation": "CHAT", "at": 1, "lines": "1-2", "chars": "1-2"}, "not for both at once"),
        ("expand", {"conversation": "CHAT", "at": 1, "match": "/(/"}, "is not a valid regular expression"),
        ("explain", {"conversation": "CHAT", "at": 999}, "has no place 999"),
        ("undo", {"conversation": "CHAT", "at": 1}, "#1"),
        ("search", {"query": "  "}, "query"),
        ("search", {"query": "a", "limit": 0}, "limit: expected 1 to 1,000, got 0"),
        ("expand", {"conversation": "CHAT", "at": "x"}, "No message of the conversation has the id 'x'"),
        ("explain", {"conversation": "CHAT", "at": "x"}, "at: Input should be a valid integer"),
        ("expand", {"conversation": "CHAT"}, "at: Field required"),
        ("expand", {"conversation": "CHAT", "at": 1, "lines": {"from": 1}}, "lines: Input should be a valid"),
        ("append", {"conversation": "CHAT", "messages": [1]}, "messages.0: Input should be a valid dict"),
        ("append", {"conversation": "CHAT", "messages": "Hello"}, "messages: Input should be a valid list"),
        (
            "undo",
            {"conversation": "CHAT", "place": 3},
            "undo has no argument 'place'; its arguments are conversation, at",
        ),
        ("frobnicate", {}, "Unknown tool: frobnicate"),
    ],
)
async def test_what_cannot_be_done_is_told_in_a_sentence(client, url, chat, tool, arguments, told):
    before = len(list(chat.events()))
    given = {key: chat.conversation if value == "CHAT" else value for key, value in arguments.items()}
    assert told in await client.refusal(tool, **given)
    assert len(list(again(url, chat.conversation).events())) == before
    assert await client.call("list_conversations")


async def test_nothing_to_undo_is_an_error(client, url, name):
    again(url, name).append(user("Hello"))
    assert await client.refusal("undo", conversation=name)


async def test_half_a_character_is_told_as_its_escape(client, url, name):
    again(url, name).append(user("half a \ud83d pair"))
    assert await client.call("expand", conversation=name, at=0) == "half a \\ud83d pair"
    shown = await client.ask("show_view", conversation=name)
    assert shown["items"][0]["shown"][0]["text"] == "half a \ud83d pair"
    assert "half a" in (await client.refusal("show_view", conversation="half a \\ud83d"))


# Resources


async def test_conversations_and_their_views_are_resources(client, chat):
    listed = wire(await client.session.list_resources())["resources"]
    uris = [one["uri"] for one in listed]
    assert uris[:3] == [
        "refold://conversations",
        f"refold://conversations/{chat.conversation}",
        f"refold://conversations/{chat.conversation}/view",
    ]
    rows, said, view = [await client.read(uri) for uri in uris[:3]]
    assert rows == await client.ask("list_conversations")
    assert view == await client.ask("show_view", conversation=chat.conversation)
    assert [one["text"] for one in said["messages"]][:4] == [
        "Be brief.",
        "Which files are large?",
        'ls {"path": "c0"}',
        f"{chat.conversation}x0\n" * 12,
    ]
    assert (said["total"], len(said["messages"])) == (14, 14)


async def test_templates_tell_how_a_conversation_is_addressed(client):
    found = wire(await client.session.list_resource_templates())["resourceTemplates"]
    assert [one["uriTemplate"] for one in found] == [
        "refold://conversations/{id}",
        "refold://conversations/{id}/view",
    ]
    assert all(one["description"] for one in found)


@pytest.mark.parametrize("id", ODD)
async def test_any_id_can_be_addressed(client, url, name, id):
    id = f"{id} {name}"
    await client.ask("append", conversation=id, messages=[user(f"Hello from {id}", id="only")])
    address = f"refold://conversations/{quote(id, safe='')}"
    listed = [one["uri"] for one in wire(await client.session.list_resources())["resources"]]
    assert {address, f"{address}/view"} <= {*listed}
    assert (await client.read(address))["messages"][0]["text"] == f"Hello from {id}"
    assert (await client.read(f"{address}/view"))["conversation"] == id


@pytest.mark.parametrize("end", ["conversations/nope", "conversations/nope/view", "elsewhere"])
async def test_a_resource_that_is_not_there_is_an_error_of_the_protocol(client, end):
    with pytest.raises(Exception, match=r"There is no conversation 'nope'|Unknown resource") as caught:
        await client.session.read_resource(f"refold://{end}")
    assert type(caught.value).__name__.lower() == "mcperror"


# Owners


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
async def test_what_is_another_owners_is_not_there(client, url, name, door):
    again(url, name, "ann").append(user(f"A secret about {name}"))
    mine = user("Nothing of note")
    again(url, f"{name}-mine").append(mine)
    for tool, rest in [("show_view", {}), ("expand", {"at": 0}), ("explain", {"at": 0}), ("undo", {})]:
        assert "There is no conversation" in await client.refusal(tool, conversation=name, **rest)
    assert "There is no conversation" in await client.refusal("search", query="secret", conversation=name)
    assert (await client.ask("search", query=name))["hits"] == []
    mine_only = [row["id"] for row in (await client.ask("list_conversations"))["conversations"]]
    assert mine_only[0] == f"{name}-mine"
    assert name not in mine_only
    with pytest.raises(Exception, match="There is no conversation"):
        await client.session.read_resource(f"refold://conversations/{name}")
    assert name not in {one["name"] for one in wire(await client.session.list_resources())["resources"]}
    await client.ask("append", conversation=name, messages=[mine])
    assert [one.message.text for one in again(url, name, "ann").get_all()] == [f"A secret about {name}"]
    async with door(url, "--owner", "ann") as ann:
        (item,) = (await ann.ask("show_view", conversation=name))["items"]
        assert item["shown"][0]["text"] == f"A secret about {name}"
        assert (await ann.ask("list_conversations"))["conversations"][0]["id"] == name
        assert "There is no conversation" in await ann.refusal("show_view", conversation=f"{name}-mine")


# Much of everything


async def gathered(client, conversation, at):
    """A text in as many answers as it takes, each telling how to go on."""
    pieces, part = [], {}
    while True:
        head, text = (await client.call("expand", conversation=conversation, at=at, **part)).split("\n", 1)
        pieces.append(text)
        on = re.search(r"; go on with (\w+) (\d+-)\]$", head)
        if on is None:
            return pieces, part
        part = {on[1]: on[2]}


async def test_a_long_text_is_cut_and_says_how_to_go_on(client, url, name):
    lines = "\n".join(f"line {n}: {'word ' * 30}" for n in range(2_500))
    again(url, name).append([user(lines), user("x" * 250_000)])
    pieces, _ = await gathered(client, name, 0)
    assert "\n".join(pieces[:-1]) == lines[: sum(map(len, pieces[:-1])) + len(pieces) - 2]
    rest = await client.call("expand", conversation=name, at=0, lines=f"{2_500 - 3}-")
    assert lines.endswith(rest)
    text = await client.call("expand", conversation=name, at=1)
    assert re.match(r"\[refold #1 user: chars 0-\d+ of 250000; go on with chars \d+-\]\nx+$", text)
    assert await client.call("expand", conversation=name, at=1, chars="200000-") == "x" * 50_000


async def test_long_texts_in_a_view_are_cut_and_say_so(client, url, name):
    again(url, name).append([user(f"{n} " + "word " * 8_000) for n in range(10)])
    shown = await client.ask("show_view", conversation=name)
    texts = [one for item in shown["items"] for one in item["shown"]]
    assert [one["text"].split()[0] for one in texts] == [f"{n}" for n in range(10)]
    assert all(one["cut"] and len(one["text"]) == 2_000 for one in texts)


async def test_a_big_conversation_is_seen_from_its_newest_message_back_to_its_first(client, url, name):
    again(url, name).append([user(f"{n} " + "word " * 100) for n in range(6_000)])
    seen, at = [], None
    while at is None or at >= 0:
        shown = await client.ask("show_view", conversation=name, **({} if at is None else {"at": at}))
        seen = [*(item["span"][0] for item in shown["items"]), *seen]
        before = re.search(r"show_view with at: (\d+) shows the earlier ones", shown.get("note", ""))
        at = int(before[1]) if before else -1
    assert seen == [*range(6_000)]
    said = await client.read(f"refold://conversations/{name}")
    first = said["messages"][0]["at"]
    assert said["total"] == 6_000
    assert said["messages"][-1]["at"] == 5_999
    assert f"expand shows any message before #{first}." in said["note"]
    assert (await client.call("expand", conversation=name, at=first - 1)).startswith(f"{first - 1} word")
    assert (await client.ask("list_conversations"))["conversations"][0]["messages"] == 6_000
    assert (await client.ask("explain", conversation=name, at=3_000))["shown"] == "whole"


async def test_many_hits_are_cut_to_the_best(client, url, name):
    again(url, name).append([user(f"needle{name} {n} " + "hay " * 60) for n in range(1_000)])
    found = await client.ask("search", query=f"needle{name}", conversation=name, limit=1_000)
    assert found["total"] == 1_000
    assert found["note"] == f"These are the best {len(found['hits'])}; search for something more specific."
    assert 100 < len(found["hits"]) < 1_000


async def test_a_long_list_goes_on_after_its_last(tmp_path):
    store = f"sqlite:///{tmp_path}/many.db"
    for n in range(230):
        refold.open(f"chat-{n}", store=store).append(user(f"Task {n}"))
    async with over_stdio(store) as client:
        ids, rest = [], {}
        while rest is not None:
            answer = await client.ask("list_conversations", **rest)
            ids += [row["id"] for row in answer["conversations"]]
            on = re.search(r"continue with after: (.*)$", answer.get("note", ""))
            rest = {"after": json.loads(on[1])} if on else None
        assert ids == [f"chat-{n}" for n in reversed(range(230))]
        assert (await client.ask("list_conversations", after="nobody"))["conversations"] == []


# Several at once


async def test_two_clients_append_to_one_conversation_at_once(url, name):
    with serving(url) as address:
        async with at_address(address) as one, at_address(address) as two, over_stdio(url) as three:

            async def append(client, who):
                for n in range(10):
                    await client.ask("append", conversation=name, messages=[user(f"{who} {n}")])

            async with anyio.create_task_group() as tasks:
                for who, client in enumerate((one, two, three)):
                    tasks.start_soon(append, client, who)
    texts = [one.message.text for one in again(url, name).get_all()]
    assert sorted(texts) == sorted(f"{who} {n}" for who in range(3) for n in range(10))
    for who in "012":
        assert [text for text in texts if text[0] == who] == [f"{who} {n}" for n in range(10)]


class Wire:
    """JSON-RPC by hand, over the pipes of a server."""

    def __init__(self, process):
        self.process, self.heard = process, []
        about = {
            "protocolVersion": "2025-06-18",
            "capabilities": {},
            "clientInfo": {"name": "t", "version": "1"},
        }
        assert self.answer("initialize", 0, about)["result"]["serverInfo"]["name"] == "refold"
        self.send("notifications/initialized")

    def send(self, method, id=None, params=None):
        fields = {"jsonrpc": "2.0", "method": method, "id": id, "params": params}
        self.write(json.dumps({name: value for name, value in fields.items() if value is not None}))

    def write(self, line):
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def wait(self, id):
        """All that stands on stdout is the protocol's."""
        while not any(one.get("id") == id for one in self.heard):
            self.heard.append(json.loads(self.process.stdout.readline()))
        return next(one for one in self.heard if one.get("id") == id)

    def answer(self, method, id, params=None):
        self.send(method, id, params)
        return self.wait(id)

    def call(self, id, tool, **arguments):
        self.send("tools/call", id, {"name": tool, "arguments": arguments})


@pytest.fixture
def locked(url, name):
    """Nobody can write to the store until this is called."""
    again(url, name).append(user("Hello"))
    connection = apsw.Connection(url.removeprefix("sqlite:///"))
    connection.execute("BEGIN IMMEDIATE")
    yield lambda: connection.execute("ROLLBACK")
    connection.close()


def test_a_request_that_waits_keeps_nobody_else_waiting_and_can_be_canceled(url, name, locked):
    with started(*command(f"{url}?timeout_s=60"), stderr=subprocess.DEVNULL) as process:
        wire = Wire(process)
        wire.call(1, "append", conversation=name, messages=[user("waits")])
        assert wire.answer("ping", 2)["result"] == {}
        wire.call(3, "list_conversations")
        assert wire.wait(3)["result"]["content"]
        wire.send("notifications/cancelled", params={"requestId": 1, "reason": "no longer wanted"})
        assert wire.answer("ping", 4)["result"] == {}
        locked()
        wire.call(5, "append", conversation=name, messages=[user("comes after")])
        assert not wire.wait(5)["result"].get("isError")
        assert not any("result" in one for one in wire.heard if one.get("id") == 1)


@pytest.mark.parametrize("door", [over_stdio, over_http])
async def test_an_append_that_is_canceled_on_its_way_is_stored_all_the_same(url, name, locked, door):
    """By the official client: it is no longer answered, and with an id it can be sent again."""
    said = {**user("canceled"), "id": "one"}
    append = partial(client_append, name, said)
    async with door(f"{url}?timeout_s=60") as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(append, client)
            await anyio.wait_all_tasks_blocked()
            await client.call("list_conversations")  # the server has both requests, and serves this one
            tasks.cancel_scope.cancel()
        locked()
        with anyio.fail_after(PATIENCE_S):
            while again(url, name).get_count() < 2:
                await client.call("list_conversations")
        await append(client)
    assert [one.message.text for one in again(url, name).get_all()] == ["Hello", "canceled"]


async def client_append(name, message, client):
    await client.call("append", conversation=name, messages=[message])


def inspected(server, method, *options):
    """What the protocol's own inspector is told."""
    found = which("mcp-inspector")
    if found is None:
        pytest.skip("no inspector here: npm install -g @modelcontextprotocol/inspector")
    asked = [found, "--cli", *server, "--method", method, *options]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("is_http", [False, True])
def test_the_inspector_of_the_protocol_is_content(url, name, is_http):
    with serving(url) if is_http else nullcontext() as address:
        server = [address, "--transport", "http"] if is_http else command(url)
        ask = partial(inspected, server)
        assert [tool["name"] for tool in ask("tools/list")["tools"]] == [*TOOLS]
        said = ["--tool-arg", f"conversation={name}", f"messages={json.dumps([user('Hello')])}"]
        assert not ask("tools/call", "--tool-name", "append", *said)["isError"]
        unknown = ask("tools/call", "--tool-name", "expand", "--tool-arg", f"conversation={name}", "at=9")
        assert unknown["isError"]
        (content,) = ask("resources/read", "--uri", f"refold://conversations/{quote(name)}")["contents"]
    assert "Hello" in content["text"]


def test_nothing_but_the_protocol_is_on_stdout_whatever_comes_in(url, name):
    with started(*command(url)) as process:
        wire = Wire(process)
        wire.write("this is no JSON")
        wire.write('{"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": 5}}')
        assert wire.answer("no/such/method", 8)["error"]
        wire.call(9, "expand", conversation=name, at=[])
        assert wire.wait(9)["result"]["isError"]
        wire.call(10, "list_conversations")
        assert not wire.wait(10)["result"].get("isError")
        process.stdin.close()
        rest = process.stdout.read().splitlines()
        assert all(json.loads(line)["jsonrpc"] == "2.0" for line in rest)
        assert process.wait() == 0


async def test_what_is_damaged_is_told_and_the_rest_is_served(tmp_path):
    store = f"sqlite:///{tmp_path}/damaged.db"
    for id in ("good", "bad"):
        refold.open(id, store=store).append([user("Hello"), user("there")])
    connection = apsw.Connection(f"{tmp_path}/damaged.db")
    newest = "(SELECT max(place >> 32) FROM refold_entry)"
    connection.execute(f"UPDATE refold_entry SET body = x'78ff' WHERE place >> 32 = {newest}")
    connection.close()
    async with over_stdio(store) as client:
        assert await client.refusal("show_view", conversation="bad")
        assert (await client.ask("show_view", conversation="good"))["total_items"] == 2
        assert {row["id"] for row in (await client.ask("list_conversations"))["conversations"]} == {
            "good",
            "bad",
        }


# The command


def post(address, **headers):
    """What an HTTP request is answered with, by its status."""
    host, port = re.search(r"//(.*):(\d+)/", address).groups()
    about = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": about})
    accepted = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
    sent = {
        "Host": f"{host}:{port}",
        **accepted,
        "Content-Length": len(body),
        "Connection": "close",
        **headers,
    }
    with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
        lines = ["POST /mcp HTTP/1.1", *(f"{key}: {value}" for key, value in sent.items()), "", body]
        connection.sendall("\r\n".join(lines).encode())
        return int(connection.makefile("rb").readline().split()[1])


def test_over_http_only_those_are_answered_who_mean_it(url):
    with serving(url) as address:
        port = re.search(r":(\d+)/", address)[1]
        assert post(address) == 200
        assert post(address, Host=f"localhost:{port}", Origin=f"http://localhost:{port}") == 200
        assert post(address, Host="evil.example") == 421
        assert post(address, Host=f"evil.example:{port}") == 421
        for origin in ("http://evil.example", "null", "http://localhost:1", f"https://127.0.0.1:{port}"):
            assert post(address, Origin=origin) == 403
        assert post(address, **{"Content-Type": "text/plain"}) == 400


def test_over_http_it_listens_on_this_machine_only(url):
    with serving(url) as address, socket.socket(socket.AF_INET) as other:
        other.bind(("127.0.0.2", int(re.search(r":(\d+)/", address)[1])))  # taken, if it listened everywhere


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signals")
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_over_http_it_ends_when_it_is_told_to(url, sent):
    with started(*command(url, "--http", "0")) as process:
        assert post(re.search("http.*", process.stdout.readline())[0]) == 200
        process.send_signal(sent)
        _, errors = process.communicate()
    assert process.returncode == 0
    assert "Traceback" not in errors


def test_a_port_that_is_taken_is_told(url):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = subprocess.run(
            command(url, "--http", str(taken.getsockname()[1])), capture_output=True, text=True
        )
    assert done.returncode == 2
    assert re.search(
        r"^refold: --http: port \d+ cannot be used \(.*\); name another", done.stderr, re.MULTILINE
    )


def test_a_store_that_cannot_be_used_is_told(tmp_path):
    done = subprocess.run(command("gopher://x"), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("refold: ")


def test_without_the_sdk_it_says_what_to_install(url):
    script = "import sys; sys.modules['mcp'] = None; from refold.cli import app; app(['mcp'])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == 'refold: refold mcp: is not installed: pip install "refold[mcp]"\n'


async def test_settings_of_the_configuration_are_in_force(tmp_path, name):
    (tmp_path / "refold.yaml").write_text(f"store: sqlite:///{tmp_path}/set.db\n")
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "refold", "mcp"],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key != "REFOLD_STORE"},
    )
    async with stdio_client(server) as (read, write), ClientSession(read, write) as session:
        client = Client(session, await session.initialize())
        await client.ask("append", conversation=name, messages=[user("Hello")])
    assert again(f"sqlite:///{tmp_path}/set.db", name).get_count() == 1


@pytest.mark.skipif(not hasattr(mcp, "Client"), reason="the SDK before 2.0 has only the older handshake")
async def test_the_newest_protocol_is_spoken_too(url, chat):
    with serving(url) as address:
        async with mcp.Client(address) as client:
            told = wire(await client.call_tool("show_view", {"conversation": chat.conversation}))
            assert "Which files are large?" in told["content"][0]["text"]
            assert wire(await client.call_tool("show_view", {"conversation": "nope"}))["isError"]
            assert len(wire(await client.list_tools())["tools"]) == len(TOOLS)


async def test_the_how_to_page_says_how_to_start_it_and_what_it_can_do(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "howto" / "mcp.md").read_text()
    (block,) = re.findall(r"^```json\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    entry = json.loads(block)["mcpServers"]["refold"]
    assert entry["command"] == "refold"
    args = [arg.replace("/home/ann", str(tmp_path)) for arg in entry["args"]]
    assert args[-1] == f"sqlite:///{tmp_path}/agent.db"
    server = StdioServerParameters(command=sys.executable, args=["-m", "refold", *args])
    async with stdio_client(server) as (read, write), ClientSession(read, write) as session:
        await session.initialize()
        tools = wire(await session.list_tools())["tools"]
    said = {
        name: re.findall(r"\w+", given)
        for name, given in re.findall(r"^\| `(\w+) \{(.*?)\}`", page, re.MULTILINE)
    }
    assert said == {tool["name"]: [*tool["inputSchema"]["properties"]] for tool in tools}
    optional = {
        (tool["name"], name)
        for tool in tools
        for name in tool["inputSchema"]["properties"]
        if name not in tool["inputSchema"].get("required", ())
    }
    marked = re.findall(r"^\| `(\w+) \{(.*?)\}`", page, re.MULTILINE)
    assert optional == {(tool, name) for tool, given in marked for name in re.findall(r"(\w+)\?", given)}
