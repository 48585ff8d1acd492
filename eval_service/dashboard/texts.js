// Texts of samples: shortened, searched, and two of them beside each other.
import { h } from "./dom.js";

export function short(text, length = 160) {
  const line = text.replace(/\s+/g, " ").trim();
  return line.length > length ? `${line.slice(0, length)}…` : line;
}

/** A text with what was searched for marked. */
export function marked(text, searched) {
  if (!searched) return [text];
  const found = [];
  const low = text.toLowerCase();
  const word = searched.toLowerCase();
  if (low.length !== text.length) return [text]; // places would not agree
  let at = 0;
  for (let next = low.indexOf(word); next >= 0 && found.length < 400; next = low.indexOf(word, at)) {
    found.push(text.slice(at, next), h("mark", {}, text.slice(next, next + word.length)));
    at = next + word.length;
  }
  return [...found, text.slice(at)];
}

/** Two texts, each with the part marked in which it differs from the other. */
export function differing(a, b) {
  const most = Math.min(a.length, b.length);
  let start = 0;
  while (start < most && a[start] === b[start]) start += 1;
  let end = 0;
  while (end < most - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end += 1;
  const split = (text) => [text.slice(0, start), start < text.length - end ? h("mark", {}, text.slice(start, text.length - end)) : "", text.slice(text.length - end)];
  return [split(a), split(b)];
}
