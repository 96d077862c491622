// The operator's buttons: another drafter becomes active, the canary ends, the last promotion is taken back. Without the
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
  const { others = [], canary = null, previous = null } = promotion ?? {};
  const back = canary ? [button("rollback", canary.drafter, `End the canary ${canary.drafter}`)]
    : previous === null ? [] : [button("rollback", previous, `Roll back to ${previous}`)];
  place.replaceChildren(...others.map((name) => button("promote", name, `Promote ${name}`)), ...back);
}

function button(action, name, text) {
  const made = element("button", { text });
  made.type = "button";
  made.dataset.action = action;
  made.dataset.drafter = name;
  made.addEventListener("click", () => act(action, name));
  return made;
}

async function act(action, name) {
  waiting = null;
  say("");
  for (const made of byId("promotion").children) made.disabled = true;
  try {
    const hadKey = hasAdminKey();
    const how = action === "rollback" ? { method: "DELETE" }
      : { method: "PUT", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ drafter: name }) };
    const response = await askAsOperator("v1/drafters/active", how);
    if (response.ok) return;
    const { error } = await response.json();
    const wantsKey = WANTS_A_KEY.includes(error.code);
    if (wantsKey) waiting = [action, name];
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
