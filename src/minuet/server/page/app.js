"use strict";
// The page reads /stats once a second and /explain once; the chat box uses /v1/chat/completions.

const $ = (id) => document.getElementById(id);
const history = [];
const rates = [];
let answering = null;

function headers() {
  const key = $("key").value.trim();
  return key ? { authorization: `Bearer ${key}` } : {};
}

function seconds(value) {
  if (value === undefined || value === null) return "–";
  if (value < 1) return `${(value * 1e3).toPrecision(3)} ms`;
  return `${value.toPrecision(3)} s`;
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${unit ? value.toFixed(value < 10 ? 2 : 1) : value} ${units[unit]}`;
}

// --- live figures ---------------------------------------------------------------------------

function showState(text) {
  $("state").textContent = text;
  $("state").className = `badge ${text}`;
}

function showStats(stats) {
  showState(stats.state);
  $("model").textContent = stats.model;
  $("rate").textContent = stats.tokens_per_s.toFixed(stats.tokens_per_s < 100 ? 1 : 0);
  for (const name of ["running", "waiting", "preemptions", "restarts"]) $(name).textContent = stats[name];
  for (const row of document.querySelectorAll("#latency tbody tr")) {
    const found = stats.latency_s[row.dataset.name] || {};
    ["p50", "p90", "p99"].forEach((p, i) => { row.cells[i + 1].textContent = seconds(found[p]); });
  }
  const pages = stats.pages;
  $("pages-used").textContent = pages.used.toLocaleString("en");
  $("pages-total").textContent = pages.total.toLocaleString("en");
  $("pages-cached").textContent = pages.cached.toLocaleString("en");
  $("bar-used").style.width = `${100 * pages.used / Math.max(1, pages.total)}%`;
  $("bar-cached").style.width = `${100 * pages.cached / Math.max(1, pages.total)}%`;
  const { queries, hits } = stats.prefix;
  $("hit-rate").textContent = queries ? `${(100 * hits / queries).toFixed(1)} %` : "–";
  $("compilations").textContent = stats.after_ready.compilations;
  $("growth").textContent = bytes(stats.after_ready.growth_bytes);
  const { achieved, limit } = stats.bandwidth;
  const share = limit ? ` (${(100 * achieved / limit).toFixed(0)} %)` : "";
  $("bandwidth").textContent = achieved ? `${(achieved / 1e9).toPrecision(3)} GB/s${share}` : "–";
  rates.push(stats.tokens_per_s);
  if (rates.length > 120) rates.shift();
  drawRates();
}

function drawRates() {
  const most = Math.max(1, ...rates);
  const at = (value, i) => `${(300 * (i + 120 - rates.length) / 119).toFixed(1)},${(58 - 54 * value / most).toFixed(1)}`;
  const points = rates.map(at);
  $("spark-line").setAttribute("points", points.join(" "));
  const first = points.length ? points[0].split(",")[0] : 300;
  $("spark-area").setAttribute("points", `${first},60 ${points.join(" ")} 300,60`);
}

async function refresh() {
  try {
    const response = await fetch("/stats", { headers: headers() });
    if (response.status === 401) showState("key needed");
    else if (response.ok) {
      showStats(await response.json());
      if (!$("plan").dataset.shown) await showPlan();
    }
  } catch {
    showState("unreachable");
  }
  setTimeout(refresh, 1000);
}

// --- the plan -------------------------------------------------------------------------------

function row(table, cells, heading) {
  const tr = table.tBodies[0].insertRow();
  cells.forEach((text, i) => {
    const cell = heading && i === 0 ? document.createElement("th") : document.createElement("td");
    cell.textContent = text;
    tr.append(cell);
  });
}

async function showPlan() {
  const response = await fetch("/explain", { headers: headers() });
  if (!response.ok) return;
  const plan = await response.json();
  $("plan").dataset.shown = "yes";
  if (!plan.calls) { $("plan-note").textContent = "This engine reports no plan."; return; }
  const layers = plan.model.layers;
  $("arch").textContent = `${plan.arch.name}, ${plan.shapes.length} step shapes`;
  for (const call of plan.calls) {
    row($("plan"), [`${layers[call.layer_kind]} ${call.layer_kind}`, call.phase, call.op, call.kernel || "–", call.level || "–"]);
  }
  const memory = plan.memory;
  const parts = { weights: "weight_bytes", workspace: "workspace_bytes", graphs: "graph_bytes", activations: "activation_bytes", "KV pages": "kv_bytes" };
  for (const [name, field] of Object.entries(parts)) row($("memory"), [name, bytes(memory[field])], true);
  for (const s of plan.settings) row($("settings"), [s.flag, s.value || "–", s.source], true);
}

// --- chat -----------------------------------------------------------------------------------

function turn(kind, text) {
  const hint = $("talk").querySelector(".hint");
  if (hint) hint.remove();
  const div = document.createElement("div");
  div.className = `turn ${kind}`;
  div.textContent = text;
  $("talk").append(div);
  $("talk").scrollTop = $("talk").scrollHeight;
  return div;
}

function render(box, said, note) {
  box.replaceChildren();
  const part = (name, text) => {
    const div = document.createElement("div");
    if (name) div.className = name;
    div.textContent = text;
    box.append(div);
  };
  if (said.reasoning) part("thought", said.reasoning);
  if (said.content) part("", said.content);
  for (const call of said.calls) part("call", `${call.name}(${call.arguments})`);
  if (note) part("meta", note);
  $("talk").scrollTop = $("talk").scrollHeight;
}

function take(said, delta) {
  said.reasoning += delta.reasoning || "";
  said.content += delta.content || "";
  for (const call of delta.tool_calls || []) {
    const known = said.calls[call.index] ||= { name: "", arguments: "" };
    known.name += call.function.name || "";
    known.arguments += call.function.arguments || "";
  }
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.replace(/^data: /, "");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function answer(box) {
  const began = performance.now();
  const said = { reasoning: "", content: "", calls: [] };
  let first = 0, tokens = 0, reason = "";
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    signal: answering.signal,
    headers: { ...headers(), "content-type": "application/json" },
    body: JSON.stringify({
      messages: history,
      stream: true,
      stream_options: { include_usage: true },
      max_tokens: Number($("max-tokens").value),
      temperature: Number($("temperature").value),
    }),
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) tokens = event.usage.completion_tokens;
    for (const choice of event.choices) {
      take(said, choice.delta);
      reason = choice.finish_reason || reason;
      if (!first && Object.keys(choice.delta).some((k) => k !== "role")) first = performance.now();
    }
    render(box, said);
  }
  const total = (performance.now() - began) / 1e3;
  const lead = first ? `first after ${seconds((first - began) / 1e3)}, ` : "";
  render(box, said, `${tokens} tokens, ${lead}${seconds(total)} in all, ended by ${reason}`);
  history.push({ role: "assistant", content: said.content });
}

function busy(is) {
  $("send").disabled = is;
  $("stop").hidden = !is;
}

async function send(event) {
  event.preventDefault();
  const text = $("say").value.trim();
  if (!text || answering) return;
  $("say").value = "";
  history.push({ role: "user", content: text });
  turn("user", text);
  const box = turn("assistant", "…");
  answering = new AbortController();
  busy(true);
  try {
    await answer(box);
  } catch (problem) {
    history.pop();
    if (problem.name === "AbortError") box.append(" (stopped)");
    else { box.classList.add("failed"); box.textContent = problem.message; }
  }
  answering = null;
  busy(false);
}

$("ask").addEventListener("submit", send);
$("stop").addEventListener("click", () => answering && answering.abort());
$("clear").addEventListener("click", () => { history.length = 0; $("talk").replaceChildren(); });
$("say").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); $("ask").requestSubmit(); }
});
refresh();
