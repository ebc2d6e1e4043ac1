// The API, with a token where one is needed, and events as they happen.

import { h } from "./dom.js";

const TOKEN = "refold-token";
const QUIET_MS = 40_000; // there is a heartbeat every 15 s
let signIn = null; // the form that is open

export class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

export const path = (id, verb = "") => `/api/conversations/${encodeURIComponent(id)}${verb && `/${verb}`}`;

export async function get(where, params = {}, signal) {
  return (await ask(where, params, { signal })).json();
}

export async function post(where, body, params = {}) {
  const headers = { "content-type": "application/json" };
  return (await ask(where, params, { method: "POST", headers, body: JSON.stringify(body) })).json();
}

async function ask(where, params, options) {
  const url = new URL(where, location.origin);
  for (const [name, value] of Object.entries(params))
    if (value !== null && value !== undefined && value !== "") url.searchParams.set(name, value);
  for (;;) {
    const token = sessionStorage.getItem(TOKEN);
    const headers = { ...options.headers, ...(token && { authorization: `Bearer ${token}` }) };
    let response;
    try {
      response = await fetch(url, { ...options, headers, credentials: "omit", redirect: "error" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refused(0, "The service does not answer.");
    }
    if (response.ok) return response;
    if (response.status === 401 || (response.status === 403 && token && !options.method)) {
      if (token === sessionStorage.getItem(TOKEN)) await askForToken(Boolean(token));
      continue;
    }
    const body = await response.json().catch(() => null);
    throw new Refused(response.status, body?.error?.message ?? `The service answered ${response.status}.`);
  }
}

/** All requests that need a token wait for the same form. */
function askForToken(again) {
  signIn ??= new Promise((done) => {
    const field = h("input", { type: "password", id: "token", required: true, autocomplete: "off" });
    const why = again ? "That token was not accepted." : "This service needs a token. It is kept until this tab is closed.";
    const form = h("form", { method: "dialog" },
      h("h2", {}, "Sign in"),
      h("p", { role: again ? "alert" : null }, why),
      h("label", { for: "token" }, "Token"), field,
      h("button", { class: "primary" }, "Sign in"));
    const dialog = h("dialog", { class: "sign-in", cancel: (event) => event.preventDefault() }, form);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      sessionStorage.setItem(TOKEN, field.value.trim());
      signIn = null;
      dialog.close();
      dialog.remove();
      done();
    });
    document.body.append(dialog);
    dialog.showModal();
  });
  return signIn;
}

/** Events from `after` on, again and again after the connection was lost. Returns a function that ends it. */
export function follow(where, params, after, { onEvent, onState }) {
  const end = new AbortController();
  let last = after, wait = 500, now = "new";
  (async () => {
    while (!end.signal.aborted) {
      const attempt = new AbortController(), stop = () => attempt.abort();
      end.signal.addEventListener("abort", stop);
      let quiet = setTimeout(stop, QUIET_MS);
      try {
        const headers = { accept: "text/event-stream", ...(last !== null && { "last-event-id": String(last) }) };
        const response = await ask(where, params, { headers, signal: attempt.signal });
        onState("live", now);
        now = "live";
        wait = 500;
        const alive = () => { clearTimeout(quiet); quiet = setTimeout(stop, QUIET_MS); };
        for await (const { id, event, data } of frames(response.body, alive)) {
          if (id) last = id;
          if (event === "lagging") break;
          onEvent(event, data);
        }
      } catch (error) { // it is tried again, unless there is nothing left to follow
        if (error.status === 404) { onState("gone", now); end.abort(); }
      }
      clearTimeout(quiet);
      stop();
      end.signal.removeEventListener("abort", stop);
      if (end.signal.aborted) break;
      onState("lost", now);
      now = "lost";
      await new Promise((done) => setTimeout(done, wait * (0.75 + Math.random() / 2)));
      wait = Math.min(2 * wait, 15_000);
    }
  })();
  return () => end.abort();
}

async function* frames(body, alive) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    alive();
    const parts = (rest + value.replaceAll("\r", "")).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const frame = { event: "message", data: "" };
      for (const line of part.split("\n")) {
        const [, name, text] = /^([^:]*):? ?(.*)$/s.exec(line);
        if (name === "data") frame.data += text;
        else if (name) frame[name] = text;
      }
      if (!frame.data) continue;
      try { yield { ...frame, data: JSON.parse(frame.data) }; } catch { /* not for us */ }
    }
  }
}
