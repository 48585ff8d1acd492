// Where we are: everything that a page shows is in the URL, after `#`.

/** The parts of the path, and the parameters. */
export function here() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?", 2);
  const parts = path.split("/").filter(Boolean).map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  });
  return { parts: parts.length ? parts : ["runs"], params: new URLSearchParams(query ?? "") };
}

/** A link to a place; parameters may be lists, and those without a value are left out. */
export function link(parts, params = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    for (const one of [value].flat()) if (one !== null && one !== undefined && one !== "") query.append(name, one);
  }
  const path = parts.map(encodeURIComponent).join("/");
  return `#/${path}${query.size ? `?${query}` : ""}`;
}

/** A link to this page with some parameters changed; the first page again, unless that is what changes. */
export function changed(changes) {
  const { parts, params } = here();
  const now = {};
  for (const name of new Set(params.keys())) now[name] = params.getAll(name);
  return link(parts, { ...now, page: null, ...changes });
}

/** Go there without a new entry of the history: for what is typed. */
export function become(changes) {
  const target = changed(changes);
  if (target !== location.hash) {
    history.replaceState(null, "", target);
    dispatchEvent(new HashChangeEvent("hashchange"));
  }
}
