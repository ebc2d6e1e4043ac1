// What stands above a conversation: its names, and how much of it is shown.

import { ago, count, h, many, money, percent, plain } from "./dom.js";
import { link } from "./search.js";

const FORKS = 3; // that are named

export function head(row, owner, isBusy) {
  const to = (id) => h("a", { href: link(id, { owner }) }, plain(id));
  const forks = row.forks.slice(0, FORKS).map((id, n) => [n ? ", " : ": ", to(id)]);
  return [
    h("div", {}, h("h1", {}, h("bdi", {}, plain(row.title))), isBusy && h("span", { class: "busy" }, "summarizing…")),
    h("div", { class: "sub" },
      h("a", { href: "#/" }, "All conversations"),
      h("bdi", { class: "id" }, plain(row.id)),
      row.model && h("span", { class: "model" }, plain(row.model)),
      h("time", { datetime: row.updated ?? "" }, ago(row.updated ?? row.created)),
      row.parent && h("span", {}, "forked from ", to(row.parent.id), ` at #${row.parent.at}`),
      row.forks.length > 0 && h("span", {}, many(row.forks.length, "fork"), forks)),
  ];
}

export function stats(row) {
  const share = row.tokens.shown / (row.overflow.limit || 1), { saved_usd: saved, spent_usd: spent } = row.cost;
  const cell = (label, value, ...more) => h("div", {},
    h("span", { class: "label" }, label), h("strong", { class: "number" }, value), h("span", { class: "sub" }, ...more));
  return [
    cell("Recorded", count(row.tokens.recorded), "tokens in ", many(row.messages, "message")),
    cell("Shown", count(row.tokens.shown), "tokens with ", many(row.edits, "edit"), " in force"),
    cell("Saved", percent(row.tokens.saved), saved === null ? "of the recorded tokens" : h("b", {}, `${money(saved)} saved`),
      spent > 0 && `${money(spent)} spent`),
    cell("Window", percent(share), gauge(share, row), `of ${count(row.overflow.limit)}`),
  ];
}

function gauge(share, row) {
  const full = h("i", {}), threshold = h("b", {});
  full.style.width = `${100 * Math.min(1, share)}%`;
  threshold.style.left = `${100 * Math.min(1, row.overflow.threshold / (row.overflow.limit || 1))}%`;
  const name = `gauge ${row.overflow.is_overflow ? "over" : ""}`;
  return h("i", { class: name, role: "img", "aria-label": `${percent(share)} of the window` }, full, threshold);
}
