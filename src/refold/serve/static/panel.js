// The panel: which page is shown, what all pages share, and the keys.

import { Conversation } from "./conversation.js";
import { h, s } from "./dom.js";
import { Home } from "./home.js";
import { walk } from "./search.js";

const KEYS = [
  ["/", "Search"], ["j k ↓ ↑", "Next and previous row"], ["Enter", "Open; in a search, the first that was found"],
  ["h l ← →", "Column to the left and to the right: Recorded, Edits, View"], ["e", "Expand: read the original"],
  ["r", "Restore: show the original in its place again"], ["u", "Undo an edit; the newest when nothing is chosen"],
  ["p", "Pin or unpin a message"], ["[ ]", "Replay one step earlier, later"], ["n", "Back to now"],
  ["d", "Diff to now, while replaying"], ["t", "Light or dark"], ["Esc", "Close; choose nothing"], ["?", "These keys"],
];

const STATES = {
  new: "Connecting", live: "Live", lost: "Connection lost; trying again", gone: "There is nothing more to follow",
};

const connection = h("span", { class: "connection", role: "img" });
const search = h("input", { type: "search", "aria-label": "Search", autocomplete: "off", spellcheck: "false" });
const popover = h("div", { class: "popover", hidden: true });
const toast = h("div", { class: "toast", role: "status", "aria-live": "polite" });
const folded = s("path", { d: "M4 3h11l5 5-8 4 8 4-5 5H4l5-9z" });
const logo = s("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, folded);
const keys = (names) => h("dt", {}, names.split(" ").map((one) => h("kbd", {}, one)));
const help = h("dialog", { class: "help", "aria-label": "Keys", click: (event) => event.target === help && help.close() },
  h("header", {}, h("h2", {}, "Keys"), h("button", { class: "quiet", click: () => help.close() }, "Close")),
  h("dl", {}, KEYS.map(([names, what]) => [keys(names), h("dd", {}, what)])),
  h("p", {}, h("b", {}, "Recorded"), " is what happened. ", h("b", {}, "Edits"), " are what was decided. The ",
    h("b", {}, "View"), " is what the model sees. Nothing that was recorded is ever changed or lost."));
let page = null, hiding;

function connected(state) {
  connection.dataset.state = state;
  connection.title = STATES[state];
  connection.setAttribute("aria-label", STATES[state]);
}

function say(text) {
  toast.textContent = text;
  toast.classList.add("seen");
  clearTimeout(hiding);
  hiding = setTimeout(() => toast.classList.remove("seen"), 5_000);
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  try { localStorage.setItem("refold-theme", name); } catch { /* then it lasts as long as this page */ }
}
const usual = () => (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
const turn = () => theme((document.documentElement.dataset.theme ?? usual()) === "dark" ? "light" : "dark");

function show() {
  const [way, query] = location.hash.slice(1).split("?"), [, kind, id, at] = way.split("/");
  let name = null;
  try { name = kind === "c" && id ? decodeURIComponent(id) : null; } catch { /* not a link of ours */ }
  const owner = new URLSearchParams(query).get("owner"), place = /^\d+$/.test(at ?? "") ? Number(at) : null;
  if (page?.id === name && page?.owner === owner && name !== null) return page.go(place);
  page?.end();
  search.value = "";
  popover.hidden = true;
  connected("new");
  const shared = { search, popover, connected, say };
  page = name === null ? new Home(shared) : new Conversation(name, owner, place, shared);
  document.title = page.title;
  document.querySelector("main").replaceWith(page.el);
  scrollTo(0, 0);
}

document.addEventListener("keydown", (event) => {
  const isFinding = event.target === search || event.target.matches(".hit");
  if (isFinding && event.key === "Escape") {
    search.value = "";
    search.oninput?.();
    event.target.blur();
    popover.hidden = true;
    return;
  }
  if (isFinding) walk(event, search);
  if (event.target.matches("input:not([type=range]), textarea") || document.querySelector("dialog[open]")) return;
  if ((event.ctrlKey || event.metaKey) && event.key === "k") { event.preventDefault(); search.focus(); return; }
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") { event.preventDefault(); search.focus(); search.select(); }
  else if (event.key === "?") help.showModal();
  else if (event.key === "t") turn();
  else page?.key(event);
});
document.addEventListener("pointerdown", (event) => { if (!event.target.closest(".find")) popover.hidden = true; });

try { const kept = localStorage.getItem("refold-theme"); if (kept) theme(kept); } catch { /* none is kept */ }
document.body.replaceChildren(
  h("nav", { class: "top", "aria-label": "Panel" },
    h("a", { href: "#/", class: "brand", "aria-label": "refold: all conversations" }, logo, h("span", {}, "refold")),
    h("div", { class: "find" }, search, h("kbd", { "aria-hidden": "true" }, "/"), popover),
    connection,
    h("button", { class: "quiet icon", "aria-label": "Light or dark", title: "Light or dark (t)", click: turn }, "◐"),
    h("button", { class: "quiet icon", "aria-label": "Keys", title: "Keys (?)", click: () => help.showModal() }, "?")),
  h("main", {}), toast, help);
addEventListener("hashchange", show);
show();
