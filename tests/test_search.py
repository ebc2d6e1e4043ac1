"""Finding what was said: in what was hidden, in forks, in other conversations, and whatever is asked."""

import json
import re
import subprocess
import sys
from array import array
from pathlib import Path
from random import Random
from threading import Event, Thread
from warnings import catch_warnings, simplefilter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import refold
from refold.core.errors import SettingError
from refold.core.query import MAX_QUERY_CHARS, MAX_WORDS, SearchText, excerpt, fold, names, parse_query, parts
from refold.session.search import as_tool_text
from refold.stores.memory import MemoryStore
from refold.stores.nearest import nearest
from refold.stores.sqlite import SQLiteStore
from refold.testing.embedder import WordEmbedder
from refold.testing.samples import user_message
from refold.testing.store_search import PIECES

TRACES = Path(__file__).parents[2] / "shared" / "data" / "traces"
NAME = re.compile(r"(?<!\w)[A-Za-z0-9][\w./:\-]{3,}(?!\w)")


@pytest.fixture(params=["memory", "sqlite"])
def store(request, tmp_path):
    store = MemoryStore() if request.param == "memory" else SQLiteStore(tmp_path / "refold.db")
    yield store
    store.close()


def places(session, query, **options):
    return [hit.at for hit in session.search(query, **options)]


def calls(tool, arguments, id="c"):
    function = {"name": tool, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": id, "type": "function", "function": function}]}


def result(text, id="c"):
    return {"role": "tool", "tool_call_id": id, "content": text}


# Words


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("Foo-Bar_baz", "foo bar baz"),
        ("数据库 ok", "数 据 库 ok"),
        ("ＡＢＣ ﬁne Straße", "abc fine strasse"),
        ("a\0b\ud800c🎉", "a b c 🎉"),
        ("", ""),
    ],
)
def test_a_text_is_taken_apart_into_terms(text, terms):
    assert fold(text) == terms


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("getUserById", "get user by id"),
        ("HTTPServer", "http server"),
        ("ERR4711", "err 4711"),
        ("plain", ""),
        ("3f9ac0127b", ""),
        ("aB" * 50, ""),
    ],
)
def test_names_have_parts_and_hashes_have_none(name, pieces):
    assert parts(name) == pieces


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=8).map("".join), st.data())
def test_a_thing_asked_for_exactly_as_it_was_said_is_found(text, data):
    asked = data.draw(st.sampled_from([text, *text.split()]))
    if re.search(r"(tool|role):", asked, re.IGNORECASE):
        asked = f'"{asked.replace(chr(34), " ")}"'  # which would be filters
    words = SearchText.of(text, (), "user")
    try:
        query = parse_query(asked)
    except SettingError:
        assert not fold(asked)
        return
    assert query.matches(words)
    excerpt(text, query, 40)


def test_escapes_of_json_hide_nothing():
    words = SearchText.of(json.dumps({"out": "one\nfoo_bar\tgetIt é"}), (), "tool")
    for asked in ("foo_bar", '"one foo"', "getIt", "é", "get it"):
        assert parse_query(asked).matches(words), asked
    assert names("src/a.py") in SearchText.of(r"C:\new\nfile src/a.py", (), "tool").parts.split()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('"red apple" tree', [("red", "apple"), ("tree",)]),
        ('odd "quote here', [("odd",), ("quote",), ("here",)]),
        ('a"b c"d', [("a",), ("b", "c"), ("d",)]),
        ('""" "" "', []),
        ("role:admin", [("role", "admin")]),
        ('tool:"x', [("tool",), ("x",)]),
        ("AND OR NOT NEAR(a, b) a^2 {x}:y", None),
        ("x x x X", [("x",)]),
    ],
)
def test_whatever_is_in_a_query_is_harmless(text, wanted, store):
    session = refold.open("a", store=store)
    session.append(user_message("apple"))
    if wanted == []:
        with pytest.raises(SettingError, match="nothing to search for"):
            session.search(text)
        return
    session.search(text)
    if wanted is not None:
        assert [one.terms for one in parse_query(text).wanted] == wanted


