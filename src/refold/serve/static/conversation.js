// One conversation in the order of its data: Recorded | Edits | View.

import { follow, get, path, post } from "./api.js";
import { Chart } from "./chart.js";
import { calmly, count, h, later, many, plain } from "./dom.js";
import * as cells from "./cells.js";
import { drawer } from "./drawer.js";
import { head, stats } from "./head.js";
import { Ribbons } from "./ribbons.js";
import { Listed, Pages, Rows } from "./rows.js";
import { hits, link } from "./search.js";

const COLUMNS = { recorded: "what happened", edits: "what was decided", view: "what the model sees" };
const NAMES = { recorded: "Recorded", edits: "Edits", view: "View" };
const ROW = 72, EDIT = 92; // pixels
const COMPARED = 2_000; // items of a view that are compared with now on their own
const DONE = { undo: "Undone:", restore: "Restored", pin: "Pinned", unpin: "Unpinned" };

const meet = (a, b) => Boolean(a && b) && a[0] < b[1] && b[0] < a[1];
const when = (is, name) => (is ? name : "");

export class Conversation {
  /** `shared` is what all pages have: the search field, its popover, the dot, and a way to say something. */
  constructor(id, owner, place, shared) {
    Object.assign(this, { id, owner, place, ...shared, title: `${plain(id)} · refold` });
    this.row = this.choice = this.replay = this.searching = null;
    this.isOver = this.isBusy = this.isComparing = false;
    this.onlyGrown = true;
    this.recorded = this.paged("messages", "messages", "total", (one) => one.at);
    this.edits = this.paged("edits", "edits", "total", (one) => one.at);
    this.view = this.viewed();
    this.columns = this.rows();
    this.ribbons = new Ribbons(this.columns, () => this.choice);
    const replayed = later(120, (at) => this.replayAt(at));
    this.chart = new Chart({ picked: (step) => this.replayAt(step.at - 1), replayed });
    this.readSteps = calmly(1_500, () => this.steps().catch((error) => this.say(error.message)));
    this.refreshSoon = calmly(350, () => this.renew());
    this.refreshLater = later(2_000, () => this.isOver || this.refreshSoon());
    this.build();
    this.find();
    this.open();
  }

  // What is read

  ask(verb, params = {}) { return get(path(this.id, verb), { ...params, owner: this.owner }); }

  paged(verb, name, total, place, at = null) {
    const pages = new Pages(async (start, limit) => {
      const answer = await this.ask(verb, { start, limit, at });
      pages.tokens = answer.tokens?.shown;
      return { rows: answer[name], total: answer[total] };
    }, place);
    pages.failed = (error) => { if (!this.isOver && pages.known) this.say(error.message); };
    return pages;
  }

  viewed() { return this.paged("view", "items", "total_items", (one) => one.span[0], this.replay); }

  async open() {
    this.el.setAttribute("aria-busy", "true");
    this.state.hidden = true;
    try {
      const pages = [this.recorded, this.edits, this.view].map((one) => one.page(0));
      const first = await Promise.all(pages).catch((error) => this.byTitle(error));
      if (this.isOver || !first) return;
      await (this.place !== null ? this.chooseAt(this.place) : this.chooseNewest());
      this.row = await this.ask(""); // last, since of a long conversation it takes a while
      if (this.isOver) return;
      this.top();
      this.follow();
      this.readSteps();
      this.el.setAttribute("aria-busy", "false");
    } catch (error) {
      if (!this.isOver) this.fail(error);
    }
  }

  /** A link may name a conversation by its title. */
  async byTitle(error) {
    if (error.status !== 404) throw error;
    const { conversations } = await get("/api/conversations", { q: this.id, limit: 10 });
    const found = conversations.find((one) => one.id === this.id && one.owner !== this.owner)
      ?? conversations.find((one) => one.title === this.id);
    if (!found) throw error;
    location.replace(link(found.id, found));
    return null;
  }

  fail(error) {
    const again = () => {
      for (const pages of [this.recorded, this.edits, this.view]) pages.stale();
      this.open();
    };
    const what = error.status === 404 ? "There is no such conversation" : "This conversation could not be read";
    this.state.hidden = false;
    this.state.replaceChildren(h("h2", {}, what), h("p", {}, plain(error.message)),
      h("button", { class: "primary", click: again }, "Retry"), " ", h("a", { href: "#/" }, "All conversations"));
  }

