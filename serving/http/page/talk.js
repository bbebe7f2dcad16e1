"use strict";
const $ = (id) => document.getElementById(id);
const SHOWN = 200; // scores in the chart and in the preview
const SILENT = 4000; // ms without an answer after which nothing on the page counts as current
const page = {
  model: "", since: 0, loadedAt: null, scores: [], threshold: null, wanted: null, newest: null, shownId: null,
  failures: [], viewed: null, overlay: true, heard: Date.now(), skew: 0, thumbs: new Map(),
};

// Talking to the server ------------------------------------------------------------------------------------------

class WantsToken extends Error {}

async function ask(path, options = {}) {
  const token = sessionStorage.getItem("mdps-token");
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const reply = await fetch(path, { ...options, headers, cache: "no-store" });
  if (reply.status === 401) throw new WantsToken();
  page.heard = Date.now();
  return reply;
}

async function askJson(path, options) {
  const reply = await ask(path, options);
  const value = await reply.json();
  if (!reply.ok) throw new Error(value.error || `status ${reply.status}`);
  return value;
}

async function pictureUrl(id, layer) {
  const reply = await ask(`/live/${page.model}/${id}/${layer}.png`);
  return reply.ok ? URL.createObjectURL(await reply.blob()) : null;
}

function show(image, url, alt) {
  if (image.src.startsWith("blob:")) URL.revokeObjectURL(image.src);
  image.hidden = !url;
  if (url) image.src = url; else image.removeAttribute("src");
  image.alt = alt;
}

async function loop() {
  try {
    if (!page.model) await findModels();
    take(await askJson(`/live/${page.model}?since=${page.since}`));
    $("sign-in").hidden = true;
    $("board").hidden = false;
    await drawPictures();
  } catch (error) {
    if (error instanceof WantsToken) return signIn();
    if (!(error instanceof TypeError)) console.warn(error); // a TypeError is fetch without a connection
  }
  tell();
  setTimeout(loop, document.hidden ? 5000 : 1000);
}

async function findModels() {
  const { models } = await askJson("/live");
  const asked = decodeURIComponent(location.hash.slice(1));
  page.model = models.includes(asked) ? asked : models[0];
  $("model").replaceChildren(...models.map((name) => new Option(name, name, false, name === page.model)));
  $("model-choice").hidden = models.length < 2;
}

function signIn() {
  if (sessionStorage.getItem("mdps-token")) $("sign-in-error").textContent = "The server does not know this token.";
  sessionStorage.removeItem("mdps-token");
  $("board").hidden = true;
  $("sign-in").hidden = false;
  $("state").textContent = "not signed in";
  $("token").focus();
}

$("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("mdps-token", $("token").value.trim());
  $("token").value = $("sign-in-error").textContent = "";
  loop();
});

$("model").addEventListener("change", () => {
  location.hash = encodeURIComponent($("model").value);
  Object.assign(page, { model: $("model").value, since: 0, scores: [], wanted: null, newest: null, shownId: null });
});

// What it said ---------------------------------------------------------------------------------------------------

function take(said) {
  page.skew = Date.now() / 1000 - said.now;
  if (page.loadedAt !== null && page.loadedAt !== said.model.since && page.since) {
    page.loadedAt = said.model.since; // another bundle, or another server: begin anew
    Object.assign(page, { since: 0, scores: [], wanted: null });
    return;
  }
  page.loadedAt = said.model.since;
  page.threshold = said.model.threshold;
  for (const [id, time, score, verdict, ms] of said.results) {
    page.scores.push({ id, time, score, verdict, ms });
    page.since = id;
  }
  page.scores.splice(0, Math.max(0, page.scores.length - SHOWN));
  page.newest = page.scores.at(-1) || null;
  page.failures = said.failures;
  drawVerdict();
  drawCounts(said);
  drawPreview();
  drawChart();
  drawFacts(said.model);
}

const number = (value) => (value === null || value === undefined ? "–" : Number(value.toPrecision(4)).toString());
const clock = (time) => new Date((time + page.skew) * 1000).toLocaleTimeString();
const word = (verdict) => ({ pass: "PASS", fail: "FAIL" })[verdict] || "NO VERDICT";

function tell() {
  const silent = Date.now() - page.heard > SILENT;
  const problem = silent ? "No connection to the server: what is shown here is old." : page.problem;
  document.body.classList.toggle("stale", silent);
  $("alarm").hidden = !problem;
  if ($("alarm").textContent !== (problem || "")) $("alarm").textContent = problem || "";
  if (page.newest) {
    const seconds = Math.max(0, Math.round(Date.now() / 1000 - page.skew - page.newest.time));
    $("age").textContent = seconds < 2 ? "now" : seconds < 120 ? `${seconds} s ago` : `at ${clock(page.newest.time)}`;
  }
}

function drawVerdict() {
  if (!page.newest) return;
  const { verdict, score, ms } = page.newest;
  $("verdict").dataset.verdict = verdict || "none";
  if ($("verdict-word").textContent !== word(verdict)) $("verdict-word").textContent = word(verdict);
  $("measured").textContent = `score ${number(score)}, threshold ${number(page.threshold)}, ${Math.round(ms)} ms`;
  document.title = `${word(verdict)} – ${page.model}`;
}

function drawCounts({ counts, errors, model }) {
  const sum = (all) => Object.values(all).reduce((total, count) => total + count, 0);
  $("count-all").textContent = sum(counts);
  $("count-pass").textContent = counts.pass || 0;
  $("count-fail").textContent = counts.fail || 0;
  $("count-error").textContent = sum(errors);
  $("count-queue").textContent = `${model.queue} of ${model.queue_limit}`;
}

function drawFacts(model) {
  page.problem = model.problem;
  $("doubt").hidden = !model.doubt;
  if ($("doubt").textContent !== `Warning: ${model.doubt}`) $("doubt").textContent = `Warning: ${model.doubt}`;
  $("state").textContent = `${model.name}: ${model.state}`;
  const facts = {
    Name: model.name, State: model.state, Product: model.product, Threshold: number(model.threshold),
    "False alarms asked for": model.false_alarm_rate === null ? "–" : `${number(100 * model.false_alarm_rate)} %`,
    Computes: `${model.engine}, ${model.engines.join(", ")}`, Loaded: new Date(model.since * 1000).toLocaleString(),
  };
  const text = JSON.stringify(facts);
  if ($("facts").dataset.text === text) return;
  $("facts").dataset.text = text;
  $("facts").replaceChildren(...Object.entries(facts).flatMap(([name, value]) => [tag("dt", name), tag("dd", value)]));
}

function tag(name, text, attributes = {}) {
  const element = document.createElement(name);
  element.textContent = text;
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}
