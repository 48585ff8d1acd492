// Which page is shown, and when it is made anew. A page is {title, twin, load(signal), wants(event)}: `mount(parts,
// host)` makes it once, `load` fetches what the URL asks for and fills it, also after each event that it wants.
import { get } from "./api.js";
import { follow } from "./live.js";
import { here } from "./place.js";
import { ask, openWithToken } from "./token.js";
import { mount as compare } from "./pages/compare.js";
import { mount as drain, mountAll as drains } from "./pages/drains.js";
import { mount as fleet } from "./pages/fleet.js";
import { mount as point } from "./pages/point.js";
import { mount as points } from "./pages/points.js";
import { mount as run } from "./pages/run.js";
import { mount as runs } from "./pages/runs.js";

const PAGES = { runs, run, points, point, compare, fleet, drains, drain };
const byId = (id) => document.getElementById(id);
let current = null;
let at = null;
let under = new AbortController();
let busy = false;
let again = false;
let begun = false;

async function load() {
  under.abort();
  under = new AbortController();
  const { signal } = under;
  busy = true;
  try {
    await current.load(here().params, signal);
    if (!signal.aborted) byId("fault").hidden = true;
  } catch (error) {
    if (error.name === "AbortError" || signal.aborted) return;
    byId("fault").textContent = error.message;
    byId("fault").hidden = false;
  }
  if (signal.aborted) return; // another one is under way
  busy = false;
  name();
  if (again) refresh();
}

/** As `load`, but what is under way is let end first: events that never cease would let none of them end. */
function refresh() {
  again = busy;
  if (!busy) load();
}

function name() {
  byId("title").textContent = current.title();
  document.title = `${current.title()} · Evalfleet`;
  byId("twin").href = current.twin();
}

async function go() {
  const { parts } = here();
  const path = parts.join("/");
  const moved = path !== at;
  if (moved) {
    at = path;
    current?.close?.();
    const page = byId("page");
    page.replaceChildren();
    current = (PAGES[parts[0]] ?? runs)(parts, page);
    name();
    for (const link of document.querySelectorAll("header nav a")) {
      const on = link.hash === `#/${section(parts[0])}`;
      if (on) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
  }
  await load();
  if (moved) scrollTo(0, 0);
}

function section(name) {
  return { run: "runs", point: "points", compare: "points", drain: "drains" }[name] ?? name;
}

const THEMES = ["system", "light", "dark"];

function theme(chosen) {
  if (chosen === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
  byId("theme").textContent = `Theme: ${chosen}`;
  dispatchEvent(new Event("themechange"));
}

function kept() {
  const found = localStorage.getItem("evalfleet-theme");
  return THEMES.includes(found) ? found : "system";
}

byId("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(kept()) + 1) % THEMES.length];
  localStorage.setItem("evalfleet-theme", next);
  theme(next);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dispatchEvent(new Event("themechange")));
byId("skip").addEventListener("click", () => byId("main").focus());
addEventListener("hashchange", go);
ask(byId("token"));
for (const id of ["twin", "document"]) byId(id).addEventListener("click", openWithToken);

async function look() {
  const status = await get("status").catch(() => null);
  if (status === null) return;
  byId("version").textContent = `version ${status.version}, controller ${status.controller_alive ? "acts" : "is away"}`;
}

/** Show the page, once the events are followed, so that nothing falls between the two; tells whether it was shown. */
function begin() {
  if (begun) return true;
  begun = true;
  go();
  return false;
}

theme(kept());
look();
setInterval(look, 15000);
follow(
  (events) => {
    if (events.some((event) => event.kind === "reset" || current.wants(event))) refresh();
  },
  (text) => {
    byId("live").textContent = text;
    return begin();
  },
);
setTimeout(begin, 1000);
