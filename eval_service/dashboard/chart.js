// A chart of values over steps: uPlot draws the lines, we draw error bars, gaps, alarms and the best point upon it.
import { fill, h, number } from "./dom.js";
import uPlot from "./vendor/uPlot.esm.js";

const DASHES = [[], [8, 4], [3, 3], [10, 3, 3, 3]];
const COLORS = 8;

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/**
 * A chart in a host. `draw(series)` shows series of {label, points}; a point is {step, value?, low?, high?, note?,
 * alarm?, best?, href?}: without a value it is a gap, and its note says why.
 */
export class Chart {
  constructor({ label, height = 300, share = null }) {
    this.label = label;
    this.height = height;
    this.share = share;
    this.series = [];
    this.at = null;
    this.step = null; // what is read out, also when the chart is drawn anew
    this.plot = null;
    this.box = h("div", { class: "plot", "aria-hidden": "true" });
    this.readout = h("p", { class: "readout soft", "aria-live": "polite" });
    this.keys = h("ul", { class: "keys" });
    this.node = h("div", { class: "chart" }, this.keys,
      h("div", { tabindex: 0, role: "group", "aria-label": `Chart: ${label}. Arrow keys go from step to step, Enter opens the point.`, onkeydown: (event) => this.onKey(event) }, this.box),
      this.readout);
    this.onTheme = () => this.make();
    addEventListener("themechange", this.onTheme);
    this.sizes = new ResizeObserver(() => this.fit());
    this.sizes.observe(this.node);
  }

  close() {
    removeEventListener("themechange", this.onTheme);
    this.sizes.disconnect();
    this.plot?.destroy();
  }

  draw(series) {
    this.series = series.map((one) => ({ ...one, by: new Map(one.points.map((point) => [point.step, point])) }));
    this.steps = [...new Set(series.flatMap((one) => one.points.map((point) => point.step)))].sort((a, b) => a - b);
    fill(this.keys, series.map((one, index) => h("li", {}, h("span", { class: `key c${index % COLORS}` }), one.href ? h("a", { href: one.href }, one.label) : one.label)));
    this.make();
  }

  make() {
    this.plot?.destroy();
    this.plot = null;
    this.at = undefined;
    if (!this.steps?.length) {
      fill(this.box, h("p", {}, "No points yet."));
      return;
    }
    fill(this.box);
    // `undefined` is a step that a series has not, which is no gap; `null` is one, and breaks the line.
    const columns = this.series.map((one) => this.steps.map((step) => (one.by.has(step) ? (one.by.get(step).value ?? null) : undefined)));
    this.plot = new uPlot(this.options(this.step), [this.steps, ...columns], this.box);
  }

