// A run: its curve, with other metrics and runs laid over it, its lag, its gaps and its points.
import { get, path } from "../api.js";
import { Chart } from "../chart.js";
import { NONE, facts, fill, h, number, state, when } from "../dom.js";
import { become, link } from "../place.js";
import { columnsOf } from "../pointtable.js";
import { pageOf, table, turn } from "../table.js";

const SIZE = 25;
const MOST_RUNS = 8;
const MOST_GAPS = 40;
const MOST_BESIDES = 40;
const MOST_STEPS = 100;
const MOST_IDLE = 8; // answers in a row that have compared nothing more
const ENDED_WITHOUT = ["skipped", "failed", "cancelled"];

export function mount([, run], host) {
  const curve = new Chart({ label: "score by step", share: "run" });
  const lags = new Chart({ label: "lag by step", height: 160, share: "run" });
  const [about, choice, besides, gaps, points] = ["div", "form", "div", "div", "div"].map((tag) => h(tag));
  choice.addEventListener("submit", (event) => event.preventDefault());
  host.append(about, choice, h("h2", {}, "Curve"), curve.node, h("p", { class: "soft" }, "Bars are 95% intervals. ★ is the best, ! an alarm, and a cross at the bottom a step without a result."), besides, gaps,
    h("h2", {}, "Lag"), h("p", { class: "soft" }, "Steps that the trainer was ahead when the point ended."), lags.node, h("h2", {}, "Points"), points);
  let names = [];
  let asked = { runs: [run], suite: null, metrics: [], against: "before" };
  const curveOf = (name, against, signal) => get(path(["runs", name, "curve"], { suite: asked.suite, metric: asked.metrics, against }), signal);
  // The service compares a few files for each answer, and for one asker at a time: a long run takes several.
  const rest = async (curves, signal) => {
    const [first, ...others] = curves;
    let found = first;
    for (let idle = 0; found.uncompared && idle < MOST_IDLE; ) {
      if (idle) await new Promise((go) => setTimeout(go, 250));
      const more = await curveOf(run, asked.against, signal);
      idle = more.uncompared < found.uncompared ? 0 : idle + 1;
      if (!idle) found = more;
    }
    if (found === first) return;
    curve.draw(seriesOf([found, ...others], asked));
    fill(besides, besidesOf(found));
  };
  return {
    title: () => `Run ${run}`,
    twin: () => path(["runs", run, "curve"], { suite: asked.suite, metric: asked.metrics, against: asked.against }),
    wants: (event) => event.kind === "point" && asked.runs.includes(event.run),
    close: () => [curve, lags].forEach((chart) => chart.close()),
    async load(params, signal) {
      asked = { runs: [run, ...params.getAll("with").filter((name) => name !== run)].slice(0, MOST_RUNS), suite: params.get("suite"), metrics: params.getAll("metric"), against: params.get("against") ?? "before" };
      const order = params.get("sort") ?? "-step";
      const page = pageOf(params);
      const listed = { run, suite: asked.suite, sort: order, limit: SIZE, offset: (page - 1) * SIZE };
      const [view, found, ...curves] = await Promise.all([
        get(path(["runs", run]), signal), get(path(["points"], listed), signal),
        ...asked.runs.map((name) => curveOf(name, name === run ? asked.against : null, signal)),
      ]);
      if (!names.length) names = (await get(path(["runs"]), signal)).map((one) => one.run);
      fill(about, summary(view, curves[0]));
      fill(choice, chooser(run, names, asked, curves[0]));
      curve.draw(seriesOf(curves, asked));
      lags.draw(curves.map((one) => ({ label: one.run, points: one.points.filter((point) => point.lag_steps !== null).map((point) => ({ step: point.step, value: point.lag_steps, href: link(["point", point.id]) })) })));
      fill(gaps, gapsOf(curves[0]));
      fill(points, table({ caption: "Points", columns: columnsOf({ run: false }), rows: found.points, order, page, size: SIZE, total: found.total }));
      fill(besides, besidesOf(curves[0]));
      await rest(curves, signal);
    },
  };
}

/** Each result beside another one, on the prompts of both: the newest, and behind a fold those before it. */
function besidesOf(curve) {
  const told = curve.points.filter((point) => point.beside).reverse();
  const line = (point) => {
    const look = { better: "good", worse: "bad" }[point.beside.verdict] ?? "soft";
    const said = point.beside.said.charAt(0).toUpperCase() + point.beside.said.slice(1);
    return point.beside.difference === null ? `${said}.` : [h("a", { href: link(["compare", point.beside.point, point.id]), class: look }, said), ", on the prompts of both."];
  };
  const older = told.slice(1, 1 + MOST_BESIDES);
  return [
    told.length ? h("p", {}, line(told[0])) : null,
    older.length ? h("details", { "data-key": "besides" }, h("summary", {}, "The results before it, likewise"), h("ul", {}, older.map((point) => h("li", {}, line(point)))),
      told.length > 1 + older.length ? h("p", { class: "soft" }, "Older ones: on the chart, and in this page's JSON.") : null) : null,
    curve.uncompared ? h("p", { class: "soft" }, `${number(curve.uncompared)} results are not compared yet.`) : null,
  ];
}

