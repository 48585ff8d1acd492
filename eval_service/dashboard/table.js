// Tables whose order and page are links, so that they can be shared and used with a keyboard.
import { h } from "./dom.js";
import { changed } from "./place.js";

/**
 * columns: {label, cell(row), sort?: the name to sort by, num?, text?}; order: the sort that is in force, "-" first
 * for downwards; total and size: for the links to other pages.
 */
export function table({ caption, columns, rows, order = null, page = 1, size = null, total = null, empty = "None." }) {
  const head = h("tr", {}, columns.map((column) => heading(column, order)));
  const body = rows.map((row) => h("tr", {}, columns.map((column) => h("td", { class: kind(column) }, column.cell(row)))));
  if (!rows.length) body.push(h("tr", {}, h("td", { colspan: columns.length, class: "soft" }, empty)));
  return [
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption }, h("table", {}, h("caption", {}, caption), h("thead", {}, head), h("tbody", {}, body))),
    size === null || total === null ? null : paging(caption, page, size, total),
  ];
}

/** A link to this page with some parameters changed, from what they are when it is followed. */
export function turn(changes, key, ...children) {
  const again = (event) => event.currentTarget.setAttribute("href", changed(changes));
  return h("a", { href: changed(changes), "data-key": key, onclick: again }, children);
}

function kind(column) {
  return column.num ? "num" : column.text ? "text" : null;
}

function heading(column, order) {
  if (!column.sort) return h("th", { scope: "col", class: kind(column) }, column.label);
  const up = order === column.sort;
  const down = order === `-${column.sort}`;
  const next = down || (!up && !column.num) ? column.sort : `-${column.sort}`; // numbers: the largest first
  const sorted = up ? "ascending" : down ? "descending" : "none";
  return h("th", { scope: "col", class: kind(column), "aria-sort": sorted }, turn({ sort: next }, `sort-${column.sort}`, column.label, up ? " ▲" : down ? " ▼" : ""));
}

function paging(caption, page, size, total) {
  const last = Math.max(1, Math.ceil(total / size));
  const from = total ? (page - 1) * size + 1 : 0;
  const to = Math.min(total, page * size);
  const go = (label, target, there) => (there ? turn({ page: target }, `page-${label}`, label) : h("span", { class: "soft" }, label));
  return h("nav", { class: "pages", "aria-label": `Pages of: ${caption}` },
    go("First", null, page > 1), go("Previous", page - 1, page > 1),
    h("span", { class: "range" }, `${from.toLocaleString("en")}–${to.toLocaleString("en")} of ${total.toLocaleString("en")}`),
    go("Next", page + 1, page < last), go("Last", last, page < last));
}

export function pageOf(params) {
  return Math.max(1, Math.floor(Number(params.get("page"))) || 1);
}

/** Rows that are all here already (runs, engines) in an order; what has no value comes last. */
export function ordered(rows, order, values) {
  const name = (order ?? "").replace(/^-/, "");
  const value = values[name];
  if (!value) return rows;
  const sign = order.startsWith("-") ? -1 : 1;
  return [...rows].sort((a, b) => {
    const [x, y] = [value(a) ?? null, value(b) ?? null];
    if (x === null || y === null) return (x === null) - (y === null);
    return sign * (x < y ? -1 : x > y ? 1 : 0);
  });
}
