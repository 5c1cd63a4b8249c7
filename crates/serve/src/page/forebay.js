// A chat and a view of the machine. No library, nothing from outside; text of models is never markup.
"use strict";
const $ = (id) => document.getElementById(id);
const make = (tag, name, text) => {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text !== undefined) node.textContent = text;
  return node;
};
const store = {
  get: (name) => { try { return sessionStorage.getItem(name); } catch { return null; } },
  set: (name, value) => { try { sessionStorage.setItem(name, value); } catch { /* it is asked for again */ } },
};
const headers = () => {
  const key = store.get("key");
  return key ? { authorization: `Bearer ${key}` } : {};
};

// ---- Markdown, lightly: paragraphs, headings, lists, code, bold and italic.
function inline(node, text) {
  const parts = text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*|\*[^*\s][^*\n]*\*)/);
  for (const part of parts) {
    if (part.length > 2 && part.startsWith("`") && part.endsWith("`")) node.append(make("code", "", part.slice(1, -1)));
    else if (part.length > 4 && part.startsWith("**") && part.endsWith("**")) node.append(make("strong", "", part.slice(2, -2)));
    else if (part.length > 2 && part.startsWith("*") && part.endsWith("*")) node.append(make("em", "", part.slice(1, -1)));
    else node.append(part);
  }
}
function markdown(box, text) {
  box.replaceChildren();
  let list = null;
  let paragraph = null;
  const lines = text.split("\n");
  for (let i = 0; i < lines.length; i++) {
    const line = lines[i];
    const item = line.match(/^\s*(?:([-*+])|\d+[.)])\s+(.*)$/);
    const heading = line.match(/^#{1,6}\s+(.*)$/);
    if (line.startsWith("```")) {
      const code = [];
      while (++i < lines.length && !lines[i].startsWith("```")) code.push(lines[i]);
      const pre = make("pre");
      pre.append(make("code", "", code.join("\n")));
      box.append(pre);
      list = paragraph = null;
    } else if (item) {
      const tag = item[1] ? "UL" : "OL";
      if (!list || list.tagName !== tag) box.append(list = make(tag));
      const li = make("li");
      inline(li, item[2]);
      list.append(li);
      paragraph = null;
    } else if (heading) {
      const h = make("h4");
      inline(h, heading[1]);
      box.append(h);
      list = paragraph = null;
    } else if (line.trim() === "") {
      list = paragraph = null;
    } else {
      if (paragraph) paragraph.append(make("br"));
      else box.append(paragraph = make("p"));
      inline(paragraph, line);
      list = null;
    }
  }
  if (!box.firstChild) box.append(make("p"));
}

