// Groups of engines, and what each engine does.
import { get, path } from "../api.js";
import { NONE, fill, h, number, state, when } from "../dom.js";
import { link } from "../place.js";
import { ordered, pageOf, table } from "../table.js";

const SIZE = 50;
const VALUES = { id: (one) => one.id, state: (one) => one.state, in_flight: (one) => one.in_flight, tokens_per_s: (one) => one.tokens_per_s, restarts: (one) => one.restarts, heard_at: (one) => one.heard_at, group: (one) => one.group, node: (one) => one.node };

const ENGINES = [
  { label: "Engine", sort: "id", cell: (one) => one.id },
  { label: "Group", sort: "group", cell: (one) => one.group },
  { label: "State", sort: "state", cell: (one) => [state(one.state), one.detail ? h("div", { class: "soft" }, one.detail) : null] },
  { label: "Pinned to", cell: (one) => (one.snapshot ? [h("code", {}, one.weight_version ?? one.snapshot.slice(0, 8))] : NONE) },
  { label: "Works on", cell: (one) => (one.point ? h("a", { href: link(["point", one.point]), "data-key": `works-${one.id}` }, `point ${one.point.slice(0, 8)}`) : NONE) },
  { label: "In flight", sort: "in_flight", num: true, cell: (one) => number(one.in_flight) },
  { label: "Tokens/s", sort: "tokens_per_s", num: true, cell: (one) => number(one.tokens_per_s, 1) },
  { label: "Restarts", sort: "restarts", num: true, cell: (one) => number(one.restarts) },
  { label: "Node", sort: "node", cell: (one) => one.node ?? NONE },
  { label: "Address", cell: (one) => one.url ?? NONE },
  { label: "Last heard", sort: "heard_at", cell: (one) => when(one.heard_at) },
];

const GROUPS = [
  { label: "Group", cell: (one) => one.name },
  { label: "Kind", cell: (one) => one.kind },
  { label: "Grade", cell: (one) => one.grade },
  { label: "Ready", num: true, cell: (one) => number(one.ready) },
  { label: "There", num: true, cell: (one) => number(one.actual) },
  { label: "Wanted", num: true, cell: (one) => number(one.desired) },
  { label: "Bounds", cell: (one) => `${one.least} to ${one.most}` },
  { label: "Sized by", cell: (one) => one.sized_by },
];

export function mount(_parts, host) {
  const region = h("div");
  host.append(region);
  const timer = setInterval(() => dispatchEvent(new HashChangeEvent("hashchange")), 5000); // what is in flight is no event
  return {
    title: () => "Fleet",
    twin: () => path(["fleet"]),
    wants: (event) => event.kind === "fleet" || event.kind === "point",
    close: () => clearInterval(timer),
    async load(params, signal) {
      const fleet = await get(path(["fleet"]), signal);
      const order = params.get("sort") ?? "id";
      const engines = ordered(fleet.groups.flatMap((group) => group.engines), order, VALUES);
      const page = pageOf(params);
      fill(region, h("p", { class: "soft" }, fleet.seen_at ? ["As the controller saw it at ", when(fleet.seen_at)] : "No controller has written of a fleet yet."),
        table({ caption: "Groups", columns: GROUPS, rows: fleet.groups }),
        h("h2", {}, "Engines"),
        table({ caption: "Engines", columns: ENGINES, rows: engines.slice((page - 1) * SIZE, page * SIZE), order, page, size: SIZE, total: engines.length }));
    },
  };
}