@pytest.mark.parametrize("text", ["role:user tool:psql", "ROLE:User TOOL:PSQL", 'Role:"USER" tool:"Psql"'])
def test_case_does_not_matter_in_filters(text):
    query = parse_query(text)
    assert (query.wanted, query.roles) == ((), ("user",))
    assert query.allows(("psql",), "user")
    assert not query.allows(("psql",), "tool")


def test_accents_matter_and_case_does_not(store):
    session = refold.open("a", store=store)
    session.append([user_message("a CAFÉ"), user_message("the cafe\u0301")])
    assert sorted(places(session, "café")) == [0, 1]
    assert places(session, "cafe") == []


@pytest.mark.parametrize("text", ["", " ", "!?", "\0", "\ud800", '"', "*", "tool:"[:0]])
def test_an_empty_query_is_refused(text, store):
    with pytest.raises(SettingError, match="nothing to search for"):
        refold.open("a", store=store).search(text)


@pytest.mark.parametrize("query", [None, 7, b"x", ["x"]])
def test_a_query_that_is_no_text_is_refused(query, store):
    with pytest.raises(SettingError, match="expected a text"):
        refold.open("a", store=store).search(query)


@pytest.mark.parametrize("limit", [0, -1, 1_001, "5", 1.5, None, True])
def test_a_limit_that_cannot_be_met_is_refused(limit, store):
    with pytest.raises(SettingError, match="limit"):
        refold.open("a", store=store).search("x", limit=limit)


@pytest.mark.parametrize(
    "query",
    [
        '"' * 10_001,
        "x" * 100_000,
        "needle " * 5_000,
        " ".join(f"w{n}*" for n in range(5_000)),
        "((((" * 5_000 + "needle",
        '"needle' * 3_000,
        "🎉" * 9_999,
        "数" * 9_999,
        "a-" * 9_999,
        "tool:x " * 3_000 + "needle",
        "\0needle\ud800" * 1_000,
    ],
)
def test_a_hostile_query_is_answered_or_refused(query, store):
    session = refold.open("a", store=store)
    session.append([user_message("a needle 🎉🎉 数数 a-a " * 500), user_message("a " * 20_000)])
    try:
        assert len(session.search(query)) <= 2
        assert len(parse_query(query).wanted) <= MAX_WORDS
    except SettingError:
        assert not fold(query[:MAX_QUERY_CHARS])


def test_an_excerpt_is_one_line_from_where_most_of_it_stands():
    text = "apple " + "x\n" * 500 + "the apple   tree\nis here " + "y " * 500
    shown = excerpt(text, parse_query("tree apple"), 80)
    assert "the apple tree is here" in shown
    assert "\n" not in shown
    assert len(shown) <= 82
    assert excerpt("short", parse_query("nowhere"), 80) == "short"


# Sessions


# proves: B11
def test_what_was_hidden_is_found_and_known_to_be_out_of_view(store):
    session = refold.open("a", store=store)
    session.append([user_message(f"the code of item {n} is K-{n:04}") for n in range(30)])
    session.compact(keep_recent=2)
    hits = {hit.at: hit for hit in session.search("K-0003") + session.search("K-0029")}
    assert set(hits) == {3, 29}
    assert (hits[3].in_view, hits[29].in_view) == (False, True)
    assert hits[3].excerpt == "the code of item 3 is K-0003"
    assert (hits[3].conversation, hits[3].role, hits[3].tools) == ("a", "user", ())
    assert hits[3].time == session.get_range(3, 4)[0].timestamp


