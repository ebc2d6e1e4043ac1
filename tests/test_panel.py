"""The panel in a real browser: what people see, and that nothing which was said does more than be read."""

import re
import shutil
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path
from threading import Thread

import httpx
import pytest

import refold
from panel_world import HOSTILE, SETTINGS, SHOTS, browser_path, fill, nasty, served, watched
from refold.serve.tokens import hash_of
from served import WAIT_S, until

playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: the panel is not looked at")
expect = playwright.expect
expect.set_options(timeout=WAIT_S * 1_000)
STATIC = files("refold.serve").joinpath("static")
SIZES = {1440: {"width": 1440, "height": 900}, 390: {"width": 390, "height": 844}}
LOOKS = [pytest.param(width, theme, id=f"{width}-{theme}") for width in SIZES for theme in ("light", "dark")]
ROWS = 60
"""Elements that a list may have, however long it is."""


@pytest.fixture(scope="module")
def browser():
    path = browser_path()  # its driver may not even start where there is none
    with playwright.sync_playwright() as one:
        browser = one.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def store(tmp_path):
    return f"sqlite:///{tmp_path}/panel.db"


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    file = tmp_path_factory.mktemp("filled") / "panel.db"
    fill(f"sqlite:///{file}")
    return file


@pytest.fixture
def full(store, filled):
    """A store of one's own with conversations in it."""
    shutil.copytree(filled.parent, Path(store.removeprefix("sqlite:///")).parent, dirs_exist_ok=True)
    return store


@pytest.fixture
def panel(full):
    with served(full) as panel:
        yield panel


@pytest.fixture
def page(browser, panel):
    with watched(browser, panel) as page:
        yield page


@pytest.fixture(params=SIZES)
def sized(browser, panel, request):
    """A page on a desk, and one on a phone."""
    with watched(browser, panel, viewport=SIZES[request.param]) as page:
        yield page


def grid(page, name):
    return page.get_by_role("grid", name=name)


def button(page, name):
    return page.get_by_role("button", name=name, exact=True)


def settle(page):
    expect(page.locator("main")).to_have_attribute("aria-busy", "false")


def opened(page, panel, conversation="selector", at=None):
    page.goto(panel.link(conversation, at))
    settle(page)


def column(page, name):
    """A column, which is behind a tab on a phone."""
    tab = page.get_by_role("tab", name=name)
    if tab.is_visible():
        tab.click()
    return grid(page, name)


def shot(page, name):
    if SHOTS:
        page.screenshot(path=Path(SHOTS) / f"{name}.png")


def edit_of(panel, kind="summarize"):
    edits = httpx.get(f"{panel.url}/api/conversations/selector/edits?limit=500").json()["edits"]
    return next(one for one in reversed(edits) if one["kind"] == kind and one["state"] == "in force")


# The files


