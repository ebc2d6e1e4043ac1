// What was recorded anywhere, found: a list of links that lead to the place.

import { get } from "./api.js";
import { h, plain } from "./dom.js";

export function link(id, { at = null, owner = null } = {}) {
  const place = at === null ? "" : `/${at}`, whose = owner && owner !== "default" ? `?owner=${encodeURIComponent(owner)}` : "";
  return `#/c/${encodeURIComponent(id)}${place}${whose}`;
}

export async function hits(query, { conversation = null, owner = null, limit = 8, signal } = {}) {
  const { hits: found } = await get("/api/search", { q: query, conversation, owner, limit }, signal);
  return found.map((hit) =>
    h("a", { class: "hit", href: link(hit.conversation, { at: hit.at, owner: hit.owner ?? owner }) },
      h("span", { class: `role ${hit.role}` }, plain(hit.role)),
      h("span", { class: "excerpt" }, plain(hit.excerpt)),
      h("span", { class: "where" }, conversation ? `#${hit.at}` : plain(`${hit.title ?? hit.conversation} #${hit.at}`),
        hit.in_view === false && h("span", { class: "tag" }, "not in view"))));
}

/** Up and down lead from the field through what was found; Enter opens the first. */
export function walk(event, field) {
  const way = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  const links = [...document.querySelectorAll(".found .hit, .popover:not([hidden]) .hit, .home .name a")];
  if (event.key === "Enter" && event.target === field) links[0]?.click();
  if (!way || !links.length) return;
  event.preventDefault();
  const to = links.indexOf(document.activeElement) + way;
  (links[to] ?? (way < 0 ? field : links.at(-1))).focus();
}
