"""Contract of stores with a search index or vectors."""

from threading import Thread
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from refold.core.codec import Entry
from refold.core.query import SearchText, parse_query
from refold.session.api import open
from refold.stores.store import Key, Scope, SearchIndex
from refold.testing.embedder import WordEmbedder
from refold.testing.samples import (
    KEY,
    Reopen,
    entry,
    examples,
    require_reopen,
    requires,
    unique,
    user_message,
)

PIECES = [
    "getUser",
    "ById",
    "foo_bar",
    "ERR-4711",
    "数据库",
    "x",
    "X",
    "3",
    "é",
    "e\u0301",
    "🎉",
    "\\n",
    '"',
    "*",
]
PIECES += ["a b", " ", "\n", "/", ".", "tool:t", "\ud800", "\0", "ǅ", "ß", "ﬁ", "½", "한국어", "สวัสดี"]

PATIENCE_S = 20
"""How long an append may take that waits for nobody."""


def words(one: Entry) -> SearchText | None:
    """Entries of these tests have their text as their body, and their tool as their id."""
    text = one.body.decode("utf-8", "surrogatepass")[1:-1]
    return (
        None
        if text == "secret"
        else SearchText.of(text, (one.id,) if one.id else (), "tool" if one.id else "user")
    )


def found(store: Any, scope: Scope, text: str, limit: int = 50) -> list[tuple[str, int]]:
    for _ in store.index(scope, words):
        pass
    return [(one.key.conversation, one.at) for one in store.search(scope, parse_query(text), limit)]