def test_calls_and_results_are_found_but_not_those_of_refolds_own_tools(store):
    session = refold.open("a", store=store)
    session.append(user_message("please"))
    session.append(
        [calls("psql", '{"query": "select zebra_id\\nfrom herd"}', "1"), result("zebra_id 17", "1")]
    )
    session.append([calls("refold_search", '{"query": "zebra_id"}', "2"), result("#1 psql: zebra_id", "2")])
    session.append([calls("refold_expand", '{"at": 1}', "3"), result("select zebra_id from herd", "3")])
    assert sorted(places(session, "zebra_id")) == [1, 2]
    assert places(session, "herd") == [1]
    assert sorted(places(session, "tool:psql")) == [1, 2]
    assert places(session, "tool:refold_expand") == []


# proves: B11
def test_a_search_everywhere_names_the_conversations(store):
    for name in ("a", "b"):
        refold.open(name, store=store).append(user_message(f"apple of {name}"))
    refold.open("c", store=store, owner="somebody else").append(user_message("apple of c"))
    session = refold.open("a", store=store)
    assert sorted((hit.conversation, hit.in_view) for hit in session.search("apple", everywhere=True)) == [
        ("a", True),
        ("b", True),
    ]
    assert [hit.conversation for hit in session.search("apple")] == ["a"]


def test_what_is_said_while_others_search_is_found(store):
    session, other = refold.open("a", store=store), refold.open("a", store=store)
    for n in range(5):
        session.append(user_message(f"thing number K-{n}"))
        assert places(other, f"K-{n}") == [n]


# Corrections


@pytest.fixture(params=["memory", "sqlite", "plain"])
def corrected(request, tmp_path):
    """A session in which #1 says something else than was said."""
    store = SQLiteStore(tmp_path / "refold.db") if request.param == "sqlite" else MemoryStore()
    store = Plain() if request.param == "plain" else store
    session = refold.open("a", store=store)
    answer = {"role": "assistant", "content": "HAT078 costs 120."}
    session.append([user_message("what is the price"), answer, user_message("thanks")])
    session.correct(1, "HAT118 costs 90.")
    yield session
    store.close()


def test_what_a_correction_says_is_found_at_the_place_of_what_it_corrects(corrected):
    (hit,) = corrected.search("HAT118")
    assert (hit.at, hit.role, hit.in_view, hit.is_corrected) == (1, "assistant", True, False)
    assert hit.excerpt == "HAT118 costs 90."
    assert corrected.search("HAT118 role:assistant") == [hit]
    assert corrected.search("HAT118 role:user") == []
    assert as_tool_text([hit]) == "#1 assistant (shown above): HAT118 costs 90."


def test_what_was_corrected_is_found_and_says_so(corrected):
    (hit,) = corrected.search("HAT078")
    assert (hit.at, hit.in_view, hit.is_corrected) == (1, False, True)
    assert as_tool_text([hit]) == "#1 assistant (before it was corrected): HAT078 costs 120."
    corrected.correct(1, "HAT200 costs 80.")
    assert [(hit.at, hit.is_corrected) for hit in corrected.search("HAT118")] == [(1, True)]
    assert [(hit.at, hit.is_corrected) for hit in corrected.search("HAT200")] == [(1, False)]
    both = sorted((hit.excerpt, hit.is_corrected) for hit in corrected.search("costs"))
    assert both == [("HAT078 costs 120.", True), ("HAT118 costs 90.", True), ("HAT200 costs 80.", False)]


def test_a_correction_that_was_taken_back_is_not_found_and_takes_no_place(corrected):
    corrected.undo()
    assert corrected.search("HAT118") == []
    (hit,) = corrected.search("costs", limit=1)
    assert (hit.excerpt, hit.in_view, hit.is_corrected) == ("HAT078 costs 120.", True, False)


def test_what_a_correction_means_is_found(store):
    session = refold.open("a", store=store, embedder=WordEmbedder(("car", "automobile")))
    session.append([user_message("my bicycle"), user_message("bread")])
    session.correct(0, "my automobile")
    for query in ("car", "car role:user"):
        assert [(hit.at, hit.excerpt) for hit in session.search(query)] == [(0, "my automobile")]
    assert session.search("car role:assistant") == []


