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

function text(part) {
  switch (part.type) {
    case "text": return part.text;
    case "tool-call": return `${part.tool} ${part.input}`;
    case "tool-result": return typeof part.output === "string" ? part.output : part.output.map(text).join(" · ");
    case "media": return `[${part.kind}]`;
    case "compaction-marker": return part.value;
    default: return "";
  }
}

function words({ message }) {
  return plain((message.parts ?? []).map(text).filter(Boolean).join(" · ").slice(0, ROW_CHARS));
}

export function message(one) {
  const state = one.edit === null ? one.shown : `${one.shown} by #${one.edit}`;
  return [
    h("header", {}, role(one.message.role), tools(one.tools), place(`#${one.at}`), one.is_pinned && tag("pinned", "pin"),
      one.shown !== "whole" && tag(state), number(count(one.tokens))),
    h("p", {}, words(one) || pale("no text")),
  ];
}

export function edit(one) {
  const [before, after] = one.tokens;
  return [
    h("header", {}, role("summary", one.kind), place(`#${one.at}`), one.state !== "in force" && tag(one.state),
      number(brief(before), pale(" → "), h("b", {}, brief(after)))),
    h("p", {}, plain(one.why) || pale("no reason")),
    h("footer", {}, `covers ${reach(one.span)}`, one.model && h("span", {}, plain(one.model))),
  ];
}

export function item(one) {
  const [first] = one.shown, kind = first?.is_summary ? "summary" : first?.role ?? "nothing";
  const shown = one.shown.slice(0, 3).map(words).join(" ⏎ ");
  return [
    h("header", {}, role(kind), one.edit === null && tools(first?.tools), place(reach(one.span)),
      one.edit !== null && tag(`${plain(one.edit.kind)} #${one.edit.at}`),
      one.shown.length > 1 && tag(many(one.shown.length, "message")), number(count(one.tokens))),
    h("p", {}, shown || pale(first ? "no text" : "Hidden from the model.")),
  ];
}

export function change(one) {
  const [sign, when] = SIGNS[one.sign];
  return [
    h("header", {}, h("span", { class: "sign" }, sign), role(one.role), place(`#${one.at}`), tag(when),
      number(count(one.tokens))),
    h("p", {}, words(one)),
  ];
}
