// The service's API: JSON from the host that served this page, and from no other.

import { headers, refused } from "./token.js";

export class Fault extends Error {}

/** The path with its parameters, as a link relative to the page. */
export function path(parts, params = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    for (const one of [value].flat()) if (one !== null && one !== undefined && one !== "") query.append(name, one);
  }
  return `${parts.map(encodeURIComponent).join("/")}${query.size ? `?${query}` : ""}`;
}

/** The JSON at a path. Throws a Fault with the service's own words. */
export async function get(url, signal) {
  let response;
  try {
    response = await fetch(url, { signal, headers: headers({ accept: "application/json" }) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Fault("The service can't be reached.");
  }
  const body = await response.json().catch(() => null);
  if (response.ok) return body;
  if (response.status === 401) refused();
  const told = body?.error;
  throw new Fault(told ? `${told.message}${told.hint ? ` (${told.hint})` : ""}` : `The service answered ${response.status}.`);
}