def test_files_have_their_types_and_are_sent_again_only_when_they_changed(panel):
    for path, kind in [
        ("", "text/html"),
        ("/static/panel.js", "text/javascript"),
        ("/static/panel.css", "text/css"),
    ]:
        found = httpx.get(f"{panel.url}/panel{path}")
        assert (found.status_code, found.headers["content-type"]) == (200, f"{kind}; charset=utf-8")
        assert found.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'; script-src 'self'" in found.headers["content-security-policy"]
        again = httpx.get(f"{panel.url}/panel{path}", headers={"if-none-match": found.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "name", ["nothing.js", "..%2fpanel.py", "%2e%2e/panel.py", ".", "%00", "static/panel.js"]
)
def test_only_files_of_the_panel_are_served(panel, name):
    assert httpx.get(f"{panel.url}/panel/static/{name}").status_code in (400, 404)


def test_no_text_ever_becomes_markup_or_code_and_nothing_is_asked_of_others():
    never = r"(inner|outer|insertAdjacent|set)HTML|document\.write|DOMParser|\beval\b|new Function|srcdoc"
    for file in STATIC.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")  # a name, not an address
        assert not re.search(never, text), file.name
        assert not re.search(r"[a-z]+://|[\"'(]//", text), file.name
    page = STATIC.joinpath("index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", page)


# The list


@pytest.mark.parametrize(("width", "theme"), LOOKS)
def test_the_list_tells_of_every_conversation(browser, panel, width, theme):
    with watched(browser, panel, viewport=SIZES[width], color_scheme=theme) as page:
        page.goto(f"{panel.url}/panel")
        row = grid(page, "Conversations").get_by_role("row").filter(has_text="Port the message")
        expect(row).to_contain_text("selector")
        expect(row.locator(".saved")).to_contain_text(re.compile(r"[1-9]\d%"))
        expect(page.locator(".connection")).to_have_attribute("data-state", "live")
        expect(grid(page, "Conversations").get_by_role("row")).not_to_have_count(0)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        shot(page, f"list-{width}-{theme}")
        row.click()
        expect(page).to_have_title("Port the message selector to the new theme · refold")
        assert page.url.endswith("/panel#/c/selector")


def test_the_list_is_walked_through_by_keyboard(page, panel):
    page.goto(f"{panel.url}/panel")
    expect(grid(page, "Conversations").get_by_text("trip-11")).to_be_visible()
    page.keyboard.press("j")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("k")
    expect(page.locator(".row.cursor")).to_have_attribute("aria-rowindex", "1")
    page.keyboard.press("Enter")
    settle(page)
    assert page.url.endswith("#/c/trip-11")


def test_an_empty_list_tells_how_to_point_an_agent_at_it(browser, store):
    with served(store) as panel, watched(browser, panel) as page:
        page.goto(f"{panel.url}/panel")
        expect(page.get_by_text("No conversations yet")).to_be_visible()
        expect(page.locator("main")).to_contain_text(f"OPENAI_BASE_URL={panel.url}/openai/v1")
        expect(page.locator("main")).to_contain_text(f"ANTHROPIC_BASE_URL={panel.url}/anthropic")
        shot(page, "empty")


def test_while_the_list_is_read_there_are_bones_and_after_a_failure_it_can_be_tried_again(page, panel):
    held = []
    page.route("**/api/conversations?*", lambda route: held.append(route))
    page.goto(f"{panel.url}/panel")
    expect(page.locator(".waiting")).not_to_have_count(0)
    until(lambda: held or page.wait_for_timeout(20))
    answer = {"error": {"code": "unavailable", "message": "The store does not answer."}}
    held.pop().fulfill(status=503, json=answer)
    expect(page.get_by_text("The store does not answer.")).to_be_visible()
    page.unroute_all()
    button(page, "Retry").click()
    expect(grid(page, "Conversations").get_by_text("trip-11")).to_be_visible()
    page.forgiven = "503"


def test_a_conversation_that_is_not_there_says_so(page, panel):
    page.goto(panel.link("nobody"))
    expect(page.get_by_text("There is no such conversation")).to_be_visible()
    expect(button(page, "Retry")).to_be_visible()
    page.forgiven = "404"


def test_a_link_may_name_a_conversation_by_its_title(page, panel):
    opened(page, panel, "Port the message selector to the new theme")
    assert page.url.endswith("#/c/selector")
    page.forgiven = "404"


def test_search_finds_conversations_and_what_was_said_in_them(page, panel):
    page.goto(f"{panel.url}/panel")
    page.keyboard.press("/")
    page.keyboard.type("harbor")
    hit = page.locator(".found .hit").first
    expect(hit).to_contain_text("hotel near the harbor")
    page.keyboard.press("ArrowDown")
    expect(hit).to_be_focused()
    page.keyboard.press("Enter")
    settle(page)
    expect(grid(page, "Recorded").locator(".chosen")).to_contain_text("harbor")
    page.get_by_role("searchbox").fill("Oslo")
    expect(page.locator(".popover")).to_contain_text("In this conversation")
    page.locator(".popover .hit").first.click()
    expect(grid(page, "Recorded").locator(".chosen")).to_contain_text("Fly to Oslo")


def test_the_list_is_filtered_by_title_and_id(page, panel):
    page.goto(f"{panel.url}/panel")
    page.get_by_role("searchbox").fill("trip-07")
    expect(page.locator(".home > header .number")).to_have_text("1")
    expect(grid(page, "Conversations").get_by_role("row")).to_contain_text("trip-07")


# One conversation


@pytest.mark.parametrize(("width", "theme"), LOOKS)
def test_a_conversation_is_seen_in_the_order_of_its_data(browser, panel, width, theme):
    with watched(browser, panel, viewport=SIZES[width], color_scheme=theme) as page:
        opened(page, panel)
        expect(page.locator(".stats")).to_contain_text("tokens in 140 messages")
        expect(page.locator(".plot .band")).to_have_count(5)
        expect(page.locator(".plot .edit-mark")).not_to_have_count(0)
        expect(page.locator(".stats")).to_contain_text("saved")
        names = page.locator(".column h2").all_text_contents()
        assert names == ["Recorded", "Edits", "View"]
        if width == 390:
            for name in names:
                page.get_by_role("tab", name=name).click()
                expect(grid(page, name)).to_be_visible()
                expect(grid(page, name).locator(".row:not(.waiting)")).not_to_have_count(0)
                assert page.locator(".column:visible").count() == 1
        else:
            lefts = [grid(page, name).bounding_box()["x"] for name in names]
            assert lefts == sorted(lefts)
            expect(page.locator(".ribbons path")).to_have_count(2)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        shot(page, f"conversation-{width}-{theme}")


def test_money_and_the_window_are_told_as_the_service_counts_them(sized, panel):
    row = httpx.get(f"{panel.url}/api/conversations/selector").json()
    assert row["cost"]["saved_usd"] > 0.01
    opened(sized, panel)
    stats = sized.locator(".stats")
    expect(stats).to_contain_text(f"${row['cost']['saved_usd']:.2f} saved")
    expect(stats).to_contain_text(f"{row['tokens']['recorded']:,}")
    expect(stats).to_contain_text(f"{row['tokens']['shown']:,}")
    expect(stats).to_contain_text(f"of {row['overflow']['limit']:,}")
    full = stats.locator(".gauge i").bounding_box()["width"] / stats.locator(".gauge").bounding_box()["width"]
    assert full == pytest.approx(row["tokens"]["shown"] / row["overflow"]["limit"], abs=0.03)


def test_the_chart_stands_against_the_window_and_marks_edits(sized, panel):
    told = httpx.get(f"{panel.url}/api/conversations/selector/steps").json()
    opened(sized, panel)
    plot = sized.locator(".plot")
    lines = {
        name: float(plot.locator(f"line.{name}").get_attribute("y1")) for name in ("window", "threshold")
    }
    expect(plot.locator("text.window")).to_have_text(f"window {told['window']:,}")
    expect(plot.locator("text.threshold")).to_have_text(f"threshold {told['threshold']:,}")
    expect(plot.locator(".edit-mark")).to_have_count(sum(step["edits"] > 0 for step in told["steps"]))
    shape = plot.locator(".band.summary").get_attribute("d")  # the uppermost kind
    tops = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)H", shape)][: len(told["steps"])]
    ground = plot.bounding_box()["height"]
    per_token = (lines["threshold"] - lines["window"]) / (told["window"] - told["threshold"])
    for top, step in zip(tops, told["steps"], strict=True):
        assert ground - top == pytest.approx(per_token * sum(step["tokens"].values()), abs=1.0)
    step = told["steps"][-1]
    words = ", ".join(f"{kind} {tokens:,}" for kind, tokens in step["tokens"].items())
    expect(plot).to_have_attribute("aria-valuetext", re.compile(f"^Step {step['step']}, .*: {words}"))


