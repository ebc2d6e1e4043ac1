// Tokens per step by kind, against the window; below it, the slider that replays any place.

import { brief, count, h, many, s } from "./dom.js";

export const KINDS = ["system", "user", "assistant", "tool", "summary"];
const EDGE = 8; // half of the slider's thumb: the two share one axis
const TOP = 22; // for the marks of edits

const sum = ({ tokens }) => KINDS.reduce((all, kind) => all + tokens[kind], 0);

export class Chart {
  constructor({ picked, replayed }) {
    Object.assign(this, { steps: [], events: 1, window: 0, threshold: 0, at: null, hover: null, picked });
    this.svg = s("svg", { "aria-hidden": "true" });
    this.plot = h("div", {
      class: "plot", role: "slider", tabindex: 0, "aria-label": "Tokens per step", "aria-valuemin": 1,
      pointermove: (event) => this.point(this.nearest(event)), pointerleave: () => this.point(null),
      click: (event) => this.pick(this.nearest(event)), keydown: (event) => this.key(event), blur: () => this.point(null),
    }, this.svg);
    this.readout = h("div", { class: "readout" });
    this.slider = h("input", {
      type: "range", min: 0, max: 0, "aria-label": "Replay what the model saw", class: "replay",
      input: () => replayed(Number(this.slider.value)),
      pointerdown: () => { this.isHeld = true; }, pointerup: () => { this.isHeld = false; },
      pointercancel: () => { this.isHeld = false; },
    });
    this.el = h("section", { class: "chart", "aria-label": "Tokens per step" }, this.readout, this.plot, this.slider);
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  set(facts) {
    Object.assign(this, facts);
    this.slider.max = Math.max(0, this.events - 1);
    if (!this.isHeld) this.slider.value = this.at ?? this.slider.max;
    const place = this.at ?? this.slider.max;
    this.slider.setAttribute("aria-valuetext", this.at === null ? "Now" : `After event ${place} of ${this.events}`);
    this.plot.setAttribute("aria-valuemax", Math.max(1, this.steps.length));
    this.draw();
  }

  x(at) { return EDGE + ((this.width - 2 * EDGE) * at) / Math.max(1, this.events - 1); }

  nearest(event) {
    const x = event.clientX - this.plot.getBoundingClientRect().left;
    let best = null;
    this.steps.forEach((step, i) => { if (x >= this.x(step.at) - 0.5 || best === null) best = i; });
    return best;
  }

  /** The step whose numbers are shown: the one pointed at, the one replayed, or the newest. */
  get current() {
    if (this.hover !== null) return this.hover;
    if (this.at === null) return this.steps.length - 1;
    return this.steps.findLastIndex((step) => step.at - 1 <= this.at);
  }

  point(i) {
    if (i === this.hover) return;
    this.hover = i;
    this.draw();
  }

  pick(i) { if (this.steps[i]) this.picked(this.steps[i]); }

  key(event) {
    const last = this.steps.length - 1, now = this.hover ?? this.current;
    const to = {
      ArrowRight: now + 1, ArrowUp: now + 1, ArrowLeft: now - 1, ArrowDown: now - 1,
      PageUp: now + 10, PageDown: now - 10, Home: 0, End: last,
    }[event.key];
    if (to === undefined && event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    event.stopPropagation();
    if (to === undefined) this.pick(now);
    else this.point(Math.max(0, Math.min(last, to)));
  }

  describe() {
    const step = this.steps[this.current], total = step ? sum(step) : 0;
    const kinds = KINDS.map((kind) => `${kind} ${count(step?.tokens[kind])}`).join(", ");
    const text = step ? `Step ${step.step}, ${many(total, "token")}: ${kinds}` : "No step yet";
    this.plot.setAttribute("aria-valuenow", this.current + 1);
    this.plot.setAttribute("aria-valuetext", step?.edits ? `${text}; ${many(step.edits, "edit")}` : text);
    this.readout.replaceChildren(
      h("strong", {}, step ? `Step ${count(step.step)}` : "No step yet"),
      h("span", { class: "number" }, step ? many(total, "token") : ""),
      ...KINDS.map((kind) =>
        h("span", { class: `key ${kind}` }, kind, " ", h("b", {}, step ? brief(step.tokens[kind]) : ""))),
      step?.edits ? h("span", { class: "key mark" }, many(step.edits, "edit")) : "");
  }

  draw() {
    this.width = this.plot.clientWidth;
    this.height = this.plot.clientHeight;
    if (!this.width || !this.height) return;
    this.describe();
    const most = Math.max(1, ...this.steps.map(sum));
    this.isFar = this.window > 4 * most; // then its line would press all else to the ground
    this.scale = 1.04 * (this.isFar ? 1.5 * most : Math.max(most, this.window));
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.svg.replaceChildren(...this.bands(), ...this.limits(), ...this.marks(), ...this.rulers());
  }

  y(tokens) { return this.height - ((this.height - TOP) * tokens) / this.scale; }

  /** Each kind on top of the one before; a step lasts until the next. */
  bands() {
    const { steps } = this, base = steps.map(() => 0), ends = steps.slice(1).map((step) => this.x(step.at));
    return KINDS.map((kind) => {
      let up = "", down = "";
      steps.forEach((step, i) => {
        const x1 = this.x(step.at).toFixed(1), x2 = (ends[i] ?? this.width - EDGE).toFixed(1);
        const low = this.y(base[i]).toFixed(1), high = this.y((base[i] += step.tokens[kind])).toFixed(1);
        up += `${i ? "L" : "M"}${x1} ${high}H${x2}`;
        down = `L${x2} ${low}H${x1}${down}`;
      });
      return s("path", { class: `band ${kind}`, d: up && `${up}${down}Z` });
    });
  }

  limits() {
    const { window, threshold } = this, isHigh = this.y(window) < TOP + 20; // then there is no room above it
    if (!window) return [];
    if (this.isFar) return [this.label("window", `window ${count(window)} ↑`, TOP + 8)];
    const limit = (name, tokens, beside) => [
      s("line", { class: name, x1: 0, x2: this.width, y1: this.y(tokens), y2: this.y(tokens) }),
      this.label(name, `${name} ${count(tokens)}`, this.y(tokens) + beside),
    ];
    const lower = threshold > 0 && threshold < window ? limit("threshold", threshold, isHigh ? -4 : 13) : [];
    return [...limit("window", window, isHigh ? 13 : -4), ...lower];
  }

  label(name, text, y) {
    return s("text", { class: `label ${name}`, x: this.width - EDGE, y, "text-anchor": "end" }, text);
  }

  marks() {
    const diamond = (x) => s("path", { class: "edit-mark", d: `M${x} 3l3.5 4.5-3.5 4.5-3.5-4.5z` });
    return this.steps.filter((step) => step.edits).map((step) => diamond(this.x(step.at)));
  }

  rulers() {
    const ruler = (at, name) => s("line", { class: name, x1: this.x(at), x2: this.x(at), y1: 0, y2: this.height });
    const pointed = this.steps[this.hover];
    return [...(this.at === null ? [] : [ruler(this.at, "replayed")]), ...(pointed ? [ruler(pointed.at, "pointed")] : [])];
  }
}
