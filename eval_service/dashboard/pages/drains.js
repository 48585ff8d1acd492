// Drains: what a trainer waits for before it ends, and the receipt that it gets.
import { get, path } from "../api.js";
import { facts, fill, h, number, when } from "../dom.js";
import { link } from "../place.js";
import { pageOf, table } from "../table.js";

const SIZE = 50;
const PARTS = ["pending", "done", "skipped", "failed", "cancelled", "never_came", "deferred"];

const ALL = [
  { label: "Drain", cell: (one) => h("a", { href: link(["drain", one.drain]) }, one.drain.slice(0, 8)) },
  { label: "Run", text: true, cell: (one) => h("a", { href: link(["run", one.run]), "data-key": `run-of-${one.drain}` }, one.run) },
  { label: "State", cell: (one) => (one.ended_at === null ? h("span", { class: "state running" }, "open") : h("span", { class: "state done" }, "ended")) },
  { label: "Begun", cell: (one) => when(one.started_at) },
  { label: "Deadline", cell: (one) => when(one.deadline) },
  { label: "Ended", cell: (one) => when(one.ended_at) },
];

export function mountAll(_parts, host) {
  const region = h("div");
  host.append(region);
  let asked = {};
  return {
    title: () => (asked.run ? `Drains of ${asked.run}` : "Drains"),
    twin: () => path(["drains"], asked),
    wants: (event) => event.kind === "drain",
    async load(params, signal) {
      asked = { run: params.get("run"), limit: SIZE, offset: (pageOf(params) - 1) * SIZE };
      const found = await get(path(["drains"], asked), signal);
      fill(region, table({ caption: "Drains", columns: ALL, rows: found.drains, page: pageOf(params), size: SIZE, total: found.total, empty: "No run has been drained yet." }));
    },
  };
}

const LINES = [
  { label: "Step", num: true, cell: (one) => (one.point ? h("a", { href: link(["point", one.point]) }, number(one.step)) : number(one.step)) },
  { label: "Suite", cell: (one) => one.suite },
  { label: "Became", cell: (one) => h("span", { class: `state ${one.part}` }, one.part.replace("_", " ")) },
  { label: "Reason", cell: (one) => one.reason ?? "" },
  { label: "Detail", text: true, cell: (one) => one.detail ?? "" },
];

export function mount([, drain], host) {
  const region = h("div");
  host.append(region);
  let run = null;
  return {
    title: () => `Drain ${drain.slice(0, 8)}`,
    twin: () => path(["drains", drain]),
    wants: (event) => event.kind !== "fleet" && (run === null || event.run === run),
    async load(params, signal) {
      const receipt = await get(path(["drains", drain]), signal);
      run = receipt.run;
      const lines = PARTS.flatMap((part) => receipt[part].map((one) => ({ ...one, part })));
      const ended = lines.length - receipt.pending.length;
      const page = pageOf(params);
      const outcome = receipt.open ? "waits" : receipt.drained ? "drained" : receipt.timed_out ? "its time is up" : "ended";
      fill(region,
        facts([["Run", h("a", { href: link(["run", run]) }, run)], ["State", outcome], ["Begun", when(receipt.started_at)], ["Deadline", when(receipt.deadline)], ["Ended", when(receipt.ended_at)]]),
        h("p", {}, h("label", { for: "drained" }, `${number(ended)} of ${number(lines.length)} points have ended`)),
        h("progress", { id: "drained", max: Math.max(1, lines.length), value: lines.length ? ended : 1 }),
        table({ caption: "Points of the receipt", columns: LINES, rows: lines.slice((page - 1) * SIZE, page * SIZE), page, size: SIZE, total: lines.length }));
    },
  };
}
