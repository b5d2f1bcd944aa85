// Talking with a language model, or letting it continue a text; streamed, and stopped when wanted.

import { events, post } from "./api.js";
import { field, h } from "./dom.js";
import { count, seconds, three } from "./numbers.js";

export function chatBox(model) {
  return new Chat(model).element;
}

class Chat {
  constructor(model) {
    this.model = model;
    this.chats = model.kind === "chat";
    this.messages = [];
    this.running = null;
    this.log = h("div", { class: "log", role: "log", "aria-live": "polite", "aria-label": "Conversation", tabindex: 0 });
    this.box = h("textarea", { rows: 2, placeholder: this.chats ? "Ask something" : "A text to continue",
      onkeydown: (event) => this.key(event) });
    this.send = h("button", { class: "primary", type: "submit" }, "Send");
    this.stop = h("button", { type: "button", hidden: true, onclick: () => this.running?.abort() }, "Stop");
    this.clear = h("button", { type: "button", class: "link", onclick: () => this.reset() }, "Clear");
    this.element = h("form", { class: "chat", onsubmit: (event) => { event.preventDefault(); this.ask(); } },
      this.log,
      field(this.chats ? "Message" : "Text", this.box, "Enter sends, Shift + Enter is a new line"),
      h("div", { class: "row" }, this.send, this.stop, this.clear),
      this.settings());
    this.reset();
  }

  settings() {
    const number = (name, properties) => h("input", { type: "number", name, ...properties });
    this.temperature = number("temperature", { min: 0, max: 2, step: 0.1, placeholder: "as the model has it" });
    this.maxTokens = number("max_tokens", { min: 1, max: this.model.context, step: 1, placeholder: this.chats ? "as many as fit" : "16" });
    this.system = h("textarea", { rows: 2, name: "system", placeholder: "none" });
    return h("details", { class: "settings" }, h("summary", {}, "Settings"),
      h("div", { class: "row" },
        field("Temperature", this.temperature, "0 takes the likeliest token; higher varies more"),
        field("Most tokens", this.maxTokens, `prompt and answer share ${count(this.model.context)}`)),
      this.chats ? field("System prompt", this.system) : null);
  }

  reset() {
    this.running?.abort();
    this.messages = [];
    this.log.replaceChildren(h("p", { class: "soft empty" }, this.chats ? "No messages yet." : "No text generated yet."));
  }

  key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.ask();
  }

  async ask() {
    const text = this.box.value;
    if (!text.trim() || this.running) return;
    this.log.querySelector(".empty")?.remove();
    this.messages.push({ role: "user", content: text });
    this.log.append(bubble("user", text));
    const answer = bubble("assistant", "");
    this.log.append(answer);
    this.box.value = "";
    await this.stream(answer, text);
  }

  request(text) {
    const chosen = { model: this.model.name, stream: true, stream_options: { include_usage: true } };
    if (this.temperature.value !== "") chosen.temperature = Number(this.temperature.value);
    if (this.maxTokens.value !== "") chosen.max_tokens = Number(this.maxTokens.value);
    if (!this.chats) return ["v1/completions", { ...chosen, prompt: text }];
    const system = this.system.value.trim() ? [{ role: "system", content: this.system.value }] : [];
    return ["v1/chat/completions", { ...chosen, messages: [...system, ...this.messages] }];
  }

  async stream(answer, text) {
    const body = answer.querySelector(".said");
    const note = answer.querySelector(".note");
    const clock = new Clock();
    this.running = new AbortController();
    this.busy(true);
    let said = "";
    let thought = null;
    let finish = null;
    try {
      const [path, request] = this.request(text);
      for await (const event of events(await post(path, request, { signal: this.running.signal }))) {
        if (event.usage) clock.usage = event.usage;
        const choice = event.choices[0];
        if (!choice) continue;
        const piece = (this.chats ? choice.delta?.content : choice.text) ?? "";
        finish = choice.finish_reason ?? finish;
        const reasoning = choice.delta?.reasoning_content;
        if (reasoning) {
          clock.piece();
          if (!thought) body.before(h("details", { class: "soft" }, h("summary", {}, "Thoughts"), thought = h("div", { class: "said" })));
          thought.textContent += reasoning;
        }
        if (!piece) continue;
        clock.piece();
        said += piece;
        const low = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
        body.textContent = said;
        if (low) this.log.scrollTop = this.log.scrollHeight;
      }
      note.textContent = clock.words(finish);
    } catch (error) {
      if (error.name === "AbortError") {
        note.textContent = clock.words("stopped");
      } else {
        const wait = error.retryAfter ? ` Try again in ${Math.ceil(error.retryAfter)} s.` : "";
        answer.append(h("p", { class: "error", role: "alert" }, `${error.message}.${wait}`.replace("..", ".")));
      }
    } finally {
      this.running = null;
      this.busy(false);
    }
    if (said) this.messages.push({ role: "assistant", content: said });
    else this.messages.pop();
    this.log.scrollTop = this.log.scrollHeight;
  }

  busy(on) {
    this.send.hidden = on;
    this.stop.hidden = !on;
    this.log.setAttribute("aria-busy", String(on)); // announced when it is whole, not letter by letter
    (on ? this.stop : this.box).focus({ preventScroll: true });
  }
}

function bubble(role, text) {
  const who = role === "user" ? "You" : "Model";
  return h("article", { class: `bubble ${role}` }, h("p", { class: "who" }, who), h("div", { class: "said" }, text), h("p", { class: "note" }));
}

// When tokens came; `usage` as the server counted them.
class Clock {
  constructor() {
    this.began = performance.now();
    this.pieces = 0;
    this.usage = null;
  }

  piece() {
    this.last = performance.now();
    this.first ??= this.last;
    this.pieces += 1;
  }

  words(finish) {
    if (!this.pieces) return finish === "stopped" ? "stopped before the first token" : "an empty answer";
    const tokens = this.usage?.completion_tokens ?? this.pieces;
    const spent = (this.last - this.first) / 1000;
    const parts = [`${count(tokens)} token${tokens === 1 ? "" : "s"}`];
    if (tokens > 1 && spent > 0) parts.push(`${three((tokens - 1) / spent)} tokens/s`);
    parts.push(`first after ${seconds((this.first - this.began) / 1000)}`);
    if (finish === "length") parts.push("cut at the most tokens");
    if (finish === "stopped") parts.push("stopped");
    return parts.join(" · ");
  }
}
