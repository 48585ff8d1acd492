// What happens, as it happens: one event stream for the whole dashboard (docs/events.md).

const EVERY_MS = 1000; // a page is made anew at most this often, however much happens
const KINDS = ["point", "drain", "fleet"];

/** Calls `onEvents(list)` with what came since the last call, and `onState(text)`; `reset` among them is: look anew. */
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
    let opened = false;
    source.onopen = () => {
      onState("live");
      if (opened) take("reset", {});
      opened = true;
    };
    source.onerror = () => {
      onState("not connected");
      if (source.readyState === EventSource.CLOSED) setTimeout(start, 5000);
    };
    for (const kind of KINDS) source.addEventListener(kind, (event) => take(kind, JSON.parse(event.data)));
    for (const kind of ["reset", "dropped"]) source.addEventListener(kind, () => take("reset", {}));
    addEventListener("pagehide", () => source.close(), { once: true });
  };
  start();
}
