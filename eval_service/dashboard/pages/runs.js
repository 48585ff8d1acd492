// All runs: how far they are, what came out last, how far behind the curve is.
import { get, path } from "../api.js";
import { NONE, fill, h, number, state, when } from "../dom.js";
import { become, link } from "../place.js";
import { ordered, pageOf, table } from "../table.js";

const SIZE = 50;
const OPEN = ["reserved", "queued", "pinning", "running", "scoring"];

const lag = (run) => (run.step === null || run.scored_step === null ? null : Math.max(0, run.step - run.scored_step));
const sum = (run, states) => states.reduce((n, name) => n + (run.points[name] ?? 0), 0);
const score = (run) => Object.values(run.metrics)[0] ?? null;

const VALUES = {
  run: (run) => run.run, state: (run) => run.state, step: (run) => run.step, lag, score,
  done: (run) => sum(run, ["done"]), open: (run) => sum(run, OPEN), gaps: (run) => sum(run, ["skipped", "failed", "cancelled"]),
  created: (run) => run.created_at,
};

const COLUMNS = [
  { label: "Run", sort: "run", text: true, cell: (run) => h("a", { href: link(["run", run.run]) }, run.run) },
  { label: "State", sort: "state", cell: (run) => state(run.state) },
  { label: "Latest score", sort: "score", num: true, cell: (run) => Object.entries(run.metrics).map(([suite, value]) => h("div", {}, `${suite} ${number(value)}`)) },
  { label: "Step", sort: "step", num: true, cell: (run) => number(run.step) },
  { label: "Lag", sort: "lag", num: true, cell: (run) => number(lag(run)) },
  { label: "Done", sort: "done", num: true, cell: (run) => number(VALUES.done(run)) },
  { label: "Open", sort: "open", num: true, cell: (run) => (VALUES.open(run) ? h("a", { href: link(["points"], { run: run.run, state: OPEN.find((name) => run.points[name]) }) }, number(VALUES.open(run))) : "0") },
  { label: "Gaps", sort: "gaps", num: true, cell: (run) => number(VALUES.gaps(run)) },
  { label: "Snapshots kept", num: true, cell: (run) => number(run.snapshots_kept) },
  { label: "Begun", sort: "created", cell: (run) => when(run.created_at) },
];

export function mount(_parts, host) {
  const search = h("input", { type: "search", id: "runs-search", oninput: () => become({ search: search.value }) });
  const region = h("div");
  host.append(h("form", { role: "search", onsubmit: (event) => event.preventDefault() }, h("label", { for: "runs-search" }, "Name has"), search), region);
  return {
    title: () => "Runs",
    twin: () => path(["runs"]),
    wants: (event) => event.kind === "point",
    async load(params, signal) {
      const all = await get(path(["runs"]), signal);
      const order = params.get("sort") ?? "-created";
      const text = params.get("search") ?? "";
      if (document.activeElement !== search) search.value = text;
      const found = ordered(all.filter((run) => run.run.toLowerCase().includes(text.toLowerCase())), order, VALUES);
      const page = pageOf(params);
      const rows = found.slice((page - 1) * SIZE, page * SIZE);
      const empty = all.length ? "No run has that in its name." : "No run is known yet: a trainer makes one known when it starts.";
      fill(region, table({ caption: "Runs", columns: COLUMNS, rows, order, page, size: SIZE, total: found.length, empty }),
        h("p", { class: "soft" }, `Lag: steps that the trainer is ahead of the last score. ${NONE} means: not known yet.`));
    },
  };
}
