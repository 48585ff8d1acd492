// The service's token, where it wants one: asked for once, kept in the storage of this tab's session, sent to no other host.

const KEY = "evalfleet-token";
let wanted = false;

/** The headers of a request, with the token if there is one. */
export function headers(more = {}) {
  const token = sessionStorage.getItem(KEY);
  return token ? { ...more, authorization: `Bearer ${token}` } : more;
}

export function known() {
  return sessionStorage.getItem(KEY) !== null;
}

/** Whether the service wants a token that it has not been given. */
export function isWanted() {
  return wanted;
}

/** The service has refused: what is kept, if anything, is not its token. */
export function refused() {
  sessionStorage.removeItem(KEY);
  if (wanted) return;
  wanted = true;
  dispatchEvent(new Event("tokenwanted"));
}

/** Shows the form when a token is wanted; with one the page is loaded anew. */
export function ask(form) {
  const show = () => {
    form.hidden = false;
    form.elements.token.focus();
  };
  addEventListener("tokenwanted", show);
  form.elements.token.addEventListener("input", () => form.elements.token.setCustomValidity(""));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const given = form.elements.token.value.trim();
    const plain = /^[\x21-\x7e]+$/.test(given); // no header holds anything else, and none would ever be sent
    form.elements.token.setCustomValidity(plain ? "" : "a token has letters, digits and signs alone");
    if (!form.reportValidity()) return;
    sessionStorage.setItem(KEY, given);
    location.reload();
  });
  if (wanted) show();
}

/** A link to JSON brings no token by itself: it is fetched, and shown as a file of this tab's. */
export function openWithToken(event) {
  if (!known()) return;
  event.preventDefault();
  fetch(event.currentTarget.href, { headers: headers() })
    .then((answer) => answer.blob())
    .then((blob) => location.assign(URL.createObjectURL(blob)));
}
