// The columns of a table of points.
import { h, number, seconds, state, when } from "./dom.js";
import { link } from "./place.js";

export function columnsOf({ run }) {
  return [
    { label: "Step", sort: "step", num: true, cell: (point) => h("a", { href: link(["point", point.id]) }, number(point.step)) },
    run ? { label: "Run", text: true, cell: (point) => h("a", { href: link(["run", point.run], { suite: point.suite }) }, point.run) } : null,
    { label: "Suite", cell: (point) => point.suite },
    { label: "State", cell: (point) => [state(point.state, point.reason), point.superseded ? h("span", { class: "soft" }, " (superseded)") : null] },
    { label: "Score", sort: "score", num: true, cell: (point) => number(point.score) },
    { label: "95% interval", num: true, cell: interval },
    { label: "Lag", sort: "lag_steps", num: true, cell: (point) => number(point.lag_steps) },
    { label: "Took", num: true, cell: (point) => seconds(point.timings.duration_s) },
    { label: "Attempts", num: true, cell: (point) => number(point.attempts) },
    { label: "Alarms", cell: (point) => (point.alarms.length ? h("span", { class: "warn" }, point.alarms.map((alarm) => alarm.kind).join(", ")) : "") },
    { label: "Asked for", sort: "created_at", cell: (point) => when(point.created_at) },
    { label: "Ended", sort: "ended_at", cell: (point) => when(point.ended_at) },
  ].filter(Boolean);
}

function interval(point) {
  const metric = point.metrics[point.headline];
  return metric && metric.low !== null ? `${number(metric.low)} to ${number(metric.high)}` : "–";
}