  async steps() {
    const { steps, window, threshold } = await this.ask("steps");
    if (!this.isOver) this.chart.set({ steps, window, threshold, events: this.row.events, at: this.replay });
  }

  // Live

  follow() {
    this.stop = follow(path(this.id, "events"), { owner: this.owner }, this.row.events, {
      onEvent: (event, data) => this.onEvent(event, data),
      onState: (now, before) => {
        this.connected(now);
        if (now === "gone") this.say("This conversation was erased");
        if (now === "lost") this.isBusy = false;
        if (now === "live" && before === "lost") this.refreshSoon();
      },
    });
  }

  onEvent(event, data) {
    if (event === "message-expanded") return;
    if (event === "compaction:start") this.isBusy = true;
    if (event === "compaction:complete" || event === "compaction:failed") this.isBusy = false;
    if (event === "compaction:failed") this.say(`No summary: ${plain(data.reason)}`);
    if (event.startsWith("compaction:")) this.top();
    this.onlyGrown &&= event === "message-added" || event === "compaction:start";
    this.refreshSoon();
  }

  async renew() {
    const grown = this.onlyGrown;
    this.onlyGrown = true;
    await this.refresh(grown).catch((error) => this.say(error.message));
  }

  /** All of it as it is now; with `grown`, only what came at the end. */
  async refresh(grown) {
    const row = await this.ask("");
    if (this.isOver) return;
    this.row = row;
    this.recorded.stale(grown);
    this.edits.stale(grown);
    if (this.replay === null) this.view.stale(grown);
    this.top();
    this.draw();
    this.readSteps();
    if (this.choice && !grown) await this.chosenAgain();
  }

  // Choosing

  /** A message or an edit: its span is lit in all columns, and brought into sight in those it was not chosen in. */
  async choose({ message = null, edit = null, item = null, from = null }) {
    const choice = { message, edit, item, span: edit?.span ?? [message.at, message.at + 1] };
    this.choice = choice;
    this.draw();
    try {
      if (message && message.edit !== null) {
        const hiding = await this.found(this.edits, message.edit);
        if (hiding?.at === message.edit) Object.assign(choice, { edit: hiding, span: hiding.span });
      }
      if (this.choice === choice) await this.reveal(choice, from);
    } catch (error) {
      this.say(error.message);
    }
    this.draw();
  }

  async reveal(choice, from) {
    const { message, edit, span } = choice, place = message?.at ?? span[0];
    const places = await Promise.all([
      from !== "recorded" ? this.recorded.locate(place) : null,
      from !== "edits" && edit ? this.edits.locate(edit.at) : null,
      from !== "view" && !this.isComparing ? this.view.locate(place) : null,
    ]);
    if (this.choice !== choice) return;
    Object.keys(COLUMNS).forEach((name, n) => {
      if (places[n] === null) return;
      this.columns[name].cursor = places[n];
      this.columns[name].reveal(places[n]);
    });
    if (places[2] !== null) choice.item = this.view.get(places[2])?.span[0] ?? null;
  }

  async found(pages, at) {
    const i = await pages.locate(at);
    return i === null ? null : pages.get(i);
  }

  async chooseItem(one) {
    if (one.sign) return;
    const how = { from: "view", item: one.span[0] };
    try {
      if (one.edit === null) await this.choose({ message: await this.found(this.recorded, one.span[0]), ...how });
      else await this.choose({ edit: await this.found(this.edits, one.edit.at), ...how });
    } catch (error) {
      this.say(error.message);
    }
  }

  async chooseAt(at) {
    const [message, edit] = await Promise.all([this.found(this.recorded, at), this.found(this.edits, at)]);
    if (message?.at === at) { this.show("recorded"); await this.choose({ message }); }
    else if (edit?.at === at) { this.show("edits"); await this.choose({ edit }); }
  }

