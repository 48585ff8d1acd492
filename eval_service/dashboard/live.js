// What happens, as it happens: one event stream for the whole dashboard (docs/events.md).

import { headers, isWanted, known, refused } from "./token.js";

const EVERY_MS = 1000; // a page is made anew at most this often, however much happens
const KINDS = ["point", "drain", "fleet"];

/**
 * Calls `onEvents(list)` with what came since the last call, and `onState(text)`; `reset` among them is: look anew.
 * `onState` tells whether something was looked at already, of which what came before the stream would be missed.
 */
export function follow(onEvents, onState) {
  let waiting = [];
  let timer = null;
  let last = 0;
  const flush = () => {
    timer = null;
    last = performance.now();
    const found = waiting;
    waiting = [];
    onEvents(found);
  };
  const take = (kind, data) => {
    if (waiting.length < 5000) waiting.push({ kind, ...data });
    timer ??= setTimeout(flush, Math.max(50, EVERY_MS - (performance.now() - last)));
  };
  const start = () => {
    const source = new EventSource("events");
    source.onopen = () => {
      if (onState("live")) take("reset", {});
    };
    source.onerror = () => {
      onState("not connected");
      if (source.readyState === EventSource.CLOSED && !isWanted()) setTimeout(start, 5000);
    };
    for (const kind of KINDS) source.addEventListener(kind, (event) => take(kind, JSON.parse(event.data)));
    for (const kind of ["reset", "dropped"]) source.addEventListener(kind, () => take("reset", {}));
    addEventListener("pagehide", () => source.close(), { once: true });
  };
  if (known()) read(take, onState);
  else start();
}

/** The same under a token, which an EventSource can't send. */
async function read(take, onState, after = null) {
  const left = new AbortController();
  addEventListener("pagehide", () => left.abort(), { once: true });
  try {
    const more = after === null ? {} : { "last-event-id": after };
    const answer = await fetch("events", { headers: headers(more), signal: left.signal, cache: "no-store" });
    if (answer.status === 401) {
      onState("not connected");
      return refused();
    }
    if (!answer.ok) throw new Error(`${answer.status}`);
    if (onState("live")) take("reset", {});
    let text = "";
    const decoder = new TextDecoder();
    for (let reader = answer.body.getReader(), part; !(part = await reader.read()).done; ) {
      text += decoder.decode(part.value, { stream: true });
      const frames = text.split("\n\n");
      text = frames.pop();
      for (const frame of frames) after = tell(frame, take) ?? after;
    }
  } catch (error) {
    if (left.signal.aborted) return;
  }
  onState("not connected");
  setTimeout(() => read(take, onState, after), 2000);
}

/** One frame's event; returns its number, if it has one. */
function tell(frame, take) {
  const lines = Object.fromEntries(frame.split("\n").map((line) => [line.split(": ", 1)[0], line.slice(line.indexOf(": ") + 2)]));
  if (KINDS.includes(lines.event)) take(lines.event, JSON.parse(lines.data));
  else if (lines.event) take("reset", {});
  return lines.id;
}
