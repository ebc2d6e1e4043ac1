"""The service on loopback with conversations to look at, a browser, and texts that mean harm."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import httpx
import pytest

import refold
from refold.config.config import load_config
from refold.core.message import Message, Text, ToolCall
from refold.serve.app import app_of
from refold.serve.run import GracefulServer, listening, url_of
from refold.serve.service import Service
from refold.session.session import Session
from refold.stores.store import open_store
from served import WAIT_S, until

TRACES = Path(__file__).parents[2] / "shared" / "data" / "traces"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SETTINGS = {
    "models": {"m": {"window": 12_000, "max_output": 1_000, "input": 1.25}},
    "agents": {
        "default": {
            "compact": {"keep_recent": 8},
            "tools": {"read": {"expire": {"after_steps": 6, "mode": "compact", "length": 300}}},
        }
    },
}
SHOTS = os.environ.get("PANEL_SHOTS")
"""A folder for pictures, where somebody wants to look at them."""


class Panel(NamedTuple):
    url: str
    service: Service
    store: str
    asked: Event
    """Somebody wants a summary."""
    answered: Event
    """Until this is set there is none."""

    def open(self, conversation: str) -> Session:
        """As another process would: by the store alone."""
        return refold.open(conversation, store=self.store, model="m", config=SETTINGS)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{self.url}/api/conversations/{path}", json=body, timeout=WAIT_S)

    def link(self, conversation: str, at: int | None = None) -> str:
        return f"{self.url}/panel#/c/{quote(conversation, safe='')}{'' if at is None else f'/{at}'}"


@contextmanager
def served(store: str, port: int = 0, **settings: Any) -> Iterator[Panel]:
    asked, answered = Event(), Event()

    def summarize(ask: Any) -> str:
        asked.set()
        assert answered.wait(WAIT_S)
        return "They looked at the files and agreed on what to change."

    config = load_config({**SETTINGS, "serve": {"port": port, **settings}})
    with listening(config) as listener:
        service = Service(config, open_store(store), summarizer=summarize)
        server = GracefulServer(app_of(service), config.serve.limits, service)
        thread = Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            until(lambda: server.started)
            yield Panel(url_of(listener), service, store, asked, answered)
        finally:
            answered.set()
            server.should_exit = True
            thread.join(WAIT_S)
            service.close()


def browser_path() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("notice: there is no chromium here, so the panel is not looked at")
    return found


def recorded() -> list[dict[str, Any]]:
    """Messages of a real run of a coding agent, or made up where the recordings are absent."""
    file = TRACES / "pi_coding_agent.jsonl"
    if not file.exists():
        from refold.cli.bench.generate import conversation

        return list(conversation(140))
    with file.open() as lines:
        messages = json.loads(next(lines))["messages"]
    return [{name: it for name, it in one.items() if not name.startswith("x_")} for one in messages[2:142]]


def work(chat: Session, messages: list[dict[str, Any]]) -> None:
    """As an agent does: a view before each answer. What must be made shorter on the way is."""
    for message in messages:
        if message["role"] == "assistant":
            chat.fit()
        chat.append(message)


def fill(store: str) -> None:
    """Conversations with edits of several kinds."""
    with refold.open("selector", store=store, model="m", config=SETTINGS) as chat:
        chat.name(title="Port the message selector to the new theme", model="m")
        work(chat, recorded())
        chat.compact(keep_recent=16)
        chat.correct(chat.get_all()[-1].at, "Corrected by hand")
        chat.fork("selector-again").name(title="Another way to port it")
    said = ["Fly to Oslo on Friday.", "HAT078 costs 120.", "A hotel near the harbor?", "The Grand has rooms."]
    trip = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)]
    for n in range(12):
        with refold.open(f"trip-{n:02}", store=store, model="m", config=SETTINGS) as chat:
            chat.append(trip)


def violated(page: Any) -> list[str]:
    return page.evaluate("[...window.__fired, ...window.__violations]")


TRAP = """
window.__fired = []; window.__violations = []; window.fire = (what) => window.__fired.push(String(what));
addEventListener("securitypolicyviolation", (event) => window.__violations.push(event.violatedDirective));
"""


@contextmanager
def watched(browser: Any, panel: Panel, **how: Any) -> Iterator[Any]:
    """A page on which nothing may go wrong: no error, no dialog, no request to anybody else."""
    context = browser.new_context(**{"viewport": {"width": 1440, "height": 900}, **how})
    context.add_init_script(TRAP)
    page, wrong = context.new_page(), list[str]()
    page.set_default_timeout(WAIT_S * 1_000)
    page.on("console", lambda one: one.type in ("error", "warning") and wrong.append(one.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: (wrong.append(f"dialog {dialog.message}"), dialog.dismiss()))
    page.on("popup", lambda other: wrong.append(f"popup {other.url}"))
    home = urlsplit(panel.url).netloc
    context.on("request", lambda one: urlsplit(one.url).netloc != home and wrong.append(one.url))
    page.wrong, page.forgiven = wrong, None
    try:
        yield page
        assert violated(page) == []
        left = [one for one in wrong if page.forgiven is None or page.forgiven not in one]
        assert left == [], left
    finally:
        context.close()


HOSTILE = (
    "<script>fire(1)</script>",
    "</script><script>fire(2)</script>",
    "<img src=x onerror=fire(3)>",
    '"><img src=x onerror="fire(4)">',
    "'><svg/onload=fire(5)>",
    "<svg><script>fire(6)</script></svg>",
    "<svg><animate onbegin=fire(7) attributeName=x dur=1s>",
    "<body onload=fire(8)>",
    "<iframe srcdoc='<script>parent.fire(9)</script>'></iframe>",
    "<iframe src=javascript:parent.fire(10)></iframe>",
    "<a href=javascript:fire(11)>click</a>",
    "javascript:fire(12)",
    "JaVaScRiPt:fire(13)//",
    "java\tscript:fire(14)",
    "data:text/html,<script>fire(15)</script>",
    "<math><mtext></mtext><mglyph><style></math><img src=x onerror=fire(16)>",
    "<details open ontoggle=fire(17)>",
    "<input autofocus onfocus=fire(18)>",
    "<video><source onerror=fire(19)></video>",
    "<style>@import '//evil.example/x.css';*{display:none}</style>",
    "</style><style>body{display:none}</style>",
    "x;}body{background:url(//evil.example/track)}",
    "<link rel=stylesheet href=//evil.example/x.css>",
    "<meta http-equiv=refresh content='0;url=//evil.example'>",
    "<base href=//evil.example/>",
    "<form action=//evil.example><button>go</button></form>",
    "<object data=//evil.example/x.swf></object>",
    "{{constructor.constructor('fire(28)')()}}",
    "${fire(29)}`${fire(29)}`",
    "<%= fire(30) %>#{fire(30)}",
    "__proto__",
    "constructor",
    "' onmouseover='fire(33)' style='position:fixed;inset:0",
    "--></textarea></title><script>fire(34)</script><!--",
    "\u202egnp.exe\u202c \u2066hidden\u2069 \u200bzero",
    "a\x00b\x1b[31m\x07\x7f",
    "W" * 20_000,
    "Z\u0301\u0302\u0303" * 400,
    "../../../../etc/passwd?x=%2e%2e%2f#/c/other",
    "]]><![CDATA[<script>fire(40)</script>]]>\ud83d\ude00 \uffff \u2028\u2029",
)
"""Each would do something if it were ever taken for more than text."""


def nasty(store: str) -> list[str]:
    """A conversation for each, which has it in its id as far as ids may, and everywhere else."""
    ids = []
    for n, text in enumerate(HOSTILE):
        id = "".join(one for one in f"{n:02} {text}"[:180] if one.isprintable())
        with refold.open(id, store=store, model="m", config=SETTINGS) as chat:
            chat.append({"role": "system", "content": text})
            chat.append({"role": "user", "content": f"{text} and {text[:40]}"})
            called = Message("assistant", (Text(text), ToolCall(text, text, json.dumps({text: text}))))
            chat.append(called)
            chat.append({"role": "tool", "tool_call_id": text, "content": text})
            chat.correct(chat.get_all()[1].at, f"corrected {text}", why=text)
            chat.name(title=text)
        ids.append(id)
    return ids