  /** At first the newest edit that folds messages together is chosen: it shows what the three columns are. */
  async chooseNewest() {
    const { edits, recorded, view, columns } = this;
    const newest = edits.total ? await edits.page(Math.floor((edits.total - 1) / edits.size)) : [];
    const inForce = newest.filter((one) => one.state === "in force");
    const edit = inForce.findLast(({ span: [start, end] }) => end - start > 1) ?? inForce.at(-1);
    if (edit) return this.choose({ edit });
    columns.recorded.el.scrollTop = recorded.total * ROW;
    columns.view.el.scrollTop = view.total * ROW;
  }

  /** What is chosen, as it is now. */
  async chosenAgain() {
    const { choice } = this, { message, edit } = choice;
    const [now, current] = await Promise.all([
      message && this.found(this.recorded, message.at), edit && this.found(this.edits, edit.at)]);
    if (this.choice !== choice) return;
    Object.assign(choice, { message: now ?? message, edit: current ?? edit });
    const isFree = now && now.edit === null && current?.state !== "in force";
    if (isFree) Object.assign(choice, { edit: null, span: [now.at, now.at + 1] });
    this.draw();
  }

  chooseNothing() {
    this.choice = null;
    for (const rows of Object.values(this.columns)) rows.cursor = -1;
    this.draw();
  }

  // What can be done

  async act(verb, at) {
    try {
      const answer = await post(path(this.id, verb), at === undefined ? {} : { at }, { owner: this.owner });
      const covered = answer.covered_by ?? null;
      const more = covered === null ? "" : `; it is shown again when #${covered} is undone, too`;
      this.say(`${DONE[verb]} #${answer.of ?? at}${more}`);
      await this.refresh(false);
    } catch (error) {
      this.say(error.message);
    }
  }

  expand() {
    const at = this.choice.message?.at ?? this.choice.edit.at, name = this.about.querySelector("b").textContent;
    const load = async () => (await post(path(this.id, "expand"), { at, reason: "panel" }, { owner: this.owner })).text;
    drawer(name, load, this.say);
  }

  // Replay

  async replayAt(at) {
    this.replay = !this.row || at === null || at >= this.row.events - 1 ? null : Math.max(0, at);
    this.isComparing &&= this.replay !== null;
    this.chart.set({ at: this.replay });
    this.view = this.viewed();
    await this.showMoment();
  }

  async showMoment() {
    const { replay: at, view, columns } = this;
    this.moment.hidden = at === null;
    columns.view.el.closest("section").classList.toggle("then", at !== null);
    columns.view.cursor = -1;
    if (this.choice) this.choice.item = null;
    if (at === null || !this.isComparing) columns.view.use(view);
    this.headings();
    if (at === null) return;
    const size = h("span", {}, "…");
    const quiet = (name, more) => h("button", { class: "quiet", ...more }, name), pressed = String(this.isComparing);
    this.moment.replaceChildren(h("b", {}, `As of #${at}`), size,
      quiet("Diff to now", { "aria-pressed": pressed, title: "Diff to now (d)", click: () => this.compare() }),
      quiet("Now", { title: "Back to now (n)", click: () => this.replayAt(null) }));
    try {
      await view.page(0);
      if (this.view !== view) return;
      this.headings(view.tokens);
      size.replaceChildren(many(view.tokens, "token"));
      if (this.isComparing || view.total <= COMPARED) await this.showChanges(at, size);
    } catch (error) {
      this.say(error.message);
    }
  }

  async showChanges(at, size) {
    const { changes } = await this.ask("diff", { at }), { view } = this.columns;
    if (this.replay !== at) return;
    const many = (sign) => count(changes.filter((one) => one.sign === sign).length);
    const minus = h("span", { class: "minus" }, `−${many("-")}`), plus = h("span", { class: "plus" }, `+${many("+")}`);
    size.append("; since then ", minus, " ", plus);
    if (!this.isComparing) return;
    view.use(new Listed(changes));
    view.el.scrollTop = ROW * (changes.findIndex((one) => one.sign !== " ") - 1);
  }

  compare() {
    if (this.replay === null) return;
    this.isComparing = !this.isComparing;
    this.showMoment();
  }

  step(way) {
    const here = this.replay ?? this.row.events - 1, all = this.chart.steps;
    const to = way < 0 ? all.findLast((one) => one.at - 1 < here) : all.find((one) => one.at - 1 > here);
    this.replayAt(to ? to.at - 1 : way < 0 ? 0 : null);
  }

