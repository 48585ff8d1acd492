// A point: what came out, what it took, what went wrong on the way, and its samples.
import { get, path } from "../api.js";
import { NONE, facts, fill, h, number, seconds, state, when } from "../dom.js";
import { become, link } from "../place.js";
import { pageOf, table } from "../table.js";
import { marked, short } from "../texts.js";

const SIZE = 50;
const KINDS = ["wrong", "errored", "truncated", "empty", "unparsed"];
const STAGES = [["stall_s", "Trainer waited"], ["export_s", "Export"], ["canary_s", "Canary"], ["queue_s", "Queue"], ["pin_s", "Pin"], ["generate_s", "Generate"], ["score_s", "Score"]];

export function mount([, id], host) {
  const [about, results, attempts, found] = ["div", "div", "div", "div"].map((tag) => h(tag));
  const boxes = KINDS.map((name) => h("input", { type: "checkbox", id: `which-${name}`, value: name, onchange: () => become({ which: boxes.filter((box) => box.checked).map((box) => box.value), page: null }) }));
  let typing = null;
  const typed = () => {
    clearTimeout(typing);
    typing = setTimeout(() => {
      typing = null;
      become({ search: search.value, page: null });
    }, 80);
  };
  const search = h("input", { type: "search", id: "samples-search", maxlength: 1000, oninput: typed });
  const filter = h("form", { role: "search", onsubmit: (event) => event.preventDefault() },
    h("fieldset", {}, h("legend", {}, "Only those that are (any of)"), boxes.map((box, index) => h("label", {}, box, ` ${KINDS[index]}`))),
    h("label", { for: "samples-search" }, "Text has"), search);
  host.append(about, results, h("h2", {}, "Attempts"), attempts, h("h2", {}, "Samples"), filter, found);
  let point = null;
  let version = null;
  let asked = {};
  return {
    title: () => (point ? `${point.run}, step ${number(point.step)}, ${point.suite}` : "Point"),
    twin: () => path(["points", id]),
    wants: (event) => event.kind === "point" && event.point === id,
    close: () => clearTimeout(typing),
    async load(params, signal) {
      asked = { which: params.getAll("which"), search: params.get("search"), sort: params.get("sort") ?? "index", limit: SIZE, offset: (pageOf(params) - 1) * SIZE };
      for (const box of boxes) box.checked = asked.which.includes(box.value);
      if (typing === null && document.activeElement !== search) search.value = asked.search ?? "";
      const view = () => get(path(["points", id]), signal);
      const page = () => (point.samples_path ? get(path(["points", id, "samples"], asked), signal).catch(told) : null);
      let samples;
      if (point?.samples_path) [point, samples] = await Promise.all([view(), page()]);
      else {
        point = await view();
        samples = await page();
      }
      const now = JSON.stringify(point);
      if (now !== version) {
        await show(signal);
        version = now;
      }
      filter.hidden = samples === null;
      if (samples === null) fill(found, h("p", {}, "There are none yet."));
      else fill(found, samples instanceof Error ? h("p", {}, samples.message) : samplesOf(samples, asked, pageOf(params)));
    },
  };

  async function show(signal) {
    fill(about, aboutPoint(point));
    fill(results, metricsOf(point), h("h2", {}, "Timings"), waterfall(point.timings));
    fill(attempts, attemptsOf(point.history));
    if (point.state !== "done") return;
    const curve = await get(path(["runs", point.run, "curve"], { suite: point.suite }), signal);
    const done = curve.points.filter((one) => one.state === "done" && one.id !== id);
    const before = done.filter((one) => one.step < point.step).at(-1);
    const best = done.find((one) => one.id === curve.best);
    const pick = h("select", { id: "diff-with", onchange: () => pick.value && location.assign(link(["compare", pick.value, id])) },
      h("option", { value: "" }, "another step…"), done.map((one) => h("option", { value: one.id }, `step ${one.step}`)));
    about.append(h("p", { class: "tools" }, "Diff against ",
      before ? h("a", { href: link(["compare", before.id, id]) }, `the one before (step ${number(before.step)})`) : null,
      best ? h("a", { href: link(["compare", best.id, id]), "data-key": "best" }, `the best (step ${number(best.step)})`) : null,
      h("label", { for: "diff-with" }, "or"), pick));
  }
}

/** Samples that can't be had (deleted, say) are told in their place: the rest of the point is shown all the same. */
function told(error) {
  if (error.name === "AbortError") throw error;
  return error;
}

