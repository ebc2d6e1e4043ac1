// A list of any length: only the rows in sight are elements, and only their pages are fetched.

import { h } from "./dom.js";

const BEYOND = 6; // rows above and below what is in sight
const KEPT = 60; // pages

/** Rows by index, a page at a time. `load(start, limit)` gives {rows, total}; `place(row)` is where it begins. */
export class Pages {
  constructor(load, place, size = 100) {
    Object.assign(this, { load, place, size, total: 0, version: 0, known: false, changed() {}, failed() {} });
    this.pages = new Map();
  }

  get(i) { return this.pages.get(Math.floor(i / this.size))?.rows[i % this.size]; }

  want(from, to) {
    for (let n = Math.floor(from / this.size); n * this.size < Math.max(to, 1); n++) this.page(n).catch(this.failed);
  }

  async page(n) {
    const page = this.pages.get(n);
    if (page && page.version >= this.version) return page.rows;
    if (page?.coming && page.requested >= this.version) return page.coming;
    const requested = this.version, coming = this.#fetch(n, requested);
    this.pages.set(n, { rows: page?.rows ?? [], version: page?.version ?? -1, coming, requested });
    return coming;
  }

  async #fetch(n, requested) {
    try {
      const { rows, total } = await this.load(n * this.size, this.size);
      const before = this.pages.get(n);
      this.pages.delete(n); // the newest is last
      this.pages.set(n, { rows, version: Math.max(requested, before?.version ?? -1), coming: null });
      if (this.pages.size > KEPT) this.pages.delete(this.pages.keys().next().value);
      Object.assign(this, { total, known: true });
      this.changed();
      return rows;
    } catch (error) {
      const page = this.pages.get(n);
      if (page) this.pages.set(n, { ...page, coming: null, version: this.version }); // until something changes
      throw error;
    }
  }

  /** What is shown may have changed; with `grown`, only at the end. */
  stale(grown = false) {
    this.version++;
    if (grown)
      for (const [n, page] of this.pages)
        if (page.rows.length === this.size && page.version === this.version - 1 && !page.coming) page.version++;
  }

  /** The index of the row that a place belongs to: the last that begins there or before. */
  async locate(at) {
    if (!this.known) await this.page(0);
    let low = 0, high = this.total - 1, guess = Math.min(at, high);
    for (let tries = 0; low <= high; tries++) {
      const n = Math.floor(guess / this.size), rows = await this.page(n), first = n * this.size;
      if (!rows.length) return null;
      const last = first + rows.length - 1;
      if (at < this.place(rows[0]) && first > low) {
        high = first - 1;
        guess = tries % 2 ? (low + high) >> 1 : Math.max(low, first - (this.place(rows[0]) - at));
      } else if (at > this.place(rows.at(-1)) && last < high) {
        low = last + 1;
        guess = tries % 2 ? (low + high) >> 1 : Math.min(high, last + (at - this.place(rows.at(-1))));
      } else {
        const after = rows.findIndex((row) => this.place(row) > at);
        if (after < 0 || after > 0) return after < 0 ? last : first + after - 1;
        return first > 0 ? first - 1 : 0;
      }
    }
    return null;
  }
}

/** Rows that are all there already. */
export class Listed {
  constructor(rows = []) { Object.assign(this, { rows, known: true, changed() {} }); }
  get total() { return this.rows.length; }
  get(i) { return this.rows[i]; }
  want() {}
}

let names = 0;
const placeholders = () => [h("i", { class: "bone" }), h("i", { class: "bone" })];