def test_a_correction_that_is_hidden_is_found_out_of_view(store):
    session = refold.open("a", store=store)
    session.append([user_message(f"the code of item {n} is K-{n:04}") for n in range(30)])
    session.correct(3, "the code of item 3 is Z-1")
    session.compact(keep_recent=2)
    (hit,) = session.search("Z-1")
    assert (hit.at, hit.in_view, hit.is_corrected) == (3, False, False)
    elsewhere = refold.open("b", store=store).search("K-0003", limit=1, everywhere=True)
    assert [(hit.at, hit.is_corrected) for hit in elsewhere] == [(3, True)]


def test_a_fork_from_before_a_correction_does_not_know_it(store):
    session = refold.open("a", store=store)
    session.append([user_message("one apple"), user_message("two")])
    fork = session.fork("b", at=1)
    session.correct(0, "one pear")
    assert fork.search("pear") == []
    assert [(hit.at, hit.is_corrected) for hit in fork.search("apple")] == [(0, False)]


async def _found(url):
    async with await refold.aopen("a", store=url) as session:
        await session.append(user_message("an apple"))
        return [hit.at for hit in await session.search("apple")]


def test_search_can_be_awaited():
    import asyncio

    assert asyncio.run(_found("memory://")) == [0]


def test_a_text_for_a_model_is_short_and_forges_no_handles(store):
    session = refold.open("a", store=store)
    session.append([user_message(f"apple [refold #7 x] {n} " + "word " * 100) for n in range(40)])
    hits = session.search("apple", limit=40)
    text = as_tool_text(hits)
    assert len(text) < 4_200
    assert "##7" in text
    assert "more: ask for something more specific" in text
    assert text.startswith(f"#{hits[0].at} user (shown above): ")
    assert not as_tool_text(hits, handles=False).startswith("#")
    assert as_tool_text([]).startswith("Nothing was found")
    assert len(as_tool_text(hits, most_chars=100)) < 300


# proves: A11
def test_through_the_tool_only_its_own_conversation_is_searched(store):
    refold.open("b", store=store).append(user_message("apple of b"))
    session = refold.open("a", store=store)
    session.append(user_message("apple of a"))
    assert "apple of a" in session.call("refold_search", {"query": "apple"})
    assert "apple of b" not in session.call("refold_search", '{"query": "apple", "limit": 20}')
    assert "nothing to search for" in session.call("refold_search", {"query": '"'})


# By meaning


# proves: B11
def test_what_is_high_in_both_lists_comes_first(store):
    session = refold.open("a", store=store, embedder=WordEmbedder(("car", "automobile")))
    session.append(
        [
            user_message("my automobile"),
            user_message("car and automobile"),
            user_message("bread"),
            user_message("the car in a long text"),
        ]
    )
    assert places(session, "car")[0] == 1
    assert 0 in places(session, "car")
    assert 2 not in places(session, "car")
    assert places(session, "car role:assistant") == []


def broken(texts):
    raise OSError("no network")


# proves: E7
@pytest.mark.parametrize("embedder", [broken, lambda texts: [], lambda texts: ["x"], lambda texts: None])
def test_an_embedder_that_fails_costs_only_what_it_would_have_found(store, embedder):
    session = refold.open("a", store=store, embedder=embedder)
    session.append(user_message("an apple"))
    with pytest.warns(UserWarning, match="by words only"):
        assert places(session, "apple") == [0]


def test_an_embedder_that_is_none_is_refused():
    with pytest.raises(SettingError, match="a callable from texts to vectors"):
        refold.open("a", store="memory://", embedder=7)


def test_a_model_without_its_extra_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "model2vec", None)  # as if it were not installed
    session = refold.open("a", store="memory://", embedder="minishlab/potion-base-8M")
    session.append(user_message("apple"))
    with pytest.raises(SettingError, match=r"refold\[search\]"):
        session.search("apple")


# Stores


class Plain:
    """A store that can do only what every store must."""

    def __init__(self):
        store = MemoryStore()
        self.append, self.read, self.erase = store.append, store.read, store.erase
        self.conversations, self.close = store.conversations, store.close


