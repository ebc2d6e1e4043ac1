// The list of conversations.

import { follow, get, path } from "./api.js";
import { ago, brief, calmly, count, h, later, percent, plain } from "./dom.js";
import { Listed, Rows } from "./rows.js";
import { hits, link } from "./search.js";

const PAGE = 50;
const AHEAD = 15; // rows before the end of what is known, when more is read
const AT_ONCE = 8; // conversations that are read again at a time
const HEADS = ["Conversation", "Messages", "Recorded → shown", "Saved", "Updated"];
const KEYS = ["j", "k", "ArrowDown", "ArrowUp", "Enter"];

const key = (row) => `${row.owner}\n${row.id}`;

/** Conversations as far as they were scrolled, the newest first. */
class Conversations extends Listed {
  constructor(query) {
    super();
    Object.assign(this, { query, next: null, known: false, coming: null, failed() {} });
  }

  want(from, to) { if (!this.known || (this.next && to > this.total - AHEAD)) this.more(); }

  /** After a failure nothing more is read: the user has to try again. */
  more() {
    this.coming ??= this.page(this.next).then(({ conversations, next }) => {
      const seen = new Set(this.rows.map(key));
      this.rows.push(...conversations.filter((row) => !seen.has(key(row))));
      Object.assign(this, { next, known: true, coming: null });
      this.changed();
    }).catch((error) => this.failed(error));
  }

  page(cursor = null) { return get("/api/conversations", { limit: PAGE, q: this.query, cursor }); }

  /** The newest again, in front of those that are known. */
  async renew() {
    const { conversations, next } = await this.page(), fresh = new Set(conversations.map(key));
    this.rows = [...conversations, ...this.rows.filter((row) => !fresh.has(key(row)))];
    if (!this.known || this.rows.length === conversations.length) this.next = next;
    this.known = true;
    this.changed();
  }

  /** Those that changed, as they are now; one that is not known yet comes with the newest. */
  async again(changed) {
    const known = new Set(this.rows.map(key));
    const listed = changed.filter((one) => known.has(key(one)));
    const fresh = await Promise.all(listed.map((one) => get(path(one.id), { owner: one.owner })));
    const rows = new Map(fresh.map((row) => [key(row), row]));
    this.rows = this.rows.map((row) => rows.get(key(row)) ?? row);
    if (fresh.length < changed.length) await this.renew();
    else this.changed();
  }
}

export class Home {
  constructor(shared) {
    Object.assign(this, { ...shared, title: "refold", searching: null, isOver: false });
    this.busy = new Set(); // conversations that are being summarized
    this.changed = new Map(); // conversations that changed
    this.renew = calmly(600, () => this.source.renew().catch((error) => this.say(error.message)));
    this.catchUp = calmly(600, () => this.readChanged());
    this.build();
    this.use("");
    this.find();
    this.clock = setInterval(() => this.source.known && this.renew(), 60_000);
    this.stop = follow("/api/events", {}, null, {
      onEvent: (event, data) => this.onEvent(event, data),
      onState: (now, before) => {
        this.connected(now);
        if (now === "lost") this.busy.clear(); // what ends meanwhile is not sent again
        if (now === "live" && before === "lost") this.renew();
      },
    });
  }

  get source() { return this.rows.source; }

  build() {
    this.number = h("span", { class: "number" });
    this.found = h("div", { class: "found" });
    this.state = h("div", { class: "state", hidden: true });
    this.rows = new Rows({
      label: "Conversations", height: () => (innerWidth <= 720 ? 96 : 68), source: new Listed(),
      draw: (row) => this.cells(row),
      chosen: (row, i, by) => { if (by !== "key") location.hash = link(row.id, row); },
    });
    this.head = h("div", { class: "list-head", "aria-hidden": "true" }, HEADS.map((name) => h("span", {}, name)));
    this.el = h("main", { class: "home" },
      h("header", {}, h("h1", {}, "Conversations"), this.number), this.found, this.head, this.rows.el, this.state);
  }