/** What is seen of a source: `draw(row, i)` gives a row's children, `mark(row, i)` its class names. */
export class Rows {
  constructor({ label, height, source, draw, mark = () => "", chosen = () => {}, moved = () => {} }) {
    Object.assign(this, { height, render: draw, mark, chosen, moved, cursor: -1, shown: new Map() });
    this.name = `rows${++names}`;
    this.sizer = h("div", { class: "sizer", role: "presentation" });
    this.el = h("div", {
      class: "rows", role: "grid", tabindex: 0, "aria-label": label,
      scroll: () => this.draw(), keydown: (event) => this.key(event), click: (event) => this.click(event),
    }, this.sizer);
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.el);
    this.use(source);
  }

  use(source) {
    if (this.source) this.source.changed = () => {};
    this.source = source;
    source.changed = () => this.draw();
    for (const el of this.shown.values()) el.remove();
    this.shown.clear();
    if (this.el.isConnected) this.draw();
  }

  get size() { return typeof this.height === "function" ? this.height() : this.height; }

  draw() {
    const { el, source, shown } = this, size = this.size, total = source.known ? source.total : 8;
    const wasAtEnd = el.scrollTop > 0 && el.scrollTop + el.clientHeight >= this.total * this.drawn - 4;
    const grew = total > this.total;
    if (total !== this.total || size !== this.drawn) {
      this.sizer.style.height = `${total * size}px`;
      el.setAttribute("aria-rowcount", total);
      if (size !== this.drawn) { for (const one of shown.values()) one.remove(); shown.clear(); }
      Object.assign(this, { total, drawn: size });
      if (wasAtEnd && grew) el.scrollTop = total * size;
    }
    const from = Math.max(0, Math.floor(el.scrollTop / size) - BEYOND);
    const to = Math.min(total, Math.ceil((el.scrollTop + el.clientHeight) / size) + BEYOND);
    source.want(from, to);
    for (const [i, one] of shown) if (i < from || i >= to) { one.remove(); shown.delete(i); }
    for (let i = to - 1; i >= from; i--) {
      const row = source.get(i);
      let one = shown.get(i);
      if (!one) {
        one = h("div", { role: "row", id: `${this.name}-${i}`, "aria-rowindex": i + 1 });
        one.style.transform = `translateY(${i * size}px)`;
        one.style.height = `${size}px`;
        one.row = null;
        this.sizer.insertBefore(one, shown.get(i + 1) ?? null);
        shown.set(i, one);
      }
      if (one.row !== row) {
        one.row = row;
        one.replaceChildren(h("div", { role: "gridcell" }, row === undefined ? placeholders() : this.render(row, i)));
      }
      const names = `row ${row === undefined ? "waiting" : this.mark(row, i)}${i === this.cursor ? " cursor" : ""}`;
      if (one.className !== names) one.className = names;
      one.setAttribute("aria-selected", i === this.cursor);
    }
    if (shown.has(this.cursor)) el.setAttribute("aria-activedescendant", `${this.name}-${this.cursor}`);
    else el.removeAttribute("aria-activedescendant");
    this.moved();
  }

  /** All that is in sight is drawn anew. */
  redraw() {
    for (const one of this.shown.values()) one.row = null;
    this.draw();
  }

  /** Brings a row into sight; one that is seen already stays where it is. */
  reveal(i, share = 0.3) {
    const { el } = this, size = this.size, top = i * size;
    if (top < el.scrollTop || top + size > el.scrollTop + el.clientHeight)
      el.scrollTop = Math.max(0, top - share * Math.max(0, el.clientHeight - size));
  }

  point(i) {
    if (i < 0 || i >= this.source.total) return;
    this.cursor = i;
    const { el } = this, size = this.size;
    if (i * size < el.scrollTop) el.scrollTop = i * size;
    else if ((i + 1) * size > el.scrollTop + el.clientHeight) el.scrollTop = (i + 1) * size - el.clientHeight;
    this.draw();
  }

  async choose(i, by) {
    if (i < 0 || i >= this.source.total) return;
    this.point(i);
    if (this.source.get(i) === undefined) await this.source.page?.(Math.floor(i / this.source.size));
    const row = this.source.get(i);
    if (row !== undefined && this.cursor === i) this.chosen(row, i, by);
  }

  click(event) {
    const one = event.target.closest("[role=row]");
    if (one && !event.target.closest("a")) this.choose(Number(one.getAttribute("aria-rowindex")) - 1, "mouse");
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, Math.floor(this.el.clientHeight / this.size) - 1), last = this.source.total - 1;
    const seen = Math.ceil(this.el.scrollTop / this.size);
    const to = {
      ArrowDown: this.cursor < 0 ? seen : this.cursor + 1, j: this.cursor < 0 ? seen : this.cursor + 1,
      ArrowUp: this.cursor - 1, k: this.cursor - 1,
      PageDown: Math.min(last, this.cursor + page), PageUp: Math.max(0, this.cursor - page), Home: 0, End: last,
    }[event.key];
    if (to === undefined && event.key !== "Enter") return;
    event.preventDefault();
    event.stopPropagation();
    this.choose(to ?? this.cursor, event.key === "Enter" ? "enter" : "key");
  }
}
