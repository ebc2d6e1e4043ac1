// Elements, numbers and times. Text goes in as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element; a function is a listener, null and false leave an attribute out. */
export const h = (tag, props, ...children) => fill(document.createElement(tag), props, children);
export const s = (tag, props, ...children) => fill(document.createElementNS(SVG, tag), props, children);

function fill(el, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (typeof value === "function") el.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false)
      el.setAttribute(name, value === true ? "" : value);
  }
  el.append(...children.flat(Infinity).filter((one) => one !== null && one !== undefined && one !== false));
  return el;
}

/** What cannot be seen, or turns text around, is shown by its number. */
export const plain = (text) => String(text ?? "").replaceAll("\r\n", "\n").replace(
  /[\0-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g,
  (one) => `⟨U+${one.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);

const whole = new Intl.NumberFormat("en-US");
const short = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });
const relative = new Intl.RelativeTimeFormat("en", { numeric: "auto", style: "short" });

export const count = (n) => whole.format(Math.round(n ?? 0));
export const brief = (n) => (n < 10_000 ? count(n) : short.format(n).toLowerCase());
/** What is not quite nothing, or not quite all, does not look so. */
export function percent(share) {
  const whole = Math.round(100 * (share ?? 0));
  return share > 0 && whole === 0 ? "<1%" : share < 1 && whole === 100 ? ">99%" : `${whole}%`;
}
export const many = (n, one, more = `${one}s`) => `${count(n)} ${n === 1 ? one : more}`;
export const money = (usd) =>
  usd === 0 ? "$0" : usd < 0.01 ? `$${usd.toPrecision(1)}` : `$${usd.toFixed(usd < 10 ? 2 : 0)}`;

export function ago(iso) {
  if (!iso) return "–";
  const seconds = (new Date(iso) - Date.now()) / 1000;
  if (seconds > -45) return "just now";
  for (const [unit, size] of [["day", 86_400], ["hour", 3_600], ["minute", 60]])
    if (-seconds >= size) return relative.format(Math.round(seconds / size), unit).replace(".", "");
  return "1 min ago";
}

/** One call for many, at most one in `ms`; the last one always counts. */
export function calmly(ms, act) {
  let timer = null, last = -Infinity;
  return () => {
    timer ??= setTimeout(() => {
      timer = null;
      last = performance.now();
      act();
    }, Math.max(0, last + ms - performance.now()));
  };
}

/** Acts when nothing more came for `ms`. */
export function later(ms, act) {
  let timer;
  return (...args) => { clearTimeout(timer); timer = setTimeout(act, ms, ...args); };
}
