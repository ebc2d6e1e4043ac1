// From what an edit covers, through the edit, to what stands for it.

import { s } from "./dom.js";

export class Ribbons {
  /** `columns` are the rows of recorded, edits and view; `chosen()` is what is lit. */
  constructor(columns, chosen) {
    Object.assign(this, { columns, chosen, frame: 0 });
    this.el = s("svg", { class: "ribbons", "aria-hidden": "true" });
  }

  /** At most once a frame. */
  draw() {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.el.replaceChildren(...this.#paths());
    });
  }

  #paths() {
    const { edit, span } = this.chosen() ?? {};
    if (!edit || !span) return [];
    const [start, end] = span, middle = this.#band("edits", (one) => one.at === edit.at);
    const recorded = this.#band("recorded", (one) => one.at >= start && one.at < end);
    const view = this.#band("view", (one) => one.span && one.span[0] < end && start < one.span[1]);
    return [[recorded, middle], [middle, view]].filter(([a, b]) => a && b).map(([a, b]) => ribbon(a, b));
  }

  /** Where the rows are that it is true of, as far as they are in sight. */
  #band(name, is) {
    const rows = this.columns[name], frame = rows.el.getBoundingClientRect(), box = this.el.getBoundingClientRect();
    const all = [...rows.shown].filter(([, el]) => el.row && is(el.row)).map(([i]) => i);
    if (!all.length || !frame.width) return null;
    const y = (i) => Math.max(0, Math.min(frame.height, i * rows.size - rows.el.scrollTop)) + frame.top - box.top;
    const top = y(Math.min(...all)), bottom = y(Math.max(...all) + 1);
    if (bottom - top < 1) return null;
    return { top: top + 2, bottom: bottom - 3, left: frame.left - box.left, right: frame.right - box.left };
  }
}

function ribbon(a, b) {
  const x1 = a.right - 2, x2 = b.left + 2, mid = (x1 + x2) / 2;
  const there = `C${mid} ${a.top} ${mid} ${b.top} ${x2} ${b.top}`;
  const back = `C${mid} ${b.bottom} ${mid} ${a.bottom} ${x1} ${a.bottom}`;
  return s("path", { d: `M${x1} ${a.top}${there}V${b.bottom}${back}Z` });
}