def test_a_store_without_an_index_is_read():
    store = Plain()
    session = refold.open("a", store=store)
    session.append([user_message("red apple"), user_message("green pear"), user_message("apple")])
    refold.open("b", store=store).append(user_message("apple of b"))
    assert sorted(places(session, "apple")) == [0, 2]
    assert sorted(places(session, "green apple")) == [0, 1, 2]
    assert len(session.search("apple", everywhere=True)) == 3


def test_a_store_that_is_locked_is_read(tmp_path):
    import apsw

    session = refold.open("a", store=f"sqlite:///{tmp_path}/refold.db?timeout_s=0.1")
    session.append(user_message("an apple"))
    other = apsw.Connection(str(tmp_path / "refold.db"))
    other.execute("BEGIN IMMEDIATE")
    assert places(session, "apple") == [0]
    other.execute("ROLLBACK")
    assert places(session, "apple") == [0]


def test_words_that_were_indexed_and_erased_are_gone_from_the_file(tmp_path):
    path = tmp_path / "refold.db"
    store = SQLiteStore(path)
    secret = refold.open("secret", store=store, embedder=WordEmbedder())
    other = refold.open("other", store=store, embedder=WordEmbedder())
    for n in range(150):
        secret.append(user_message(f"swordfish{n} camelotSecret 密 " * 3))
        other.append(user_message(f"innocent{n} " * 3))
        if n % 20 == 0:
            secret.search("swordfish*", everywhere=True)
    assert len(secret.search("camelotsecret", everywhere=True, limit=200)) == 150

    def lingering():
        data = b"".join(file.read_bytes() for file in tmp_path.iterdir())
        return [word for word in (b"wordfish", b"amelotsecret", "密".encode()) if word in data]

    assert lingering()
    secret.clear()
    assert lingering() == []
    assert other.search("swordfish*", everywhere=True) == []
    assert len(other.search("innocent7", everywhere=True)) == 1
    assert list(store.examine()) == []


def test_of_one_phrase_alone_the_newest_come_first(tmp_path):
    with refold.open("a", store=f"sqlite:///{tmp_path}/refold.db") as session:
        session.append([user_message("a red apple " * (5 - n) + "and more " * n) for n in range(5)])
        assert places(session, '"red apple"', limit=3) == [4, 3, 2]
        assert places(session, '"red apple" role:user', limit=3) == [4, 3, 2]
        assert places(session, "red-apple", limit=9) == [4, 3, 2, 1, 0]
        assert places(session, "red", limit=1) == [0]


def test_places_in_the_index_that_outlived_their_entries_are_found_by_an_examination(tmp_path):
    import apsw

    store = SQLiteStore(tmp_path / "refold.db")
    session = refold.open("a", store=store, embedder=WordEmbedder())
    session.append([user_message("apple"), user_message("pear")])
    session.search("apple")
    assert list(store.examine()) == []
    other = apsw.Connection(str(tmp_path / "refold.db"))
    other.execute("DELETE FROM refold_entry WHERE place % 2 = 1")
    other.close()
    assert [flaw.problem for flaw in store.examine()] == [
        "1 places in the index belong to no conversation",
        "1 vectors belong to no conversation",
    ]
    assert places(refold.open("b", store=store), "pear", everywhere=True) == []


def test_a_damaged_entry_is_passed_over_and_the_others_are_found(tmp_path):
    import apsw

    path = tmp_path / "refold.db"
    session = refold.open("a", store=f"sqlite:///{path}")
    session.append([user_message(f"apple {n}") for n in range(5)])
    session.store.close()
    other = apsw.Connection(str(path))
    other.execute("UPDATE refold_entry SET body = x'7800' WHERE place % 5 = 1; ")
    other.execute("UPDATE refold_entry SET body = 7 WHERE place % 5 = 2")
    other.close()
    store = SQLiteStore(path)
    assert sum(store.index("default", lambda entry: SearchText.of("apple", (), "user"))) == 5
    assert len(store.search("default", parse_query("apple"), 10)) == 3
    store.close()


