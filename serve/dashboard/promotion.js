// The operator's buttons: another drafter becomes the default, or the last promotion is taken back. Without the
// operator's key they ask for it, where the server wants one; what it refuses is said in its own words.

import { byId, element, setText, shown } from "./dom.js";
import { askAsOperator, hasAdminKey, setAdminKey } from "./stream.js";

const WANTS_A_KEY = ["invalid_api_key", "admin_key_required"];

let waiting = null; // what is done once there is a key

export function start() {
  byId("admin-key").addEventListener("submit", (event) => {
    event.preventDefault();
    setAdminKey(byId("admin-key-value").value.trim());
    byId("admin-key-value").value = "";
    shown(byId("admin-key"), false);
    if (waiting) act(...waiting);
  });
}

export function know({ promotion }) {
  const place = byId("promotion"), wanted = JSON.stringify(promotion);
  if (place.dataset.told === wanted) return;
  place.dataset.told = wanted;
  const { others = [], previous = null } = promotion ?? {};
  place.replaceChildren(
    ...others.map((name) => button("promote", name, `Promote ${name}`, { drafter: name })),
    ...(previous === null ? [] : [button("rollback", previous, `Roll back to ${previous}`, {})]),
  );
}

function button(action, name, text, body) {
  const made = element("button", { text });
  made.type = "button";
  made.dataset.action = action;
  made.dataset.drafter = name;
  made.addEventListener("click", () => act(action, body));
  return made;
}

async function act(action, body) {
  waiting = null;
  say("");
  for (const made of byId("promotion").children) made.disabled = true;
  try {
    const hadKey = hasAdminKey();
    const response = await askAsOperator(`v1/engine/drafters/${action}`, {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
    });
    if (response.ok) return;
    const { error } = await response.json();
    const wantsKey = WANTS_A_KEY.includes(error.code);
    if (wantsKey) waiting = [action, body];
    shown(byId("admin-key"), wantsKey);
    if (hadKey || !wantsKey) say(error.message);
  } catch (error) {
    say(error instanceof TypeError ? "no connection" : error.message);
  } finally {
    for (const made of byId("promotion").children) made.disabled = false;
  }
}

function say(text) {
  setText(byId("promotion-error"), text);
  shown(byId("promotion-error"), Boolean(text));
}