// ---- Chat.
const messages = [];
let running = null;
function turn(kind) {
  $("empty").hidden = true;
  const node = make("div", `turn ${kind}`);
  $("talk").append(node);
  return node;
}
const nearEnd = () => { const t = $("talk"); return t.scrollHeight - t.scrollTop - t.clientHeight < 80; };
const toEnd = () => { $("talk").scrollTop = $("talk").scrollHeight; };
function settings() {
  const body = {};
  for (const name of ["temperature", "top_p", "top_k", "seed", "max_tokens"]) {
    const value = $(name).value.trim();
    if (value !== "" && Number.isFinite(Number(value))) body[name] = Number(value);
  }
  if ($("reasoning_effort").value) body.reasoning_effort = $("reasoning_effort").value;
  return body;
}
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}
async function ask(text) {
  const user = turn("user");
  user.textContent = text;
  messages.push({ role: "user", content: text });
  const node = turn("assistant writing");
  const box = make("div", "text");
  box.append(make("p"));
  node.append(box);
  toEnd();
  running = new AbortController();
  $("send").hidden = true;
  $("stop").hidden = false;
  const began = performance.now();
  let first = 0, content = "", reasoning = "", thought = null, tokens = 0, note = "", fault = "", due = false;
  const draw = () => {
    due = false;
    const follow = nearEnd();
    if (reasoning && !thought) {
      node.prepend(thought = make("div", "reasoning"));
      thought.setAttribute("aria-label", "Reasoning");
    }
    if (thought) thought.textContent = reasoning;
    markdown(box, content);
    if (follow) toEnd();
  };
  try {
    const system = $("system").value.trim();
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      signal: running.signal,
      headers: { "content-type": "application/json", ...headers() },
      body: JSON.stringify({
        messages: system ? [{ role: "system", content: system }, ...messages] : messages,
        stream: true, stream_options: { include_usage: true }, ...settings(),
      }),
    });
    if (!response.ok) {
      if (response.status === 401) $("key-notice").hidden = false;
      const error = await response.json().catch(() => ({}));
      throw new Error(error.error?.message || `the server answered ${response.status}`);
    }
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices?.[0];
      const delta = choice?.delta ?? {};
      if (!first && (delta.content || delta.reasoning_content || delta.reasoning)) first = performance.now();
      content += delta.content ?? "";
      reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
      if (choice?.finish_reason === "length") note = "cut at the limit of tokens";
      if (event.usage) tokens = event.usage.completion_tokens;
      if (!due) { due = true; requestAnimationFrame(draw); }
    }
  } catch (error) {
    if (error.name === "AbortError") note = "stopped";
    else fault = error.message;
  }
  draw();
  node.classList.remove("writing");
  if (fault) {
    node.append(make("p", "fault", fault));
    if (!content) messages.pop();
  }
  if (content) messages.push({ role: "assistant", content });
  const seconds = (performance.now() - began) / 1000;
  const parts = [];
  if (tokens) parts.push(`${tokens} tokens`, `${(tokens / seconds).toFixed(1)} per second`);
  if (first) parts.push(`first after ${((first - began) / 1000).toFixed(2)} s`);
  if (note) parts.push(note);
  if (parts.length) node.append(make("p", "foot", parts.join(" · ")));
  $("said").textContent = fault || (note ? `The answer is over: ${note}.` : "The answer is complete.");
  toEnd();
  running = null;
  $("send").hidden = false;
  $("stop").hidden = true;
  $("ask").focus({ preventScroll: true });
}
function grow() {
  const box = $("ask");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}
function send() {
  const text = $("ask").value.trim();
  if (!text || running) return;
  $("ask").value = "";
  grow();
  ask(text);
}
$("ask-form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("ask").addEventListener("input", grow);
$("ask").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
$("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
$("clear").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  document.querySelectorAll(".turn").forEach((node) => node.remove());
  $("empty").hidden = false;
  $("ask").focus();
});
document.querySelectorAll(".chip").forEach((chip) => chip.addEventListener("click", () => { if (!running) ask(chip.textContent); }));
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  store.set("key", $("key").value);
  $("key-notice").hidden = true;
  look();
});