def test_the_theme_is_that_of_the_system_until_it_is_turned(page, panel):
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    page.goto(f"{panel.url}/panel")
    light = page.evaluate(ground)
    page.get_by_role("button", name="Light or dark").click()
    dark = page.evaluate(ground)
    assert dark != light
    page.reload()
    assert page.evaluate(ground) == dark
    page.keyboard.press("t")
    assert page.evaluate(ground) == light


def test_choosing_an_edit_lights_up_what_it_covers_and_what_stands_for_it(page, panel):
    edit = edit_of(panel)
    opened(page, panel, at=edit["at"])
    expect(grid(page, "Edits").locator(".chosen")).to_contain_text(f"#{edit['at']}")
    start, end = edit["span"]
    expect(grid(page, "View").locator(".lit")).to_contain_text(f"#{start}–#{end - 1}")
    said = grid(page, "Recorded").locator(".lit .at").all_text_contents()
    assert said
    assert all(start <= int(one[1:]) < end for one in said)


def test_choosing_a_message_lights_up_its_edit_and_what_stands_for_it(page, panel):
    edit = edit_of(panel)
    opened(page, panel, at=edit["span"][0])
    expect(grid(page, "Edits").locator(".lit")).to_contain_text(f"#{edit['at']}")
    expect(grid(page, "View").locator(".lit")).to_have_count(1)
    expect(page.locator(".about")).to_contain_text(f"by #{edit['at']}")


