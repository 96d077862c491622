// The page's life: it follows /v1/live, asks for a key where one is needed, and says when it hears nothing.

import * as chat from "./chat.js";
import { byId, figure, shown } from "./dom.js";
import { show } from "./figures.js";
import * as promotion from "./promotion.js";
import { ask, dataOf, hasKey, refusal, setKey } from "./stream.js";

const RETRY = 2000, QUIET = 5000, DEAD = 15000; // milliseconds

let heard = performance.now();
let following = null; // the AbortController of the stream
let asking = null; // the promise of another key

function askForKey() {
  asking ??= new Promise((resolve) => {
    const form = byId("key");
    shown(byId("key-wrong"), hasKey());
    shown(form, true);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      setKey(byId("key-value").value.trim());
      byId("key-value").value = "";
      shown(form, false);
      asking = null;
      resolve();
    }, { once: true });
  });
  return asking;
}

function say(text, how) {
  figure("state", text);
  byId("state").className = how;
}

async function follow() {
  following = new AbortController();
  heard = performance.now();
  const response = await ask("v1/live", { signal: following.signal });
  if (response.status === 401) {
    say("needs a key", "lost");
    await askForKey();
    return follow();
  }
  if (!response.ok) throw new Error(await refusal(response));
  for await (const data of dataOf(response)) {
    heard = performance.now();
    const told = JSON.parse(data);
    show(told);
    chat.know(told);
    promotion.know(told);
    say(told.state, told.state === "ready" ? "live" : "");
  }
}

async function followForEver() {
  for (;;) {
    try {
      await follow();
      say("the server has ended the figures", "lost");
    } catch (error) {
      say(error instanceof TypeError || error.name === "AbortError" ? "no connection" : error.message, "lost");
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY));
  }
}

setInterval(() => {
  const quiet = performance.now() - heard;
  if (asking || quiet < QUIET) return;
  say(`nothing heard for ${Math.round(quiet / 1000)} s`, "lost");
  if (quiet > DEAD) following.abort();
}, 1000);

chat.start(askForKey);
promotion.start();
followForEver();
