// The chat page: one conversation, streamed from /v1/chat/completions. Text is only ever set as text, never as HTML.
"use strict";

const $ = (id) => document.getElementById(id);
// Absolute, because fetch refuses to start from a page whose own address holds a password.
const url = (path) => location.origin + path;
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const history = [];
let controller = null;
let model = null;
let conversation = 0; // counts "New chat"

async function loadModel() {
  const answer = await fetch(url("/v1/models"));
  if (!answer.ok) return;
  model = (await answer.json()).data[0].id;
  $("model").textContent = model;
}

// The KV pool's fill level, from the metrics that Prometheus reads too.
async function updateGauge() {
  try {
    const text = await (await fetch(url("/metrics"))).text();
    const match = text.match(/^nanoinfer:kv_cache_usage_perc\{[^}]*\} (\S+)$/m);
    if (!match) return;
    $("kv").value = Number(match[1]);
    $("kv-text").textContent = `${(100 * Number(match[1])).toFixed(1)} %`;
  } catch { /* the server is gone; the next message will say so */ }
}

function addMessage(kind, text = "") {
  const element = document.createElement("div");
  element.className = `message ${kind}`;
  element.textContent = text;
  $("messages").append(element);
  scroll(true);
  return element;
}

function scroll(always) {
  const box = $("messages");
  if (always || box.scrollHeight - box.scrollTop - box.clientHeight < 120) box.scrollTop = box.scrollHeight;
}

// What an answer looks like while it comes: thinking folded away, then the text, then a note.
function newAnswer() {
  const element = addMessage("assistant");
  const details = document.createElement("details");
  const summary = document.createElement("summary");
  const thinking = document.createElement("div");
  const text = document.createElement("div");
  const note = document.createElement("div");
  summary.textContent = "Thinking…";
  thinking.className = "thinking";
  text.className = "text";
  note.className = "note";
  details.append(summary, thinking);
  details.hidden = true;
  element.append(details, text, note);
  return { element, details, summary, thinking, text, note };
}

function requestBody() {
  const system = $("system").value.trim();
  const messages = system ? [{ role: "system", content: system }, ...history] : [...history];
  const body = { messages, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  if (model) body.model = model;
  for (const name of NUMBERS) if ($(name).value !== "") body[name] = Number($(name).value);
  body.chat_template_kwargs = { enable_thinking: $("thinking").checked };
  return body;
}

// The JSON objects of an event stream's data lines, as they arrive.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const parts = buffer.split("\n\n");
    buffer = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function showDelta(answer, delta) {
  if (delta.reasoning) {
    answer.details.hidden = false;
    answer.thinking.append(delta.reasoning);
  }
  if (delta.content) {
    answer.summary.textContent = "Thoughts";
    answer.text.append(delta.content);
  }
  scroll(false);
}

async function readAnswer(response, answer) {
  let first = null;
  let tokens = 0;
  let reason = null;
  for await (const chunk of events(response)) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) tokens = chunk.usage.completion_tokens;
    if (chunk.choices.length) {
      showDelta(answer, chunk.choices[0].delta);
      reason = chunk.choices[0].finish_reason ?? reason;
    }
    first ??= tokens ? { time: performance.now(), tokens } : null;
    const seconds = first ? (performance.now() - first.time) / 1000 : 0;
    if (seconds > 0 && tokens > first.tokens) {
      $("speed").textContent = `${((tokens - first.tokens) / seconds).toFixed(1)} tok/s`;
    }
  }
  answer.note.textContent = reason === "length" ? `${tokens} tokens, cut off at the limit` : `${tokens} tokens`;
}

async function send(text) {
  const mine = conversation;
  history.push({ role: "user", content: text });
  addMessage("user", text);
  const answer = newAnswer();
  controller = new AbortController();
  setBusy(true);
  try {
    const response = await fetch(url("/v1/chat/completions"), {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(requestBody()),
      signal: controller.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    await readAnswer(response, answer);
  } catch (error) {
    if (error.name === "AbortError") answer.note.textContent = "stopped";
    else if (mine === conversation) addMessage("error", error.message);
  } finally {
    controller = null;
    setBusy(false);
  }
  if (mine !== conversation) return;
  const content = answer.text.textContent;
  if (content) history.push({ role: "assistant", content });
  else history.pop();
  updateGauge();
}

function setBusy(isBusy) {
  $("send").hidden = isBusy;
  $("stop").hidden = !isBusy;
  if (!isBusy) $("input").focus();
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("input").value.trim();
  if (!text || controller) return;
  $("input").value = "";
  send(text);
});
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
$("stop").addEventListener("click", () => controller?.abort());
$("reset").addEventListener("click", () => {
  controller?.abort();
  conversation += 1;
  history.length = 0;
  $("messages").replaceChildren();
});
$("show-settings").addEventListener("click", () => {
  $("settings").hidden = !$("settings").hidden;
  $("show-settings").setAttribute("aria-expanded", String(!$("settings").hidden));
});

loadModel();
updateGauge();
setInterval(updateGauge, 2000);
