// What a row of each column shows: a message, an edit, an item of the view, a change.

import { brief, count, h, many, plain } from "./dom.js";

const ROW_CHARS = 400; // of a text in a row, which has two lines
const SIGNS = { "+": ["+", "only now"], "-": ["−", "only then"], " ": ["", ""] };

/** The places from start up to, not including, end. */
export const reach = ([start, end]) => (end - start === 1 ? `#${start}` : `#${start}–#${end - 1}`);

const tag = (text, more = "") => h("span", { class: `tag ${more}` }, text);
const role = (name, shown = name) => h("span", { class: `role ${name}` }, plain(shown));
const place = (text) => h("span", { class: "at" }, text);
const number = (...what) => h("span", { class: "number" }, ...what);
const pale = (text) => h("i", {}, text);
const tools = (names) => (names?.length ? h("code", {}, plain(names.join(", "))) : null);

function words({ text, calls = [], media = [] }) {
  const all = [text, ...calls.map((call) => `${call.tool} ${call.input}`), ...media.map((one) => `[${one.kind}]`)];
  return plain(all.filter(Boolean).join(" · ").slice(0, ROW_CHARS));
}

export function message(one) {
  const state = one.edit === null ? one.shown : `${one.shown} by #${one.edit}`;
  return [
    h("header", {}, role(one.role), tools(one.tools), place(`#${one.at}`), one.pinned && tag("pinned", "pin"),
      one.shown !== "whole" && tag(state), number(count(one.tokens))),
    h("p", {}, words(one) || pale("no text")),
  ];
}

export function edit(one) {
  const [before, after] = one.tokens;
  return [
    h("header", {}, role("summary", one.kind), place(`#${one.at}`), one.state !== "in force" && tag(one.state),
      number(brief(before), pale(" → "), h("b", {}, brief(after)))),
    h("p", {}, plain(one.why) || pale("no reason was given")),
    h("footer", {}, `covers ${reach(one.span)}`, one.model && h("span", {}, plain(one.model))),
  ];
}

export function item(one) {
  const [first] = one.shown, kind = first?.summary ? "summary" : first?.role ?? "nothing";
  const text = one.shown.slice(0, 3).map(words).join(" ⏎ ");
  return [
    h("header", {}, role(kind), one.edit === null && tools(first?.tools), place(reach(one.span)),
      one.edit !== null && tag(`${plain(one.kind ?? "edit")} #${one.edit}`),
      one.shown.length > 1 && tag(many(one.shown.length, "message")), number(count(one.tokens))),
    h("p", {}, text || pale(first ? "no text" : "The model is shown nothing of this.")),
  ];
}

export function change(one) {
  const [sign, when] = SIGNS[one.sign];
  return [
    h("header", {}, h("span", { class: "sign" }, sign), role(one.role), place(`#${one.at}`), tag(when),
      number(count(one.tokens))),
    h("p", {}, plain(one.text)),
  ];
}
