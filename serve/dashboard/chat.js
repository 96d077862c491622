// The chat box: an answer as it comes, token by token, each marked with the draft slot it was accepted in.

import { byId, element, shown } from "./dom.js";
import { count, percent, ratio } from "./numbers.js";
import { ask, dataOf, refusal } from "./stream.js";

let messages = [];
let running = null; // the AbortController of an answer that is coming
let tellsSteps = false; // an upstream may know no such field

// `askForKey` resolves once there is another key.
export function start(askForKey) {
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) answer(byId("question").value, askForKey);
  });
  byId("question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("ask").requestSubmit();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", () => {
    running?.abort();
    messages = [];
    byId("log").replaceChildren();
  });
  byId("token-legend").append(
    ...Array.from({ length: 4 }, (_, slot) => element("span", { className: `token drafted slot-${slot}`, text: ` slot ${slot} ` })),
    " …",
  );
}

export function know({ has_engine: hasEngine }) {
  tellsSteps = hasEngine;
  shown(byId("tokens-note"), hasEngine);
}

async function answer(question, askForKey) {
  const place = element("div", { className: "said answer" });
  byId("log").append(element("div", { className: "said user", text: question }), place);
  byId("question").value = "";
  const asked = [...messages, { role: "user", content: question }];
  const shownAnswer = new Answer(place);
  running = new AbortController();
  byId("send").disabled = !(byId("stop").disabled = false);
  try {
    let response = await post(asked, running.signal);
    while (response.status === 401) {
      await askForKey();
      response = await post(asked, running.signal);
    }
    if (!response.ok) throw new Error(await refusal(response));
    for await (const data of dataOf(response)) {
      if (data === "[DONE]") break;
      shownAnswer.take(JSON.parse(data));
      byId("log").scrollTop = byId("log").scrollHeight;
    }
    messages = [...asked, { role: "assistant", content: shownAnswer.content }];
  } catch (error) {
    const stopped = error.name === "AbortError";
    place.append(element("div", { className: stopped ? "summary" : "summary error", text: stopped ? "Stopped." : error.message }));
  } finally {
    running = null;
    byId("send").disabled = !(byId("stop").disabled = true);
    byId("log").scrollTop = byId("log").scrollHeight;
  }
}

function post(asked, signal) {
  const body = {
    messages: asked,
    stream: true,
    temperature: byId("temperature").valueAsNumber,
    max_tokens: byId("most").valueAsNumber,
    ...(tellsSteps ? { logprobs: true, return_steps: true } : {}),
  };
  const headers = { "Content-Type": "application/json", ...(byId("private").checked ? { "X-Draftloop-Capture": "off" } : {}) };
  return ask("v1/chat/completions", { method: "POST", headers, signal, body: JSON.stringify(body) });
}

class Answer {
  constructor(place) {
    this.place = place;
    this.content = "";
    this.steps = [];
    this.decoder = new TextDecoder(); // a character may take several tokens: it shows with its last
  }

  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const { content = "", reasoning_content: reasoning = "" } = choice.delta;
    this.content += content ?? "";
    const tokens = choice.logprobs?.content ?? [];
    if (tokens.length) this.#tokens(tokens, choice.step);
    else if (content || reasoning) this.place.append((reasoning ?? "") + (content ?? ""));
    if (choice.finish_reason) this.place.append(element("div", { className: "summary", text: this.#summary(choice.finish_reason, chunk.timings) }));
  }

  #tokens(tokens, step) {
    if (step?.drafted) this.steps.push(step);
    tokens.forEach(({ bytes }, at) => {
      const text = this.decoder.decode(Uint8Array.from(bytes), { stream: true });
      const token = element("span", { text, ...marks(step, at) });
      if (/^<\/?[|a-z_]+>$/.test(text)) token.classList.add("special");
      this.place.append(token);
    });
  }

  #summary(reason, timings) {
    const sum = (name) => this.steps.reduce((total, step) => total + step[name], 0);
    if (!this.steps.length) return `Ended by ${reason}.`;
    const slots = (timings?.draft_n_per_pos ?? []).map((proposed, slot) => {
      const accepted = timings.draft_n_accepted_per_pos[slot];
      return `slot ${slot}: ${accepted} / ${proposed} (${percent(proposed ? accepted / proposed : null)})`;
    });
    const speed = timings?.predicted_per_second ? `, ${timings.predicted_per_second.toFixed(1)} tokens/s` : "";
    const length = 1 + sum("accepted") / this.steps.length;
    return [`Ended by ${reason}${speed}. ${count(this.steps.length)} steps with drafts, τ ${ratio(length)}`, ...slots].join(" · ");
  }
}

function marks(step, at) {
  if (!step) return { className: "token own", title: "from the prompt: the first token belongs to no verify step" };
  const { drafter, drafted, accepted } = step;
  if (at < accepted) return { className: `token drafted slot-${at % 8}`, title: `slot ${at} of ${drafted}, drafted by ${drafter}, accepted` };
  if (accepted < drafted) return { className: "token own rejected", title: `the model's own: the draft of slot ${accepted} was another` };
  return { className: "token own", title: drafted ? `the model's own, after ${drafted} accepted` : "the model's own: no draft stood here" };
}