def test_by_mouse_an_edit_is_expanded_undone_and_a_message_restored_and_pinned(sized, panel):
    page, edit = sized, edit_of(panel)
    opened(page, panel, at=edit["at"])
    button(page, "Expand").click()
    original = refold.open("selector", store=panel.store).expand(edit["at"])
    expect(page.locator(".drawer pre")).to_contain_text(original.splitlines()[0])
    shot(page, "expanded")
    button(page, "Close").click()
    button(page, "Undo").click()
    expect(page.locator(".toast")).to_contain_text(f"Undone: #{edit['at']}")
    expect(column(page, "Edits").locator(".chosen")).to_contain_text("taken back")
    with panel.open("selector") as chat:
        hidden = next(one for one in chat.get_all() if one.edit is not None)
        assert hidden.edit != edit["at"]
    opened(page, panel, at=hidden.at)
    button(page, "Restore").click()
    expect(page.locator(".toast")).to_contain_text("Restored")
    expect(page.locator(".about")).to_contain_text("shown whole")
    button(page, "Pin").click()
    expect(button(page, "Unpin")).to_be_enabled()
    expect(column(page, "Recorded").locator(".chosen")).to_contain_text("pinned")
    button(page, "Unpin").click()
    expect(button(page, "Pin")).to_be_enabled()


def test_by_keyboard_an_edit_is_expanded_undone_and_a_message_restored_and_pinned(sized, panel):
    page = sized
    opened(page, panel)
    page.keyboard.press("Escape")
    page.keyboard.press("l")  # to Edits
    expect(grid(page, "Edits")).to_be_focused()
    page.keyboard.press("End")
    page.keyboard.press("k")
    edit = edit_of(panel)
    expect(page.locator(".about")).to_contain_text(f"#{edit['at']}")
    page.keyboard.press("e")
    expect(page.locator(".drawer pre")).to_contain_text("tokens")
    page.keyboard.press("Escape")
    expect(page.locator(".drawer")).to_have_count(0)
    page.keyboard.press("u")
    expect(grid(page, "Edits").locator(".chosen")).to_contain_text("taken back")
    page.keyboard.press("h")
    expect(grid(page, "Recorded")).to_be_focused()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    with panel.open("selector") as chat:
        hidden = next(one for one in chat.get_all() if one.edit is not None)
    for _ in range(hidden.index - 1):
        page.keyboard.press("j")
    expect(page.locator(".about")).to_contain_text(f"#{hidden.at} ")
    expect(button(page, "Restore")).to_be_enabled()
    page.keyboard.press("r")
    expect(page.locator(".about")).to_contain_text("shown whole")
    page.keyboard.press("p")
    expect(button(page, "Unpin")).to_be_enabled()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("Replay one step earlier")
    shot(page, "keys")


