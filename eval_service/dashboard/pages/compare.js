// Two points on the same prompts: what changed first of all.
import { get, path } from "../api.js";
import { NONE, facts, fill, h, number } from "../dom.js";
import { link } from "../place.js";
import { pageOf, table } from "../table.js";
import { differing, short } from "../texts.js";

const SIZE = 25;

export function mount([, a, b], host) {
  const region = h("div");
  host.append(region);
  let found = null;
  let asked = {};
  return {
    title: () => (found ? `${side(found.a)} against ${side(found.b)}` : "Diff"),
    twin: () => path(["points", a, "compare", b], asked),
    wants: () => false,
    async load(params, signal) {
      asked = { dataset: params.get("dataset"), limit: SIZE, offset: (pageOf(params) - 1) * SIZE };
      found = await get(path(["points", a, "compare", b], asked), signal);
      fill(region, told(found), h("h2", {}, "Prompts whose score changed"), flips(found, pageOf(params)));
    },
  };
}

function side(one) {
  return `${one.run} step ${number(one.step)}`;
}

function told(found) {
  const both = [found.a, found.b].map((one) => h("a", { href: link(["point", one.point]) }, side(one)));
  const interval = found.low === null ? "" : ` (95%: ${number(found.low)} to ${number(found.high)})`;
  const look = { better: "good", worse: "bad" }[found.verdict] ?? "soft";
  return facts([
    ["A", [both[0], `, mean ${number(found.a.mean)}`]],
    ["B", [both[1], `, mean ${number(found.b.mean)}`, ", ", h("a", { href: link(["compare", found.b.point, found.a.point]) }, "the other way round")]],
    ["B is", h("strong", { class: look }, found.verdict)],
    ["B minus A", `${number(found.difference)}${interval}, p ${likely(found.p_value)} (${found.method ?? "too few prompts"})`],
    ["Prompts", `${number(found.prompts)} scored by both; ${number(found.improved)} improved, ${number(found.worsened)} worsened`],
  ]);
}

function likely(p) {
  return p === null ? NONE : p < 0.0001 ? "< 0.0001" : number(p, 4);
}

function flips(found, page) {
  const better = (flip) => (found.direction === "max") === flip.score_b > flip.score_a;
  return table({
    caption: "Flips", rows: found.flips, page, size: SIZE, total: found.total, empty: "No score changed.",
    columns: [
      { label: "Prompt", num: true, cell: (flip) => number(flip.prompt_index) },
      { label: "Dataset", cell: (flip) => flip.dataset },
      { label: "Score", cell: (flip) => h("span", { class: `state ${better(flip) ? "done" : "failed"}` }, `${number(flip.score_a)} → ${number(flip.score_b)} ${better(flip) ? "improved" : "worsened"}`) },
      { label: "What was asked, A and B", text: true, cell: texts },
    ],
  });
}

function texts(flip) {
  const [a, b] = differing(flip.a.output, flip.b.output);
  return [
    h("div", {}, short(flip.a.prompt, 300)),
    h("div", { class: "sides" }, h("div", {}, h("span", { class: "soft" }, "A"), h("pre", {}, a)), h("div", {}, h("span", { class: "soft" }, "B"), h("pre", {}, b))),
    h("div", { class: "soft" }, `Expected: ${short(flip.a.answer, 300)}`),
  ];
}