@pytest.mark.parametrize("what", ["words", "vectors"])
def test_whoever_read_more_stores_what_is_left_when_somebody_else_was_faster(tmp_path, what):
    store = SQLiteStore(tmp_path / "refold.db")
    session = refold.open("a", store=store)
    session.append(user_message("apple"))
    has_read, may_store = Event(), Event()

    def follow(meanwhile):
        def words(entry):
            meanwhile()
            return SearchText.of(f"apple {entry.at}", (), "user")

        def vectors(entries):
            meanwhile()
            return [[array("f", [1.0, 0.0]).tobytes()] for _ in entries]

        for _ in store.index("default", words) if what == "words" else store.embed("default", "x", vectors):
            pass

    def faster():
        has_read.set()
        assert may_store.wait(60)

    def slower():
        may_store.set()
        other.join(60)

    other = Thread(target=follow, args=[faster])
    other.start()
    assert has_read.wait(60)
    session.append([user_message("apple"), user_message("apple")])
    follow(slower)
    if what == "words":
        found = store.search("default", parse_query("apple"), 10)
    else:
        found = store.nearest("default", "x", array("f", [1.0, 0.0]).tobytes(), 10)
    assert sorted(one.at for one in found) == [0, 1, 2]


SEARCHING = """
import sys, refold
me, url = sys.argv[1:]
session = refold.open("a", store=url)
for n in range(60):
    at = session.append({"role": "user", "content": f"unique{me}x{n}"})
    if not session.search(f"unique{me}x{n}"):
        sys.exit(f"unique{me}x{n} was not found")
"""


def test_what_a_process_appended_it_finds_though_others_append_and_search(tmp_path):
    url = f"sqlite:///{tmp_path}/refold.db"
    refold.open("a", store=url).append(user_message("start"))
    command = [sys.executable, "-c", SEARCHING]
    running = [subprocess.Popen([*command, f"{n}", url], stderr=subprocess.PIPE) for n in range(4)]
    assert [one.communicate(timeout=120)[1] for one in running] == [b""] * 4


def test_where_there_are_no_vectors_nothing_is_near(store):
    assert nearest(bytes(8), [], 5) == nearest(bytes(8), [("another length", bytes(4))], 5) == []
    with catch_warnings():
        simplefilter("error")
        assert refold.open("a", store=store, embedder=WordEmbedder()).search("apple") == []


def test_small_conversations_are_embedded_together(tmp_path):
    store = SQLiteStore(tmp_path / "refold.db")
    for n in range(250):
        refold.open(f"chat {n}", store=store).append(user_message(f"apple {n}"))
    asked = list[int]()

    def vectors(some):
        asked.append(len(some))
        return [[bytes(8)] for _ in some]

    assert list(store.embed("default", "e", vectors)) == asked == [100, 100, 50]
    assert list(store.embed("default", "e", vectors)) == []
    assert len(store.nearest("default", "e", bytes(8), 1000)) == 250


def test_two_who_index_at_the_same_time_index_once(tmp_path):
    stores = [SQLiteStore(tmp_path / "refold.db") for _ in range(2)]
    for name in ("a", "b", "c"):
        refold.open(name, store=stores[0]).append([user_message(f"apple {n}") for n in range(170)])

    def take_in(store):
        for _ in store.index("default", lambda entry: SearchText.of("apple", (), "user")):
            pass

    threads = [Thread(target=take_in, args=[store]) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stores[1].search("default", parse_query("apple"), 1000)) == 510
    assert list(stores[0].examine()) == []


# Real conversations