def test_what_is_refused_is_told(page, panel):
    opened(page, panel, at=edit_of(panel)["at"])
    refusal = {"error": {"code": "conflict", "message": "#9 is in the way"}}
    page.route("**/undo*", lambda route: route.fulfill(status=409, json=refusal))
    button(page, "Undo").click()
    expect(page.locator(".toast")).to_contain_text("#9 is in the way")
    page.forgiven = "409"


@pytest.mark.parametrize("width", SIZES)
def test_any_moment_is_replayed_with_a_diff_to_now_by_mouse(browser, panel, width):
    with watched(browser, panel, viewport=SIZES[width]) as page:
        opened(page, panel)
        plot = page.get_by_role("slider", name="Tokens per step")
        box = plot.bounding_box()
        plot.hover(position={"x": box["width"] / 2, "y": 40})
        pointed = page.locator(".readout strong").inner_text()
        plot.click(position={"x": box["width"] / 2, "y": 40})
        moment = page.locator(".moment")
        expect(moment).to_contain_text("As of #")
        at = int(re.search(r"#(\d+)", moment.inner_text())[1])
        assert page.locator(".replay").input_value() == str(at)
        page.mouse.move(1, 1)
        expect(page.locator(".readout strong")).to_have_text(pointed)
        with panel.open("selector") as chat:
            then = chat.view(at=at)
        expect(moment).to_contain_text(f"{then.tokens:,} tokens; since then")
        expect(grid(page, "View").locator(".row:not(.waiting)")).not_to_have_count(0)
        shot(page, f"replay-{width}")
        button(page, "Diff to now").click()
        expect(grid(page, "View").locator(".removed").first).to_contain_text("only then")
        shot(page, f"diff-{width}")
        button(page, "Now").click()
        expect(moment).to_be_hidden()
        expect(grid(page, "View").locator(".removed")).to_have_count(0)


def test_any_moment_is_replayed_with_a_diff_to_now_by_keyboard(sized, panel):
    page = sized
    opened(page, panel)
    expect(page.locator(".plot .band").first).to_have_attribute("d", re.compile("M"))
    page.keyboard.press("[")
    page.keyboard.press("[")
    expect(page.locator(".moment")).to_contain_text("As of #")
    before = int(page.locator(".replay").input_value())
    page.keyboard.press("d")
    expect(grid(page, "View").locator(".added").first).to_contain_text("only now")
    page.get_by_role("slider", name="Replay").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".moment")).to_contain_text(f"As of #{before - 1}")
    plot = page.get_by_role("slider", name="Tokens per step")
    plot.focus()
    page.keyboard.press("Home")
    expect(plot).to_have_attribute("aria-valuetext", re.compile("^Step 1, "))
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(plot).to_have_attribute("aria-valuetext", re.compile("^Step 2, "))
    assert int(page.locator(".replay").input_value()) < before
    page.keyboard.press("n")
    expect(page.locator(".moment")).to_be_hidden()


# Live


def test_what_is_said_elsewhere_appears_by_itself(page, panel):
    opened(page, panel, "trip-03")
    expect(page.locator(".connection")).to_have_attribute("data-state", "live")
    with panel.open("trip-03") as chat:
        chat.append({"role": "user", "content": "Is breakfast included?"})
    expect(grid(page, "Recorded")).to_contain_text("Is breakfast included?")
    expect(grid(page, "View")).to_contain_text("Is breakfast included?")
    with panel.open("trip-03") as chat:
        chat.name(title="Oslo with breakfast")
    expect(page.get_by_role("heading", level=1)).to_have_text("Oslo with breakfast")
    page.goto(f"{panel.url}/panel")
    expect(page.locator(".connection")).to_have_attribute("data-state", "live")
    with panel.open("trip-new") as chat:
        chat.append({"role": "user", "content": "A new one begins."})
    expect(grid(page, "Conversations")).to_contain_text("A new one begins.")