function aboutPoint(point) {
  return [
    facts([
      ["Run", h("a", { href: link(["run", point.run], { suite: point.suite }) }, point.run)],
      ["State", [state(point.state, point.reason), point.superseded ? " (a newer point of this step counts instead)" : null]],
      point.detail ? ["Detail", point.detail] : null,
      ["Score", point.score === null ? NONE : `${point.headline ?? "score"} ${number(point.score)}, standard error ${number(point.stderr)}`],
      ["Weights", [point.weight_version ? h("code", {}, point.weight_version) : NONE, point.pin_proof ? `, proof: ${point.pin_proof}` : null]],
      ["Snapshot", [point.snapshot ?? NONE, point.held ? " (held)" : null]],
      ["Lag", `${number(point.lag_steps)} steps`],
      ["Asked for, ended", [when(point.created_at), ", ", when(point.ended_at)]],
    ]),
    point.alarms.length ? [h("h2", {}, "Alarms"), h("ul", {}, point.alarms.map((alarm) => h("li", {}, h("strong", { class: "warn" }, alarm.kind), `: ${alarm.message}`)))] : null,
  ];
}

function metricsOf(point) {
  const rows = Object.entries(point.metrics);
  if (!rows.length) return null;
  return [h("h2", {}, "Metrics"), table({
    caption: "Metrics", rows, columns: [
      { label: "Metric", cell: ([name]) => (name === point.headline ? h("strong", {}, `${name} (headline)`) : name) },
      { label: "Value", num: true, cell: ([, metric]) => number(metric.value) },
      { label: "Standard error", num: true, cell: ([, metric]) => number(metric.stderr) },
      { label: "95% interval", num: true, cell: ([, metric]) => (metric.low === null ? NONE : `${number(metric.low)} to ${number(metric.high)}`) },
      { label: "n", num: true, cell: ([, metric]) => number(metric.n) },
    ],
  })];
}

/** Each stage as long as it took, beginning where the one before it ended. */
function waterfall(timings) {
  const rows = [];
  let at = 0;
  for (const [name, label] of STAGES) {
    const took = timings[name];
    if (took === null) continue;
    rows.push({ label, took, at });
    at += took;
  }
  if (!rows.length) return h("p", {}, "None yet.");
  const bar = (row) => {
    const node = h("div", { class: "bar" });
    node.style.left = `${at ? (100 * row.at) / at : 0}%`;
    node.style.width = `${at ? (100 * row.took) / at : 0}%`;
    return h("div", { class: "track", "aria-hidden": "true" }, node);
  };
  return table({ caption: `Timings: ${seconds(timings.duration_s ?? at)} from being asked for to its end, stage by stage`, rows, columns: [
    { label: "Stage", cell: (row) => row.label }, { label: "Took", num: true, cell: (row) => seconds(row.took) }, { label: "When", cell: bar },
  ] });
}

function attemptsOf(history) {
  return table({ caption: "Attempts", rows: history, empty: "It was not tried yet.", columns: [
    { label: "Number", num: true, cell: (one) => number(one.number) },
    { label: "Outcome", cell: (one) => h("span", { class: `state ${one.outcome === "done" ? "done" : one.outcome ? "failed" : "running"}` }, one.outcome ?? "under way") },
    { label: "Detail", text: true, cell: (one) => one.detail ?? "" },
    { label: "Begun", cell: (one) => when(one.started_at) },
    { label: "Took", num: true, cell: (one) => seconds(one.ended_at === null ? null : one.ended_at - one.started_at) },
    { label: "Engines", text: true, cell: (one) => one.engines.join(", ") },
  ] });
}

function samplesOf(page, asked, number_of_page) {
  return table({
    caption: "Samples", rows: page.samples, order: asked.sort, page: number_of_page, size: SIZE, total: page.total, empty: "No sample is like that.",
    columns: [
      { label: "#", sort: "index", num: true, cell: (one) => number(one.index) },
      { label: "Dataset", cell: (one) => one.dataset },
      { label: "Score", sort: "score", num: true, cell: (one) => h("span", { class: one.score === null ? "warn" : one.score < 1 ? "bad" : "good" }, number(one.score)) },
      { label: "Prompt, output", text: true, cell: (one) => whole(one, asked.search) },
      { label: "Finish", cell: (one) => [one.finish_reason ?? NONE, one.error ? h("div", { class: "bad" }, short(one.error)) : null] },
      { label: "Tokens", sort: "output_tokens", num: true, cell: (one) => number(one.output_tokens) },
      { label: "Latency", sort: "latency_s", num: true, cell: (one) => seconds(one.latency_s) },
    ],
  });
}

function whole(one, searched) {
  const text = (label, value) => [h("div", { class: "soft" }, label), h("pre", {}, marked(value, searched))];
  const body = h("div");
  const show = (event) => {
    if (event.target.open && !body.childNodes.length) fill(body, text("Prompt", one.prompt), text("Output", one.output), text("Expected", one.answer), one.error ? text("Error", one.error) : null, h("div", { class: "soft" }, `engine ${one.engine}, weights ${one.weight_version}, seed ${one.seed ?? NONE}`));
  };
  return h("details", { "data-key": `sample-${one.index}`, ontoggle: show }, h("summary", {}, short(one.prompt, 90), " → ", h("strong", {}, short(one.output, 90) || "(nothing)")), body);
}