  cells(row) {
    const isBusy = row.status === "compacting" || this.busy.has(key(row));
    return [
      h("div", { class: "name" },
        h("a", { href: link(row.id, row), tabindex: -1 }, h("bdi", {}, plain(row.title))),
        h("span", { class: "sub" }, h("bdi", { class: "id" }, plain(row.id)),
          row.model && h("span", { class: "model" }, plain(row.model)), row.parent && h("span", { class: "tag" }, "fork"))),
      h("span", { class: "number messages" }, count(row.messages)),
      h("span", { class: "number tokens" }, brief(row.tokens.recorded), h("i", {}, " → "), h("b", {}, brief(row.tokens.shown))),
      isBusy ? h("span", { class: "busy" }, "summarizing…") : saved(row.tokens.saved),
      h("time", { datetime: row.updated ?? "" }, ago(row.updated ?? row.created)),
    ];
  }

  /** Those that have a query in their title or id. */
  use(query) {
    const source = new Conversations(query);
    this.rows.cursor = -1;
    this.rows.use(source);
    const { changed } = source;
    source.changed = () => { changed(); this.describe(); };
    source.failed = (error) => this.show(h("h2", {}, "The list could not be read"), h("p", {}, plain(error.message)),
      h("button", { class: "primary", click: () => { this.show(); this.use(query); } }, "Retry"));
  }

  describe() {
    const { known, total, next, query } = this.source;
    this.number.textContent = known ? `${count(total)}${next ? "+" : ""}` : "";
    if (!known || total) this.show();
    else this.show(...(query ? [h("p", {}, `No conversation has “${plain(query)}” in its title or id.`)] : empty()));
  }

  /** Something in the place of the list, or the list. */
  show(...instead) {
    this.state.replaceChildren(...instead);
    this.state.hidden = !instead.length;
    this.rows.el.hidden = this.head.hidden = instead.length > 0;
  }

  find() {
    const { search } = this;
    const look = later(180, async (query) => {
      this.searching?.abort();
      const { signal } = this.searching = new AbortController();
      this.use(query);
      const links = query.length > 1 ? await hits(query, { signal }).catch(() => []) : [];
      if (signal.aborted) return;
      this.found.replaceChildren(...(links.length ? [h("h2", {}, "In messages"), ...links] : []));
    });
    search.placeholder = innerWidth > 720 ? "Search all conversations" : "Search";
    search.oninput = () => look(search.value.trim());
  }

  onEvent(event, data) {
    const one = { id: data.conversation, owner: data.owner };
    if (event === "compaction:start") this.busy.add(key(one));
    if (event === "compaction:complete" || event === "compaction:failed") this.busy.delete(key(one));
    if (event.startsWith("compaction:")) this.rows.redraw();
    this.changed.set(key(one), one);
    this.catchUp();
  }

  async readChanged() {
    const some = [...this.changed.values()].slice(0, AT_ONCE);
    for (const one of some) this.changed.delete(key(one));
    try {
      await this.source.again(some);
    } catch (error) {
      if (error.status === 404) this.renew(); // it was erased
      else this.say(error.message);
    }
    for (const row of this.source.rows) if (row.status === "compacting") this.changed.set(key(row), row);
    if (this.changed.size && !this.isOver) setTimeout(this.catchUp, 1_500);
  }

  key(event) {
    if (!KEYS.includes(event.key) || document.activeElement !== document.body) return;
    this.rows.el.focus();
    this.rows.key(event);
  }

  end() {
    this.isOver = true;
    this.stop();
    clearInterval(this.clock);
    this.searching?.abort();
    this.search.oninput = null;
  }
}

function saved(share) {
  const full = h("i", {}), text = percent(share);
  full.style.width = `${100 * share}%`;
  return h("span", { class: "saved", title: `${text} of the recorded tokens are not sent` },
    h("i", { class: "bar" }, full), h("span", { class: "number" }, text));
}

function empty() {
  const line = (name, to) => h("code", {}, h("span", {}, `export ${name}=`), h("b", {}, `${location.origin}${to}`));
  return [
    h("h2", {}, "No conversations yet"),
    h("p", {}, "Point an agent at this service and its conversations appear here, live. Nothing else has to change:"),
    h("pre", {}, line("OPENAI_BASE_URL", "/openai/v1"), "\n", line("ANTHROPIC_BASE_URL", "/anthropic")),
    h("p", {}, "Everything is recorded; the model sees a view that always fits."),
  ];
}