// ---- The machine.
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
function bytes(n) {
  let unit = 0;
  while (n >= 1024 && unit < UNITS.length - 1) { n /= 1024; unit++; }
  return `${n < 10 && unit ? n.toFixed(2) : n < 100 && unit ? n.toFixed(1) : Math.round(n)} ${UNITS[unit]}`;
}
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const LINES = { rate: [], hits: [], disk: [] };
function line(name, value, top) {
  const values = LINES[name];
  values.push(value);
  if (values.length > 120) values.shift();
  const canvas = $(`${name}-line`);
  const g = canvas.getContext("2d");
  const { width, height } = canvas;
  const most = top ?? Math.max(...values.filter((v) => v !== null), 1e-9);
  g.clearRect(0, 0, width, height);
  g.strokeStyle = colour("--accent");
  g.lineWidth = 2.5;
  g.beginPath();
  let pen = false;
  values.forEach((v, i) => {
    if (v === null) { pen = false; return; }
    const x = width - (values.length - 1 - i) * (width / 119);
    const y = height - 4 - (height - 8) * (v / most);
    if (pen) g.lineTo(x, y); else g.moveTo(x, y);
    pen = true;
  });
  g.stroke();
}
let before = null;
let uses = new Map();
let heat = null;
function map(live) {
  const { per_layer: experts, routed_layers: routed, layers, slots, free } = live.experts;
  const none = experts === 0 ? "This model has no experts." : layers.length === 0
    ? `All ${experts * routed.length} experts are in memory: nothing has to be read.` : "";
  $("experts-none").hidden = !none;
  $("experts-none").textContent = none;
  $("map-box").hidden = Boolean(none);
  $("experts-sum").textContent = none ? "" : `${slots - free} of ${experts * routed.length} in memory, ${routed.length} layers`;
  if (none) return;
  const now = new Map();
  const rows = layers.map((layer) => {
    const row = new Array(experts).fill(0);
    for (const [expert, used] of layer.resident) {
      const id = layer.layer * 65536 + expert;
      now.set(id, used);
      const was = uses.get(id);
      row[expert] = !before ? 1 : was === undefined ? 3 : used > was ? 2 : 1;
    }
    return { layer: layer.layer, row };
  });
  uses = now;
  heat = { rows, experts };
  drawMap();
}
function drawMap() {
  if (!heat) return;
  const canvas = $("map");
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  if (!width) return;
  const cell = width / heat.experts;
  const tall = Math.max(6, Math.min(cell, 20, 360 / heat.rows.length));
  canvas.style.height = `${tall * heat.rows.length}px`;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(tall * heat.rows.length * scale);
  const g = canvas.getContext("2d");
  g.scale(scale, scale);
  const colours = ["--map-out", "--map-in", "--map-hit", "--map-read"].map(colour);
  const gap = cell > 5 ? 1 : 0.5;
  heat.rows.forEach(({ row }, y) => row.forEach((state, x) => {
    g.fillStyle = colours[state];
    g.fillRect(x * cell, y * tall, Math.max(cell - gap, 0.5), tall - gap);
  }));
  heat.cell = cell;
  heat.tall = tall;
  const count = [0, 0, 0, 0];
  heat.rows.forEach(({ row }) => row.forEach((state) => count[state]++));
  canvas.setAttribute("aria-label",
    `Experts by layer: ${count[1] + count[2] + count[3]} in memory, ${count[2]} hit and ${count[3]} read in the last look.`);
}
$("map").addEventListener("pointermove", (event) => {
  if (!heat?.cell) return;
  const x = Math.floor(event.offsetX / heat.cell), y = Math.floor(event.offsetY / heat.tall);
  const at = heat.rows[y];
  if (!at || at.row[x] === undefined) return;
  $("map-at").textContent = `layer ${at.layer}, expert ${x}: ${["on disk", "in memory", "hit now", "read now"][at.row[x]]}`;
});
$("map").addEventListener("pointerleave", () => { $("map-at").textContent = "\u00a0"; });
window.addEventListener("resize", drawMap);
const HUES = [192, 28, 262, 140, 330, 46, 210, 100, 0, 170, 290, 70];
const hue = (i) => `hsl(${HUES[i % HUES.length]} 62% 48%)`;
let drawnLedger = "";
function memory(live) {
  const { budget, own, ledger } = live.memory;
  const total = ledger.reduce((sum, item) => sum + item.bytes, 0);
  $("memory-sum").textContent = `plan ${bytes(total)} of ${bytes(budget)}${own ? `, in use ${bytes(own)}` : ""}`;
  const text = JSON.stringify(ledger);
  if (text === drawnLedger) return;
  drawnLedger = text;
  const sorted = ledger.map((item, i) => ({ ...item, colour: hue(i) })).sort((a, b) => b.bytes - a.bytes);
  $("memory-bar").replaceChildren(...sorted.map((item) => {
    const part = make("i");
    part.style.width = `${(100 * item.bytes) / Math.max(budget, total)}%`;
    part.style.background = item.colour;
    return part;
  }));
  const most = sorted[0].bytes;
  const shown = sorted.length > 8 ? sorted.slice(0, 7) : sorted;
  const rest = sorted.slice(shown.length);
  const items = shown.map((item) => [item.what, bytes(item.bytes), item.bytes / most, item.colour]);
  if (rest.length) {
    const sum = rest.reduce((n, item) => n + item.bytes, 0);
    items.push([rest.map((item) => item.what).join(", "), bytes(sum), sum / most, rest[0].colour]);
  }
  bars($("ledger"), items);
}
function bars(list, items) {
  list.replaceChildren(...items.map(([what, value, share, tint]) => {
    const li = make("li");
    const bar = make("i");
    bar.style.width = `${100 * share}%`;
    bar.style.background = tint;
    li.append(bar, make("span", "", what), make("span", "", value));
    return li;
  }));
}
const NAMES = { read_wait: "waiting for the disk", body: "attention and dense parts", head: "output head",
  experts: "experts", router: "routers", plan: "planning reads", bind: "finding weights", embed: "embedding", sampling: "sampling" };