  options(step) {
    const axis = { stroke: color("--soft"), grid: { stroke: color("--grid"), width: 1 }, ticks: { stroke: color("--grid") }, font: "12px system-ui, sans-serif" };
    return {
      width: Math.max(240, this.box.clientWidth),
      height: this.height,
      legend: { show: false },
      cursor: { sync: this.share ? { key: this.share } : undefined, drag: { x: true, y: false } },
      scales: { x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) }, y: { range: () => this.bounds() } },
      axes: [{ ...axis, label: "step", labelSize: 20, stroke: color("--soft") }, { ...axis, size: 62 }],
      series: [{}, ...this.series.map((_, index) => this.line(index))],
      hooks: { ready: [() => this.go(this.steps.indexOf(step))], draw: [(plot) => this.over(plot)], setCursor: [(plot) => this.point(plot.cursor.idx)] },
    };
  }

  line(index) {
    const stroke = color(`--s${index % COLORS}`);
    return { stroke, width: 2, dash: DASHES[Math.floor(index / COLORS) % DASHES.length], points: { show: this.steps.length <= 200, size: 6, fill: stroke } };
  }

  bounds() {
    const values = this.series.flatMap((one) => one.points.flatMap((point) => [point.value, point.low, point.high])).filter((value) => value !== null && value !== undefined);
    if (!values.length) return [0, 1];
    const low = values.reduce((a, b) => Math.min(a, b));
    const high = values.reduce((a, b) => Math.max(a, b));
    const room = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
    return [low - 1.6 * room, high + room];
  }

  over(plot) {
    const { ctx } = plot;
    const dot = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(plot.bbox.left - 8 * dot, plot.bbox.top - 8 * dot, plot.bbox.width + 16 * dot, plot.bbox.height + 16 * dot);
    ctx.clip();
    this.series.forEach((one, index) => {
      const paint = color(`--s${index % COLORS}`);
      for (const point of one.points) {
        const x = plot.valToPos(point.step, "x", true);
        if (point.value === null || point.value === undefined) {
          if (point.gap) cross(ctx, x, plot.bbox.top + plot.bbox.height - (7 + 9 * index) * dot, 4 * dot, color("--bad"));
          continue;
        }
        const y = plot.valToPos(point.value, "y", true);
        if (point.low !== null && point.low !== undefined) bar(ctx, x, plot.valToPos(point.low, "y", true), plot.valToPos(point.high, "y", true), 3 * dot, paint);
        if (point.alarm) sign(ctx, x, y, 9 * dot, color("--warn"), "!");
        if (point.best) sign(ctx, x, y, 9 * dot, color("--good"), "★");
      }
    });
    ctx.restore();
  }

  point(index) {
    if (index === this.at) return;
    this.at = index ?? null;
    const step = this.at === null ? null : this.steps[this.at];
    this.step = step;
    const told = step === null ? [] : this.series.filter((one) => one.by.has(step)).map((one) => told_of(one, one.by.get(step)));
    fill(this.readout, step === null ? "" : [`Step ${step.toLocaleString("en")}: `, told.flatMap((one, index) => (index ? ["; ", one] : [one]))]);
  }

  go(index) {
    if (index < 0) return;
    this.plot.setCursor({ left: this.plot.valToPos(this.steps[index], "x"), top: this.height / 3 });
    this.point(index);
  }

  onKey(event) {
    const way = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (way !== undefined && this.steps?.length) {
      event.preventDefault();
      const to = (this.at ?? (way > 0 ? -1 : this.steps.length)) + way;
      this.go(Math.max(0, Math.min(this.steps.length - 1, to)));
    } else if (event.key === "Enter" && event.target === event.currentTarget) {
      this.readout.querySelector("a")?.click();
    }
  }

  fit() {
    const width = Math.max(240, this.box.clientWidth);
    if (this.plot && Math.abs(this.plot.width - width) > 1) this.plot.setSize({ width, height: this.height });
  }
}

function told_of(one, point) {
  const span = point.low === null || point.low === undefined ? "" : ` [${number(point.low)}, ${number(point.high)}]`;
  const value = point.value === null || point.value === undefined ? "no value" : `${number(point.value)}${span}`;
  const words = `${one.label}: ${value}${point.note ? ` (${point.note})` : ""}`;
  return point.href ? h("a", { href: point.href }, words) : words;
}

function bar(ctx, x, low, high, cap, paint) {
  ctx.strokeStyle = paint;
  ctx.lineWidth = devicePixelRatio;
  ctx.beginPath();
  ctx.moveTo(x, low);
  ctx.lineTo(x, high);
  ctx.moveTo(x - cap, low);
  ctx.lineTo(x + cap, low);
  ctx.moveTo(x - cap, high);
  ctx.lineTo(x + cap, high);
  ctx.stroke();
}

function cross(ctx, x, y, size, paint) {
  ctx.strokeStyle = paint;
  ctx.lineWidth = 2 * devicePixelRatio;
  ctx.beginPath();
  ctx.moveTo(x - size, y - size);
  ctx.lineTo(x + size, y + size);
  ctx.moveTo(x - size, y + size);
  ctx.lineTo(x + size, y - size);
  ctx.stroke();
}

function sign(ctx, x, y, away, paint, text) {
  ctx.fillStyle = paint;
  ctx.font = `bold ${15 * devicePixelRatio}px system-ui, sans-serif`;
  ctx.textAlign = "center";
  ctx.textBaseline = "bottom";
  ctx.fillText(text, x, y - away);
}