function summary(view, curve) {
  const best = curve.points.find((point) => point.id === curve.best);
  const counts = Object.entries(view.points).map(([name, n]) => [h("a", { href: link(["points"], { run: view.run, state: name }) }, `${name} ${n}`), " "]);
  const lag = view.step === null || view.scored_step === null ? NONE : number(Math.max(0, view.step - view.scored_step));
  return facts([
    ["State", state(view.state)],
    ["Trainer's step", [number(view.step), view.spec.num_steps ? ` of ${number(view.spec.num_steps)}` : "", view.progress_at ? [", told ", when(view.progress_at)] : null]],
    ["Lag", `${lag} steps behind`],
    ["Best", best ? h("a", { href: link(["point", best.id]) }, `step ${number(best.step)}`, best.values[curve.headline] ? `: ${number(best.values[curve.headline].value)}` : "") : NONE],
    ["Points", counts.length ? counts : NONE],
    ["Drains", h("a", { href: link(["drains"], { run: view.run }) }, "of this run")],
  ]);
}

function chooser(run, names, asked, curve) {
  const suites = h("select", { id: "run-suite", onchange: () => become({ suite: suites.value, metric: null, page: null }) }, curve.suites.map((name) => h("option", { value: name, selected: name === curve.suite }, name)));
  const shown = asked.metrics.length ? asked.metrics : [curve.headline];
  const tick = (name, on) => become({ metric: on ? [...shown, name] : shown.filter((one) => one !== name) });
  const box = (name, index) => h("label", {}, h("input", { type: "checkbox", id: `metric-${index}`, checked: shown.includes(name), onchange: (event) => tick(name, event.target.checked) }), ` ${name}`);
  const results = curve.points.filter((point) => point.state === "done").map((point) => String(point.step)).slice(-MOST_STEPS).reverse();
  const sides = [["before", "the one before it"], ["best", "the best"], ...[...new Set([/^\d+$/.test(asked.against) ? [asked.against] : [], results].flat())].map((step) => [step, `step ${number(Number(step))}`])];
  const against = h("select", { id: "run-against", onchange: () => become({ against: against.value }) }, sides.map(([value, text]) => h("option", { value, selected: value === asked.against }, text)));
  const others = names.filter((name) => !asked.runs.includes(name));
  const add = h("select", { id: "run-add", onchange: () => add.value && become({ with: [...asked.runs.slice(1), add.value] }) }, h("option", { value: "" }, "a run…"), others.map((name) => h("option", { value: name }, name)));
  const rid = asked.runs.slice(1).map((name) => [" ", turn({ with: asked.runs.slice(1).filter((one) => one !== name) }, `rid-${name}`, `without ${name}`)]);
  return [
    h("label", { for: "run-suite" }, "Suite"), suites,
    h("label", { for: "run-against" }, "Each result beside"), against,
    curve.metrics.length ? h("fieldset", {}, h("legend", {}, "Metrics"), curve.metrics.map(box)) : null,
    others.length && asked.runs.length < MOST_RUNS ? [h("label", { for: "run-add" }, "Lay over it"), add] : null,
    h("span", {}, rid),
  ];
}

function seriesOf(curves, asked) {
  return curves.flatMap((curve) => {
    const metrics = asked.metrics.length ? asked.metrics : [curve.headline];
    return metrics.map((name) => ({
      label: `${curve.run} ${curve.suite}/${name ?? "score"}`,
      href: link(["run", curve.run], { suite: curve.suite }),
      points: curve.points.map((point) => onCurve(curve, point, name)),
    }));
  });
}

function onCurve(curve, point, name) {
  const span = point.values[name] ?? {};
  const gap = ENDED_WITHOUT.includes(point.state);
  const notes = [...point.alarms, point.id === curve.best ? "best" : null, point.beside && name === curve.headline ? point.beside.said : null, point.state === "done" ? null : `${point.state}${point.reason ? `: ${point.reason}` : ""}`];
  return { step: point.step, ...span, gap, alarm: point.alarms.length > 0, best: point.id === curve.best && name === curve.headline, note: notes.filter(Boolean).join(", "), href: link(["point", point.id]) };
}

function gapsOf(curve) {
  const found = curve.points.filter((point) => ENDED_WITHOUT.includes(point.state));
  if (!found.length) return h("p", {}, "No gaps.");
  const counts = new Map();
  for (const point of found) counts.set(`${point.state}: ${point.reason}`, [...(counts.get(`${point.state}: ${point.reason}`) ?? []), point]);
  return h("details", { "data-key": "gaps", open: found.length <= 8 }, h("summary", {}, `${found.length} gaps`),
    h("ul", {}, [...counts].map(([why, of]) => h("li", {}, h("strong", { class: "warn" }, why), ` (${of.length}), at step `,
      of.slice(0, MOST_GAPS).flatMap((point, index) => [index ? ", " : "", h("a", { href: link(["point", point.id]) }, number(point.step))]), of.length > MOST_GAPS ? ", …" : ""))));
}
