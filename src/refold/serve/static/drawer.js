// An original, read at the side.

import { count, h, plain } from "./dom.js";

const CHARS = 200_000; // at first; more on request

/** Opens it, and fills it with what `load` gives. */
export async function drawer(name, load, say) {
  const pre = h("pre", { tabindex: 0 }, h("i", { class: "bone" }));
  const copy = h("button", { class: "quiet", disabled: true }, "Copy");
  const close = h("button", { class: "quiet", click: () => dialog.close() }, "Close");
  const dialog = h("dialog", {
    class: "drawer", "aria-label": `Original of ${name}`,
    close: () => dialog.remove(), click: (event) => event.target === dialog && dialog.close(),
  }, h("header", {}, h("h2", {}, name), h("span", { class: "tag" }, "as it was recorded"), copy, close), pre);
  document.body.append(dialog);
  dialog.showModal();
  pre.focus();
  try {
    const text = await load(), shown = plain(text);
    pre.replaceChildren(shown.slice(0, CHARS));
    if (shown.length > CHARS) pre.after(rest(pre, shown));
    copy.disabled = false;
    copy.addEventListener("click", () =>
      navigator.clipboard.writeText(text).then(() => say("Copied"), () => say("It could not be copied")));
  } catch (error) {
    pre.replaceChildren(plain(error.message));
  }
}

function rest(pre, shown) {
  const all = h("button", { click: () => { pre.replaceChildren(shown); all.remove(); } },
    `Show all ${count(shown.length)} characters`);
  return all;
}