const window_ = [];
function phases(live) {
  window_.push(live.phases_s);
  if (window_.length > 20) window_.shift();
  const old = window_[0];
  const spent = Object.entries(live.phases_s).map(([name, s]) => [name, s - old[name]]);
  const sum = spent.reduce((n, [, s]) => n + s, 0);
  if (sum <= 0 && $("phases").firstChild) return;
  spent.sort((a, b) => b[1] - a[1]);
  bars($("phases"), spent.filter(([, s], i) => i < 5 && (s > 0 || sum === 0)).map(([name, s]) =>
    [NAMES[name] ?? name, sum > 0 ? `${Math.round((100 * s) / sum)}%` : "–", sum > 0 ? s / sum : 0, colour("--accent")]));
}
let slow = [];
function show(live) {
  $("model").textContent = `${live.model} · ${live.family} · ${bytes(live.file_bytes)} · context ${live.context}`;
  document.title = `Forebay · ${live.model}`;
  const working = live.answers.running > 0;
  $("state").className = working ? "working" : "idle";
  $("state-text").textContent = working ? "working" : "idle";
  const waiting = live.answers.waiting;
  $("answers").textContent = `${live.answers.running} running`;
  const ended = live.answers.ended;
  $("answers-more").textContent = `${waiting} waiting, ${ended.stop + ended.length + ended.gone} done`;
  if (before) {
    const seconds = live.uptime_s - before.uptime_s;
    const rate = (live.tokens.generated - before.tokens.generated) / seconds;
    slow.push([live.uptime_s, live.tokens.generated]);
    slow = slow.filter(([at]) => at > live.uptime_s - 2.5);
    const [at, had] = slow[0];
    const steady = live.uptime_s > at ? (live.tokens.generated - had) / (live.uptime_s - at) : 0;
    $("rate").textContent = steady >= 100 ? Math.round(steady) : steady.toFixed(1);
    line("rate", rate);
    const hits = live.experts.hits - before.experts.hits;
    const misses = live.experts.misses - before.experts.misses;
    const all = live.experts.hits + live.experts.misses;
    const part = hits + misses > 0 ? hits / (hits + misses) : null;
    if (part !== null) $("hits").textContent = `${(100 * part).toFixed(part < 0.995 ? 1 : 0)}%`;
    else if (all > 0) $("hits").textContent = `${((100 * live.experts.hits) / all).toFixed(1)}%`;
    line("hits", part, 1);
    const read = (live.experts.bytes_read - before.experts.bytes_read) / seconds;
    $("disk").textContent = `${bytes(read)}/s`;
    line("disk", read);
  }
  map(live);
  memory(live);
  phases(live);
  before = live;
}
let timer = 0;
async function look() {
  clearTimeout(timer);
  let again = 2000;
  try {
    if (!document.hidden) {
      const response = await fetch("/v1/forebay/live", { headers: headers() });
      if (response.status === 401) {
        $("key-notice").hidden = false;
        $("state-text").textContent = "a key is needed";
        return;
      }
      const live = await response.json();
      again = live.every_ms;
      show(live);
    }
  } catch {
    $("state").className = "away";
    $("state-text").textContent = "no answer from the server";
  }
  timer = setTimeout(look, again);
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
look();