  // The page

  rows() {
    const moved = () => this.ribbons.draw(), lit = (span) => when(meet(span, this.choice?.span), "lit");
    const chosen = (is) => when(is, "chosen");
    return {
      recorded: new Rows({
        label: NAMES.recorded, height: ROW, source: this.recorded, draw: cells.message, moved,
        mark: ({ message, shown, at }) =>
          `${message.role} ${shown} ${lit([at, at + 1])} ${chosen(this.choice?.message?.at === at)}`,
        chosen: (message) => this.choose({ message, from: "recorded" }),
      }),
      edits: new Rows({
        label: NAMES.edits, height: EDIT, source: this.edits, draw: cells.edit, moved,
        mark: ({ at, state }) =>
          `edit ${when(state !== "in force", "past")} ${when(this.choice?.edit?.at === at, "lit chosen")}`,
        chosen: (edit) => this.choose({ edit, from: "edits" }),
      }),
      view: new Rows({
        label: NAMES.view, height: ROW, source: this.view, moved,
        draw: (one) => (one.sign ? cells.change(one) : cells.item(one)),
        mark: ({ sign, role, edit, shown, span }) => sign
          ? `${role} ${{ "+": "added", "-": "removed", " ": "same" }[sign]}`
          : `${edit === null ? shown[0]?.role : "stands"} ${lit(span)} ${chosen(this.choice?.item === span[0])}`,
        chosen: (one) => this.chooseItem(one),
      }),
    };
  }

  build() {
    const button = (name, key, act) => h("button", { title: `${name} (${key})`, click: act }, name);
    this.buttons = {
      expand: button("Expand", "e", () => this.expand()),
      restore: button("Restore", "r", () => this.act("restore", this.choice.message?.at ?? this.choice.edit.at)),
      undo: button("Undo", "u", () => this.act("undo", this.choice?.edit.at)),
      pin: button("Pin", "p", () => this.act(this.choice.message.is_pinned ? "unpin" : "pin", this.choice.message.at)),
    };
    this.head = h("header", { class: "head" });
    this.stats = h("div", { class: "stats" });
    this.about = h("div", { class: "about" });
    this.moment = h("div", { class: "moment", hidden: true });
    this.state = h("div", { class: "state", hidden: true });
    this.numbers = Object.fromEntries(Object.keys(COLUMNS).map((name) => [name, h("span", { class: "number" })]));
    const tab = (name) => ({ role: "tab", id: `tab-${name}`, "aria-controls": `column-${name}` });
    this.tabs = h("div", { class: "tabs", role: "tablist", "aria-label": "Columns" }, Object.keys(COLUMNS).map((name) =>
      h("button", { ...tab(name), click: () => this.show(name) }, NAMES[name])));
    this.body = h("div", { class: "columns" }, Object.entries(COLUMNS).map(([name, what]) =>
      h("section", { class: `column ${name}`, id: `column-${name}`, "aria-label": NAMES[name] },
        h("header", {}, h("h2", {}, NAMES[name]), h("span", { class: "sub" }, what), this.numbers[name]),
        name === "view" && this.moment, this.columns[name].el)), this.ribbons.el);
    const actions = h("section", { class: "actions", "aria-label": "What is chosen" },
      this.about, h("div", { class: "buttons" }, Object.values(this.buttons)));
    this.el = h("main", { class: "conversation" },
      this.head, this.stats, this.chart.el, this.tabs, this.body, actions, this.state);
    this.show("view");
    this.bar();
  }

  /** On a phone there is one column at a time. */
  show(name) {
    this.body.dataset.tab = name;
    for (const tab of this.tabs.children) tab.setAttribute("aria-selected", tab.id === `tab-${name}`);
    if (this.columns[name].cursor >= 0) this.columns[name].reveal(this.columns[name].cursor);
  }

  draw() {
    for (const rows of Object.values(this.columns)) rows.draw();
    for (const tab of this.tabs.children) tab.classList.toggle("has", this.choice !== null);
    this.bar();
  }

  top() {
    const { row } = this;
    document.title = `${plain(row.title)} · refold`;
    this.head.replaceChildren(...head(row, this.owner, this.isBusy || row.status === "compacting"));
    this.stats.replaceChildren(...stats(row));
    this.chart.set({ events: row.events, at: this.replay });
    this.headings(this.replay === null ? null : this.view.tokens);
    this.bar();
    if (row.status === "compacting") this.refreshLater();
  }