@pytest.mark.skipif(not TRACES.is_dir(), reason="no recorded conversations here")
@pytest.mark.parametrize("file", sorted(TRACES.glob("*.jsonl")), ids=lambda file: file.stem)
def test_every_name_in_recorded_conversations_is_found_at_its_place(file, tmp_path):
    random = Random(file.name)
    lines = file.read_text().splitlines()
    store, drawn = SQLiteStore(tmp_path / "refold.db"), []
    for line in random.sample(lines, min(8, len(lines))):
        trace = json.loads(line)
        session = refold.open(trace["id"], store=store)
        plain = [{k: v for k, v in message.items() if k[:2] != "x_"} for message in trace["messages"]]
        session.append(plain)
        for one in session.get_all():
            found = NAME.findall(one.message.text)
            drawn += [(session, one.at, name) for name in random.sample(found, min(4, len(found)))]
    for session, at, name in random.sample(drawn, min(300, len(drawn))):
        assert at in places(session, f'"{name}"', limit=1000), (session.conversation, at, name)
        if ":" not in name:
            assert at in places(session, name, limit=1000), (session.conversation, at, name)


# The command


def run(*arguments):
    command = [sys.executable, "-m", "refold", "search", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_finds_in_all_conversations_or_in_one(tmp_path):
    url = f"sqlite:///{tmp_path}/refold.db"
    for name in ("a", "b"):
        with refold.open(name, store=url) as session:
            session.append([user_message(f"ERR-4711 in {name}"), user_message("bread")])
    everywhere = json.loads(run("ERR-4711", "--store", url, "--json").stdout)
    assert sorted(hit["conversation"] for hit in everywhere["hits"]) == ["a", "b"]
    assert set(everywhere["hits"][0]) == {
        *("conversation", "at", "role", "tools", "excerpt", "score", "in_view", "time", "is_corrected")
    }
    one = run("ERR-4711", "--store", url, "--conversation", "b")
    assert one.returncode == 0
    assert "#0" in one.stdout
    assert "ERR-4711 in b" in one.stdout
    assert "in a" not in one.stdout
    assert len(json.loads(run("err*", "--limit", "1", "--store", url, "--json").stdout)["hits"]) == 1


def test_the_command_says_no_when_nothing_is_found_and_explains_wrong_use(tmp_path):
    url = f"sqlite:///{tmp_path}/refold.db"
    refold.open("a", store=url).append(user_message("bread"))
    nothing = run("apple", "--store", url)
    assert (nothing.returncode, "Nothing found" in nothing.stdout) == (1, True)
    assert json.loads(run("apple", "--store", url, "--json").stdout)["hits"] == []
    for wrong in (["", "--store", url], ["x", "--limit", "0", "--store", url]):
        done = run(*wrong)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
    assert run("x", "--conversation", "nobody", "--store", url).returncode == 1
    assert run("x", "--store", f"sqlite:///{tmp_path}/none.db").returncode == 1


def test_an_owner_without_conversations_finds_nothing(store):
    assert refold.open("a", store=store, owner="nobody").search("x", everywhere=True) == []


# proves: B11
def test_a_model_of_model2vec_finds_by_meaning(tmp_path):
    pytest.importorskip("model2vec")
    import numpy
    from model2vec import StaticModel
    from tokenizers import Tokenizer, models, pre_tokenizers

    alike = [("kitten", "feline"), ("automobile", "vehicle"), ("cost", "price")]
    vocabulary = {"[UNK]": 0, "[PAD]": 1} | {word: n + 2 for n, word in enumerate(sum(alike, ()))}
    vectors = numpy.zeros((len(vocabulary), 8), numpy.float32)
    for n, pair in enumerate(alike):
        for word in pair:
            vectors[vocabulary[word], n] = 1.0
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    StaticModel(vectors, tokenizer).save_pretrained(str(tmp_path / "model"))
    url = f"sqlite:///{tmp_path}/c.db"
    with refold.open("c", store=url) as chat:
        chat.append([{"role": "user", "content": f"about a {first}"} for first, _ in alike])
    with refold.open("c", store=url, embedder=str(tmp_path / "model")) as chat:
        assert [chat.search(second)[0].at for _, second in alike] == [0, 1, 2]
    with (
        refold.open("c", store=url, embedder=str(tmp_path / "nothing")) as chat,
        pytest.raises(SettingError, match="cannot be loaded"),
    ):
        chat.search("feline")
