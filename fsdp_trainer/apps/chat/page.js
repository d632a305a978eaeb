"use strict";
const at = (id) => document.getElementById(id);
const turns = at("turns"), text = at("text"), status = at("status");
const token = new URLSearchParams(location.search).get("token");
let messages = [], running = null, images = [];

function show(role, content) {
  const turn = document.createElement("div");
  turn.className = "turn " + role;
  turn.textContent = content;
  turns.append(turn);
  turns.scrollTop = turns.scrollHeight;
  return turn;
}

function tell(line, isError) {
  status.textContent = line;
  status.className = isError ? "error" : "";
}

function update() {
  at("send").disabled = at("new").disabled = running !== null;
  at("stop").hidden = running === null;
  at("again").hidden = running !== null || !messages.length;
}

// The objects of a stream of server-sent events.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function request() {
  const system = at("system").value.trim();
  const headers = { "Content-Type": "application/json" };
  if (token) headers.Authorization = "Bearer " + token;
  const response = await fetch("v1/chat/completions", {
    method: "POST", headers, signal: running.signal,
    body: JSON.stringify({
      messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
      temperature: at("temperature").valueAsNumber, top_p: at("top_p").valueAsNumber,
      max_tokens: at("max_tokens").valueAsNumber,
      stream: true, stream_options: { include_usage: true },
    }),
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  return response;
}

async function answer() {
  running = new AbortController();
  update();
  tell("");
  const turn = show("assistant busy", ""), began = performance.now();
  let said = "", finish = "stopped", usage = null, drawing = false;
  // Once a frame: drawing each piece of a long answer would keep the page too busy to stop it.
  const draw = () => {
    drawing = false;
    const follows = turns.scrollTop + turns.clientHeight > turns.scrollHeight - 40;
    turn.textContent = said;
    if (follows) turns.scrollTop = turns.scrollHeight;
  };
  try {
    for await (const event of events(await request())) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage || usage;
      for (const choice of event.choices) {
        said += choice.delta.content || "";
        finish = choice.finish_reason || finish;
      }
      if (!drawing) requestAnimationFrame(draw);
      drawing = true;
    }
    const seconds = (performance.now() - began) / 1000;
    const ended = finish === "length" ? ", cut at its longest" : "";
    if (usage) tell(usage.completion_tokens + " tokens in " + seconds.toFixed(1) + " s" + ended);
  } catch (error) {
    if (error.name === "AbortError") tell("stopped");
    else tell(error.message, true);
  }
  draw();
  turn.classList.remove("busy");
  if (said) messages.push({ role: "assistant", content: said });
  else turn.remove();
  running = null;
  update();
  text.focus();
}

// An image that was dropped, pasted or chosen waits for the text that it is sent with.
function attach(files) {
  if (at("add").hidden) return;
  for (const file of files) {
    if (!file.type.startsWith("image/")) continue;
    const reader = new FileReader();
    reader.onload = () => { images.push(reader.result); preview(); };
    reader.readAsDataURL(file);
  }
}

function pictures(urls) {
  return urls.map((url) => Object.assign(document.createElement("img"), { src: url, alt: "" }));
}

function preview() {
  at("images").replaceChildren(...pictures(images));
  at("images").hidden = !images.length;
}

function ask() {
  const written = text.value.trim();
  if ((!written && !images.length) || running) return;
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  const content = images.length ? [...parts, { type: "text", text: written }] : written;
  const last = messages[messages.length - 1];
  if (last && last.role === "user") { messages.pop(); turns.lastElementChild.remove(); }
  messages.push({ role: "user", content });
  show("user", written).prepend(...pictures(images));
  images = [];
  preview();
  text.value = "";
  answer();
}

function again() {
  if (running || !messages.length) return;
  if (messages[messages.length - 1].role === "assistant") {
    messages.pop();
    turns.lastElementChild.remove();
  }
  answer();
}

at("ask").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
at("stop").addEventListener("click", () => running && running.abort());
at("again").addEventListener("click", again);
at("new").addEventListener("click", () => {
  messages = [];
  turns.replaceChildren();
  images = [];
  preview();
  tell("");
  update();
  text.focus();
});
text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); ask(); }
});
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => { event.preventDefault(); attach(event.dataTransfer.files); });
text.addEventListener("paste", (event) => attach(event.clipboardData.files));
at("file").addEventListener("change", () => { attach(at("file").files); at("file").value = ""; });
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});
update();