# proves: C12
def test_summarizing_is_seen_while_it_happens(browser, page, panel):
    compacted = list[int]()
    opened(page, panel)
    expect(page.locator(".connection")).to_have_attribute("data-state", "live")
    with watched(browser, panel) as other:
        other.goto(f"{panel.url}/panel")
        expect(other.locator(".connection")).to_have_attribute("data-state", "live")
        order = {"strategy": "summarize", "keep_recent": 2}
        Thread(target=lambda: compacted.append(panel.post("selector/compact", order).status_code)).start()
        until(lambda: panel.asked.is_set() or page.wait_for_timeout(20))
        expect(page.locator(".head .busy")).to_have_text("summarizing…")
        expect(other.locator(".row .busy")).to_have_text("summarizing…")
        shot(page, "summarizing")
        panel.answered.set()
        until(lambda: compacted or page.wait_for_timeout(20))
        assert compacted == [200]
        expect(page.locator(".head .busy")).to_have_count(0)
        expect(other.locator(".row .busy")).to_have_count(0)
        expect(grid(page, "Edits")).to_contain_text("summarize")


def test_after_a_loss_it_goes_on_from_where_it_was(browser, full):
    with ExitStack() as stack:
        panel = stack.enter_context(served(full))
        with watched(browser, panel) as page:
            opened(page, panel, "trip-01")
            dot, asked = page.locator(".connection"), list[str | None]()
            expect(dot).to_have_attribute("data-state", "live")
            page.on(
                "request",
                lambda one: one.url.endswith("/events") and asked.append(one.headers["last-event-id"]),
            )
            stack.close()  # the service ends
            expect(dot).to_have_attribute("data-state", "lost")
            with panel.open("trip-01") as chat:
                chat.append({"role": "user", "content": "Said while nobody listened."})
            with served(full, port=int(panel.url.rpartition(":")[2])):
                expect(dot).to_have_attribute("data-state", "live")
                expect(grid(page, "Recorded")).to_contain_text("Said while nobody listened.")
                assert set(asked) - {None} == {"4"}  # what has none is no stream
                page.forgiven = "ERR_"


# A token


def test_what_ended_while_nobody_listened_is_not_shown_as_under_way(browser, full):
    with ExitStack() as stack:
        panel, compacted = stack.enter_context(served(full)), list[int]()
        with watched(browser, panel) as page:
            page.goto(f"{panel.url}/panel")
            dot, busy = page.locator(".connection"), page.locator(".row .busy")
            expect(dot).to_have_attribute("data-state", "live")
            order = {"strategy": "summarize", "keep_recent": 2}
            Thread(target=lambda: compacted.append(panel.post("selector/compact", order).status_code)).start()
            expect(busy).to_have_text("summarizing…")
            panel.service.events.close()  # from now on nobody is told anything
            panel.answered.set()
            until(lambda: compacted or page.wait_for_timeout(20))
            stack.close()
            expect(dot).to_have_attribute("data-state", "lost")
            with served(full, port=int(panel.url.rpartition(":")[2])):
                expect(dot).to_have_attribute("data-state", "live")
                expect(busy).to_have_count(0)
                page.forgiven = "ERR_"


def test_a_token_that_does_not_let_one_read_is_asked_for_again(browser, full):
    tokens = [
        {"hash": hash_of(scope * 10), "owner": "default", "scopes": [scope]} for scope in ("append", "read")
    ]
    with served(full, tokens=tokens) as panel, watched(browser, panel) as page:
        page.goto(panel.link("trip-02"))
        for scope in ("append", "read"):
            page.get_by_label("Token", exact=True).fill(scope * 10)
            button(page, "Sign in").click()
            if scope == "append":
                expect(page.get_by_role("alert")).to_have_text("That token was not accepted.")
        expect(grid(page, "Recorded")).to_contain_text("Fly to Oslo")
        page.forgiven = "status of 40"