  headings(tokens = null) {
    const { row, edits, numbers } = this;
    numbers.recorded.textContent = row ? many(row.messages, "message") : "";
    numbers.edits.textContent = edits.known ? many(edits.total, "edit") : "";
    numbers.view.textContent = row ? many(tokens ?? row.tokens.shown, "token") : "";
  }

  /** What is chosen, and what can be done to it. */
  bar() {
    const { message, edit } = this.choice ?? {}, { expand, restore, undo, pin } = this.buttons;
    expand.disabled = !this.choice;
    restore.disabled = edit?.state !== "in force";
    undo.disabled = this.choice ? !edit || edit.state === "taken back" : !this.row?.edits;
    pin.disabled = !message;
    pin.textContent = message?.is_pinned ? "Unpin" : "Pin";
    let name = "Nothing chosen", facts = "Choose an edit to see what it covers and what stands for it.";
    if (message) {
      const by = edit ? ` by #${edit.at}` : "";
      const shown = message.shown === "whole" ? "shown whole" : `${message.shown}${by}`;
      name = `${message.message.role} #${message.at}`;
      facts = `${many(message.tokens, "token")}, ${shown}${when(message.is_pinned, ", pinned")}`;
    } else if (edit) {
      name = `${edit.kind} #${edit.at}`;
      facts = `covers ${cells.reach(edit.span)}, ${count(edit.tokens[0])} → ${many(edit.tokens[1], "token")}`;
    }
    this.about.replaceChildren(h("span", {}, h("b", {}, plain(name)), " ", facts), h("small", {}, plain(edit?.why)));
  }

  // Search and keys

  find() {
    const { id, owner, search, popover } = this;
    const group = (label, links) => (links.length ? [h("h2", {}, label), ...links] : []);
    const look = later(180, async (query) => {
      this.searching?.abort();
      if (query.length < 2) { popover.hidden = true; return; }
      const { signal } = this.searching = new AbortController();
      try {
        const [here, all] = await Promise.all([
          hits(query, { conversation: id, owner, signal }), hits(query, { owner, limit: 5, signal })]);
        const found = [...group("In this conversation", here), ...group("Everywhere", all)];
        popover.replaceChildren(...(found.length ? found : [h("p", {}, "Nothing was found.")]));
        popover.hidden = false;
      } catch (error) {
        if (error.name !== "AbortError") this.say(error.message);
      }
    });
    search.placeholder = innerWidth > 720 ? "Search this conversation and all others" : "Search";
    search.oninput = () => look(search.value.trim());
    popover.onclick = () => { popover.hidden = true; };
  }

  key(event) {
    const names = Object.keys(COLUMNS);
    const here = names.findIndex((name) => this.columns[name].el === document.activeElement);
    const way = { h: -1, ArrowLeft: -1, l: 1, ArrowRight: 1 }[event.key];
    if (way && (here >= 0 || event.key.length === 1)) {
      event.preventDefault();
      const name = names[here < 0 ? 1 : Math.max(0, Math.min(2, here + way))];
      this.show(name);
      this.columns[name].el.focus();
    } else if (["j", "k", "ArrowDown", "ArrowUp"].includes(event.key) && event.target === document.body) {
      const rows = this.columns[innerWidth > 720 ? "edits" : this.body.dataset.tab];
      rows.el.focus();
      rows.key(event);
    } else {
      const { expand, restore, undo, pin } = this.buttons;
      ({
        e: () => expand.click(), r: () => restore.click(), u: () => undo.click(), p: () => pin.click(),
        "[": () => this.step(-1), "]": () => this.step(1), n: () => this.replayAt(null), d: () => this.compare(),
        Escape: () => this.chooseNothing(),
      })[event.key]?.();
    }
  }

  /** A link to another place of the same conversation. */
  go(at) { if (at !== null) this.chooseAt(at).catch((error) => this.say(error.message)); }

  end() {
    this.isOver = true;
    this.stop?.();
    this.searching?.abort();
    this.search.oninput = this.popover.onclick = null;
  }
}