class SearchContract:
    searched = requires(SearchIndex, "this store has no search index")

    def test_all_that_was_appended_since_is_found_and_what_has_no_words_is_not(self, searched: Any) -> None:
        assert found(searched, KEY, "apple") == found(searched, KEY.owner, "apple") == []
        searched.append(KEY, [entry(0, "an apple"), entry(1, "a pear")])
        assert found(searched, KEY, "apple") == [(KEY.conversation, 0)]
        searched.append(KEY, [entry(2, "secret"), entry(3, "the second apple")])
        assert sorted(at for _, at in found(searched, KEY, "apple")) == [0, 3]
        assert found(searched, KEY, "secret") == []
        assert sum(searched.index(KEY, words)) == 0

    # proves: B11
    def test_phrases_prefixes_tools_and_roles_narrow_a_search(self, searched: Any) -> None:
        texts = [("red apple tree", None), ("apple red", "Web-Search"), ("application", "web_fetch")]
        searched.append(KEY, [entry(at, text, id=id) for at, (text, id) in enumerate(texts)])
        asked = {
            '"red apple"': [0],
            "red-apple": [0],
            "apple red": [0, 1],
            "appl*": [0, 1, 2],
            "tool:web-search": [1],
            "tool:WEB*": [1, 2],
            "tool:web-search tool:web_fetch appl*": [1, 2],
            "role:user appl*": [0],
            "role:tool apple": [1],
            "apple tool:nobody": [],
            "role:assistant": [],
        }
        for text, places in asked.items():
            assert sorted(at for _, at in found(searched, KEY, text)) == places, text

    def test_where_few_have_all_the_words_those_that_have_any_come_after_them(self, searched: Any) -> None:
        texts = ["alpha", "beta", "alpha gamma", "nothing", "alpha and beta"]
        searched.append(KEY, [entry(at, text) for at, text in enumerate(texts)])
        places = [at for _, at in found(searched, KEY, "alpha beta")]
        assert places[0] == 4
        assert sorted(places) == [0, 1, 2, 4]
        assert found(searched, KEY, '"alpha gamma" "beta"') == []
        assert [at for _, at in found(searched, KEY, 'beta "alpha gamma"')] == []

    def test_a_name_as_a_whole_comes_before_its_pieces_side_by_side(self, searched: Any) -> None:
        texts = ["see src/a/b.py", *["src a b py"] * 20]
        searched.append(KEY, [entry(at, text) for at, text in enumerate(texts)])
        assert found(searched, KEY, "src/a/b.py", 1) == [(KEY.conversation, 0)]
        assert len(found(searched, KEY, "src/a/b.py")) == 21

    def test_what_is_common_is_found_newest_first_and_no_more_than_asked_for(self, searched: Any) -> None:
        searched.append(KEY, [entry(at, "the same words") for at in range(1500)])
        assert [at for _, at in found(searched, KEY, "same words", 3)] == [1499, 1498, 1497]

    # proves: B11
    def test_owners_see_their_own_only(self, searched: Any) -> None:
        keys = [Key("one", "a"), Key("one", "b"), Key("two", "a")]
        for key in keys:
            searched.append(key, [entry(0, "apple")])
        assert sorted(found(searched, "one", "apple")) == [("a", 0), ("b", 0)]
        assert found(searched, "two", "apple") == [("a", 0)]
        assert found(searched, keys[1], "apple") == [("b", 0)]
        assert found(searched, "nobody", "apple") == []

    def test_a_fork_finds_what_it_shares_and_nothing_later(self, searched: Any, forks: Any) -> None:
        early, late = Key(KEY.owner, "early"), Key(KEY.owner, "late")
        searched.append(KEY, [entry(at, "apple") for at in range(4)])
        searched.fork(KEY, early, 1)
        searched.fork(KEY, late, 3)
        searched.append(early, [entry(1, "apple")])
        assert sorted(found(searched, early, "apple")) == [("early", 0), ("early", 1)]
        everywhere = [("early", 1), *((KEY.conversation, at) for at in range(4))]
        assert sorted(found(searched, KEY.owner, "apple")) == sorted(everywhere)
        searched.erase(KEY)
        places = found(searched, KEY.owner, "apple")
        assert sorted(at for _, at in places) == [0, 1, 1, 2]
        assert ("early", 1) in places
        assert {name for name, _ in places} <= {"early", "late"}
        assert sorted(found(searched, late, "apple")) == [("late", 0), ("late", 1), ("late", 2)]
        searched.erase(late)
        assert sorted(found(searched, KEY.owner, "apple")) == [("early", 0), ("early", 1)]

    def test_a_fork_under_another_owner_finds_what_it_shares(self, searched: Any, forks: Any) -> None:
        searched.append(KEY, [entry(0, "apple"), entry(1, "apple")])
        searched.fork(KEY, Key("another", "fork"), 1)
        assert found(searched, "another", "apple") == [("fork", 0)]
        assert len(found(searched, KEY.owner, "apple")) == 2

    def test_what_is_erased_is_not_found_though_it_begins_anew(self, searched: Any) -> None:
        searched.append(KEY, [entry(0, "apple")])
        assert found(searched, KEY, "apple")
        searched.erase(KEY)
        assert found(searched, KEY, "apple") == found(searched, KEY.owner, "apple") == []
        searched.append(KEY, [entry(0, "pear")])
        assert found(searched, KEY, "apple") == []
        assert found(searched, KEY, "pear") == [(KEY.conversation, 0)]

    def test_what_was_erased_while_it_was_taken_in_is_not_found(self, searched: Any) -> None:
        searched.append(KEY, [entry(at, "apple") for at in range(3)])

        def erasing(one: Entry) -> SearchText | None:
            searched.erase(KEY)
            return words(one)

        for _ in searched.index(KEY, erasing):
            pass
        assert found(searched, KEY, "apple") == found(searched, KEY.owner, "apple") == []

    def test_nobody_who_appends_waits_for_what_is_taken_in(self, searched: Any) -> None:
        searched.append(KEY, [entry(0, "apple")])
        other, done = Key(KEY.owner, "other"), list[bool]()

        def slowly(one: Entry) -> SearchText | None:
            thread = Thread(target=searched.append, args=[other, [entry(0, "pear")]], daemon=True)
            thread.start()
            thread.join(PATIENCE_S)
            done.append(not thread.is_alive())
            return words(one)

        for _ in searched.index(KEY, slowly):
            pass
        assert done == [True]
        assert found(searched, KEY, "apple") == [(KEY.conversation, 0)]

    def test_the_index_is_there_when_the_store_is_opened_again(
        self, searched: Any, reopen: Reopen | None
    ) -> None:
        opening = require_reopen(reopen)
        searched.append(KEY, [entry(0, "apple")])
        assert found(searched, KEY, "apple")
        other: Any = opening()
        assert sum(other.index(KEY, words)) == 0
        assert found(other, KEY, "apple") == [(KEY.conversation, 0)]
        other.append(KEY, [entry(1, "pear")])
        other.close()
        assert found(searched, KEY, "pear") == [(KEY.conversation, 1)]

    @examples
    @given(
        st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join), max_size=8),
        st.data(),
    )
    def test_what_is_found_is_what_matches(self, searched: Any, texts: list[str], data: Any) -> None:
        key = Key(f"owner {next(unique)}", "a")
        bodies = [b'"%s"' % text.encode("utf-8", "surrogatepass") for text in texts]
        made = [Entry(at, "noted", None, b"[]", body) for at, body in enumerate(bodies)]
        searched.append(key, made)
        asked = data.draw(st.sampled_from([*texts, "x", "user 4711"]) if texts else st.just("x"))
        try:
            query = parse_query(asked)
        except Exception:
            return
        known = [words(one) for one in made]
        right = [at for at, one in enumerate(known) if one is not None and query.matches(one)]
        got = [at for _, at in found(searched, key, asked)]
        assert sorted(got[: len(right)]) == right
        some = [at for at, one in enumerate(known) if one and query.matches(one, any_word=True)]
        assert set(got) <= set(right) | (set(some) if query.can_relax else set())

    # By meaning

    # proves: B11
    def test_vectors_are_found_by_what_they_are_near_to_and_erased_with_the_rest(self, searched: Any) -> None:
        session = open("a", store=searched, embedder=WordEmbedder(("car", "automobile")))
        session.append(
            [
                user_message("the automobile is red"),
                user_message("bread and butter"),
                user_message("a blue house"),
            ]
        )
        assert [hit.at for hit in session.search("car")] == [0]
        session.append(user_message("an old car"))
        assert {hit.at for hit in session.search("automobile")} == {0, 3}
        session.clear()
        assert session.search("car") == []

    def test_vectors_of_a_fork_are_those_of_what_it_shares(self, searched: Any, forks: Any) -> None:
        session = open("a", store=searched, embedder=WordEmbedder(("car", "automobile")))
        session.append([user_message("the automobile"), user_message("an automobile")])
        fork = session.fork("b", at=0)
        assert [hit.at for hit in fork.search("car")] == [0]
        assert len(fork.search("car", everywhere=True)) == 2
        session.clear()
        assert [(hit.conversation, hit.at) for hit in fork.search("car", everywhere=True)] == [("b", 0)]
