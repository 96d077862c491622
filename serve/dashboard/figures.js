// What /v1/live tells, in its places on the page. Every figure that is a ratio was divided on the server.

import { Chart } from "./charts.js";
import { byId, element, figure, rows, setText, shown } from "./dom.js";
import { count, percent, rate, ratio, seconds, span } from "./numbers.js";

const KEPT = 600; // seconds of history
const LATENCIES = { time_to_first_token: "first token", inter_token: "between tokens", end_to_end: "whole answer" };

let points = [];
const charts = new Map(); // by title
const colours = new Map(); // by drafter, in order of first sight

export function show(told) {
  if (told.history) points = told.history; // the moment told of is its last
  else points.push(told.point);
  points = points.filter(({ at }) => at > told.point.at - KEPT);

  const { requests, tokens, cache, capture, drafters } = told;
  figure("model", told.model ?? "");
  figure("rate", rate(tokens.per_second));
  figure("draft-tokens", count(told.draft_tokens));
  figure("running", count(requests.running));
  figure("waiting", count(requests.waiting));
  figure("cache-usage", percent(cache.usage));
  figure("cache-hits", percent(cache.queries ? cache.hits / cache.queries : null));
  figure("cache-counts", cache.queries ? `prefix cache: ${of(cache.hits, cache.queries)}` : "prefix cache hits");
  figure("length", ratio(told.length));
  figure("latency-span", `the last ${span(told.latency_seconds)}`);
  figure("capture-state", capture.state === "on" ? "" : `(${capture.state})`);

  rows(byId("latency"), Object.entries(LATENCIES).map(([name, text]) => {
    const { p50, p90, p99, count: measured } = told.latency[name];
    return { name, cells: [text, seconds(p50), seconds(p90), seconds(p99), count(measured)] };
  }));
  rows(byId("requests"), [
    ...Object.entries(requests.ended).map(([reason, n]) => ({ name: reason, cells: [`ended by ${reason}`, count(n)] })),
    { name: "prompt-tokens", cells: ["prompt tokens", count(tokens.prompt)] },
    { name: "generated", cells: ["generated tokens", count(tokens.generated)] },
    { name: "preemptions", cells: ["preemptions", count(cache.preemptions)] },
  ]);
  rows(byId("capture"), [
    ...Object.entries(capture.rows).map(([status, n]) => ({ name: status, cells: [status.replaceAll("_", " "), count(n)] })),
    { name: "queue", cells: ["waiting to be written", count(capture.queue)] },
    { name: "late", cells: ["late", count(capture.late)] },
    { name: "lost", cells: ["lost", count(capture.lost)] },
  ]);
  const byDefault = told.promotion?.default;
  const canary = told.promotion?.canary;
  const drafterRows = drafters.map(({ name, fingerprint, state, total, recent }) => ({
    name,
    cells: [named(name, state, canary), ratio(recent.length), ratio(total.length), of(sum(total.accepted), sum(total.proposed)), fingerprint?.slice(0, 12) ?? ""],
  }));
  if (byDefault === "none") drafterRows.unshift({ name: "none", cells: [named("none", "active"), "–", "–", "–", ""] }); // it has no figures
  rows(byId("drafters"), drafterRows);

  const drafting = drafters.filter(({ total }) => total.drafts);
  shown(byId("slots-none"), !drafting.length);
  shown(byId("not-counted"), drafting.some(({ counted }) => !counted));
  showSlots(drafting);
  draw(drafting);
}

function showSlots(drafting) {
  const place = byId("slots");
  const lines = drafting.flatMap(({ name, total, recent }) => total.accepted.map((_, slot) => ({ name, slot, total, recent })));
  const wanted = JSON.stringify(lines.map(({ name, slot }) => [name, slot]));
  if (place.dataset.lines !== wanted) {
    place.dataset.lines = wanted;
    place.replaceChildren(...lines.flatMap(({ name, slot }) => [...(slot ? [] : [element("h3", { text: name })]), slotLine(slot)]));
  }
  const drawn = place.querySelectorAll(".slot");
  lines.forEach(({ name, slot, total, recent }, at) => {
    const [, track, now, always] = drawn[at].children;
    drawn[at].dataset.drafter = name;
    track.firstChild.style.width = `${100 * (recent.acceptance[slot] ?? 0)}%`;
    for (const [place, counts] of [[now, recent], [always, total]]) {
      setText(place.firstChild, percent(counts.acceptance[slot]));
      setText(place.lastChild, of(counts.accepted[slot], counts.proposed[slot]));
    }
  });
}

function slotLine(slot) {
  const line = element(
    "div",
    { className: `slot slot-${slot % 8}` },
    element("span", { text: `slot ${slot}` }),
    element("div", { className: "track" }, element("div", { className: "bar" })),
    element("span", { title: "the last 60 seconds" }, element("span"), element("small")),
    element("span", { className: "dim", title: "since start" }, element("span"), element("small")),
  );
  line.dataset.slot = slot;
  return line;
}

function draw(drafting) {
  const line = (name, slot, value) => ({ name, slot, points: points.map((point) => [point.at, value(point)]) });
  for (const { name, total } of drafting) {
    chart(`Acceptance over time: ${name}`, byId("acceptance"), { top: 1, format: (value) => `${100 * value} %`, note: "Of each slot, over the 60 seconds before." })
      .draw(total.accepted.map((_, slot) => line(`slot ${slot}`, slot, (point) => point.drafters[name]?.acceptance[slot])));
  }
  if (drafting.length) {
    chart("τ over time", byId("charts"), { bottom: 1, top: 2, format: ratio, note: "1 + accepted / verify steps that drafted, over the 60 seconds before." })
      .draw(drafting.map(({ name }) => line(name, colour(name), (point) => point.drafters[name]?.length)));
  }
  chart("Tokens per second", byId("charts"), { top: 10, format: String, note: "Generated in the 5 seconds before / 5." })
    .draw([line("tokens/s", 0, (point) => point.tokens_per_second)]);
  chart("Requests and K", byId("charts"), { top: 4, format: String, note: "K: draft tokens a sequence in the last verify step." })
    .draw([
      line("running", 0, (point) => point.running),
      line("waiting", 2, (point) => point.waiting),
      line("K", 3, (point) => point.draft_tokens),
    ]);
}

function chart(title, place, how) {
  if (!charts.has(title)) charts.set(title, new Chart(place, title, how));
  return charts.get(title);
}

// A drafter keeps its colour when another becomes the default and is told first.
function colour(name) {
  if (!colours.has(name)) colours.set(name, colours.size);
  return colours.get(name);
}

function named(name, state, canary) {
  if (!state || state === "loaded") return name; // or it is no drafter but a source of drafts beside them
  return `${name} (${state}${state === "canary" ? ` ${percent(canary.share)}` : ""})`;
}

const of = (part, all) => `${count(part)} / ${count(all)}`;
const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
