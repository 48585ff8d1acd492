// Elements out of text. Nothing here, and nothing anywhere in the dashboard, makes markup of a string.

/** An element: props are attributes, `on*` listeners, `class`; children are nodes or text, null ones are left out. */
export function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "selected") node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  add(node, children);
  return node;
}

function add(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
}

/** Put other children into a region; what had the focus there has it afterwards, what was opened there stays open. */
export function fill(region, ...children) {
  const key = keyOf(region.contains(document.activeElement) ? document.activeElement : null);
  const open = new Map([...region.querySelectorAll("details[data-key]")].map((node) => [node.dataset.key, node.open]));
  region.replaceChildren();
  add(region, children);
  for (const node of region.querySelectorAll("details[data-key]")) node.open = open.get(node.dataset.key) ?? node.open;
  if (key) [...region.querySelectorAll("a, button, input, select, summary, [tabindex]")].find((node) => keyOf(node) === key)?.focus();
}

function keyOf(node) {
  if (!node) return null;
  return node.id || node.dataset.key || node.getAttribute("href") || node.closest("[data-key]")?.dataset.key || null;
}

export const NONE = "–";

export function number(value, digits = 3) {
  if (value === null || value === undefined) return NONE;
  return Number.isInteger(value) ? value.toLocaleString("en") : value.toFixed(digits);
}

export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  if (value < 7200) return `${(value / 60).toFixed(1)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

export function when(at) {
  if (at === null || at === undefined) return NONE;
  const date = new Date(at * 1000);
  const text = date.toISOString().slice(0, 19).replace("T", " ");
  return h("time", { datetime: date.toISOString() }, `${text} UTC`);
}

export function state(name, reason = null) {
  return h("span", {}, h("span", { class: `state ${name}` }, name), reason ? `: ${reason}` : null);
}

export function facts(pairs) {
  return h("dl", {}, pairs.filter(Boolean).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value ?? NONE)]));
}
