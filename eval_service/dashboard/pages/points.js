// Points of all runs, or of one: live states first of all.
import { get, path } from "../api.js";
import { fill, h } from "../dom.js";
import { become, link } from "../place.js";
import { columnsOf } from "../pointtable.js";
import { pageOf, table } from "../table.js";

const SIZE = 50;
const STATES = ["reserved", "queued", "pinning", "running", "scoring", "done", "skipped", "failed", "cancelled"];

export function mount(_parts, host) {
  const chosen = h("select", { id: "points-state", onchange: () => become({ state: chosen.value, page: null }) }, h("option", { value: "" }, "any"), STATES.map((name) => h("option", { value: name }, name)));
  const run = h("input", { id: "points-run", onchange: () => become({ run: run.value, page: null }) });
  const counts = h("p");
  const region = h("div");
  host.append(h("form", { onsubmit: (event) => event.preventDefault() }, h("label", { for: "points-state" }, "State"), chosen, h("label", { for: "points-run" }, "Run"), run), counts, region);
  const query = (params) => ({ run: params.get("run"), state: params.get("state"), suite: params.get("suite"), sort: params.get("sort") ?? "-created_at", limit: SIZE, offset: (pageOf(params) - 1) * SIZE });
  let asked = {};
  return {
    title: () => "Points",
    twin: () => path(["points"], asked),
    wants: (event) => event.kind === "point" && (!asked.run || event.run === asked.run),
    async load(params, signal) {
      asked = query(params);
      chosen.value = params.get("state") ?? "";
      if (document.activeElement !== run) run.value = params.get("run") ?? "";
      const [found, status] = await Promise.all([get(path(["points"], asked), signal), get("status", signal)]);
      const by = asked.run ? (status.runs[asked.run] ?? {}) : status.points;
      fill(counts, STATES.filter((name) => by[name]).map((name) => [h("a", { href: link(["points"], { run: asked.run, state: name }) }, `${name} ${by[name].toLocaleString("en")}`), " "]));
      fill(region, table({ caption: "Points", columns: columnsOf({ run: true }), rows: found.points, order: asked.sort, page: pageOf(params), size: SIZE, total: found.total }));
    },
  };
}