def test_where_a_token_is_needed_it_is_asked_for_and_kept_in_the_tab_only(browser, full):
    token = "a-token-of-more-than-enough-letters-0123456789"
    with served(full, token=token) as panel, watched(browser, panel) as page:
        page.goto(panel.link("trip-02"))
        field = page.get_by_label("Token", exact=True)
        field.fill("not this one")
        button(page, "Sign in").click()
        expect(page.get_by_role("alert")).to_have_text("That token was not accepted.")
        shot(page, "sign-in")
        field.fill(token)
        page.keyboard.press("Enter")
        expect(grid(page, "Recorded")).to_contain_text("Fly to Oslo")
        expect(page.locator(".connection")).to_have_attribute("data-state", "live")
        assert (
            page.evaluate("[document.cookie, JSON.stringify(localStorage), location.href].join()").find(token)
            < 0
        )
        assert page.evaluate("Object.values(sessionStorage)") == [token]
        page.forgiven = "401"


# Much


def test_a_thousand_conversations_are_few_elements(browser, store):
    with refold.open("c0000", store=store) as chat:
        chat.append({"role": "user", "content": "Number 0"})
        for n in range(1, 1_000):
            with refold.open(f"c{n:04}", store=chat.store) as other:
                other.append({"role": "user", "content": f"Number {n}"})
    with served(store) as panel, watched(browser, panel) as page:
        page.goto(f"{panel.url}/panel")
        rows = grid(page, "Conversations")
        expect(rows).to_contain_text("Number 999")
        most = 0
        while rows.get_by_text("c0000", exact=True).count() == 0:
            rows.evaluate("one => { one.scrollTop += 3000 }")
            page.wait_for_timeout(30)
            most = max(most, rows.get_by_role("row").count())
        assert most < ROWS
        expect(page.locator(".home > header .number")).to_have_text("1,000")


def test_a_hundred_thousand_messages_are_few_elements(browser, store):
    with refold.open("long", store=store, model="m", config=SETTINGS) as chat:
        for first in range(0, 100_000, 10_000):
            some = range(first, first + 10_000)
            chat.append([{"role": ("user", "assistant")[n % 2], "content": f"Message {n}."} for n in some])
        chat.compact("sliding-window", keep_recent=50)
    with served(store) as panel, watched(browser, panel) as page:
        opened(page, panel, "long")
        said = grid(page, "Recorded")
        expect(said).to_have_attribute("aria-rowcount", "100000")
        for share in (0.25, 0.5, 0.75, 1):
            said.evaluate("(one, share) => { one.scrollTop = share * one.scrollHeight }", share)
            expect(said.locator(".row:not(.waiting)").first).to_be_visible()
            assert page.get_by_role("row").count() < 3 * ROWS
        expect(said).to_contain_text("Message 99999.")
        page.goto(panel.link("long", 77_777))
        expect(said.locator(".chosen")).to_contain_text("Message 77777.")
        assert page.get_by_role("row").count() < 3 * ROWS
        shot(page, "long")


# Harm


def test_forty_hostile_texts_fire_nothing(browser, store):
    assert len(set(HOSTILE)) == 40
    ids = nasty(store)
    with served(store) as panel, watched(browser, panel) as page:
        page.goto(f"{panel.url}/panel")
        rows = grid(page, "Conversations")
        expect(rows).to_contain_text("CDATA")
        rows.evaluate("one => { one.scrollTop = one.scrollHeight }")
        expect(rows).to_contain_text("<script>fire(1)</script>")
        page.get_by_role("searchbox").fill("fire")
        expect(page.locator(".found .hit").first).to_be_visible()
        for n, id in enumerate(ids):
            page.goto(panel.link(id))
            settle(page)
            expect(grid(page, "Recorded").locator(".row:not(.waiting)")).to_have_count(4)
            for name in ("Edits", "View", "Recorded"):
                grid(page, name).locator(".row").last.click()
            button(page, "Expand").click()
            expect(page.locator(".drawer pre .bone")).to_have_count(0)
            page.keyboard.press("Escape")
            page.get_by_role("heading", level=1).hover()
            assert page.evaluate("[...__fired, ...__violations]") == [], HOSTILE[n][:80]
            assert page.wrong == [], HOSTILE[n][:80]
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), HOSTILE[n][:80]
        assert page.locator("script:not([src]), style, iframe, object, base, form, main img").count() == 0
