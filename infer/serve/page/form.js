// Trying a model of tensors: a form made of its inputs.

import { get, post } from "./api.js";
import { field, h } from "./dom.js";
import { ImageInput, imageLayout } from "./image.js";
import { MediaForm } from "./media.js";
import { cosines, ranked, shown, summary, timing } from "./result.js";
import { flatten, infer, nest, product } from "./tensors.js";

const MOST_TYPED = 4096; // numbers that still make sense in a text box
const SOME = 8; // of a size that may vary
const SENTENCES = "How do I read a file line by line?\nOpening a file and looping over it\nThe weather is fine today";

// Elements of a form and its answer for one model.
export function tensorForm(model) {
  const result = h("div", { class: "result", role: "region", "aria-live": "polite", "aria-label": "Answer" });
  const button = h("button", { class: "primary", type: "submit" }, "Run");
  const form = formOf(model);
  const element = h("form", { class: "try", onsubmit: (event) => { event.preventDefault(); run(); } },
    ...form.elements, h("div", { class: "row" }, button, ...form.buttons), result);

  async function run() {
    button.disabled = true;
    result.setAttribute("aria-busy", "true");
    try {
      result.replaceChildren(...(await form.run()));
    } catch (error) {
      const wait = error.retryAfter ? ` Try again in ${Math.ceil(error.retryAfter)} s.` : "";
      result.replaceChildren(h("p", { class: "error" }, `${error.message}.${wait}`.replace("..", ".")));
    } finally {
      button.disabled = false;
      result.removeAttribute("aria-busy");
    }
  }
  return element;
}

function formOf(model) {
  if (model.files) return new MediaForm(model);
  if (!model.tokenizes) return new TensorForm(model);
  if (model.task !== "classification") return new TextForm(model);
  return model.outputs[0].shape.at(-1) === 1 ? new RankForm(model) : new LabelForm(model);
}

// Documents in the order in which a cross-encoder finds them relevant to a query.
class RankForm {
  constructor(model) {
    this.model = model;
    this.query = h("input", { type: "text", value: SENTENCES.split("\n")[0] });
    this.box = h("textarea", { rows: 4, spellcheck: "false", value: SENTENCES.split("\n").slice(1).join("\n") });
    this.elements = [field("Query", this.query), field("Documents, one a line", this.box)];
    this.buttons = [];
  }

  async run() {
    const documents = lines(this.box.value), began = performance.now();
    const body = { model: this.model.name, query: this.query.value, documents };
    const answer = await (await post("v1/rerank", body)).json();
    const rows = answer.results.map((each) => [documents[each.index], each.relevance_score]);
    return [spent(began, answer.usage), ranked("Documents, the most relevant first", rows)];
  }
}

// The label of each text, and its probability.
class LabelForm {
  constructor(model) {
    this.model = model;
    this.box = h("textarea", { rows: 4, spellcheck: "false", value: SENTENCES });
    this.second = h("input", { type: "text" });
    this.elements = [field("Texts, one a line", this.box), field("Second text", this.second, "For models of pairs; it goes with each line")];
    this.buttons = [];
  }

  async run() {
    if (this.second.value.trim()) return this.pairs(lines(this.box.value), this.second.value);
    const input = lines(this.box.value), began = performance.now();
    const answer = await (await post("classify", { model: this.model.name, input })).json();
    const rows = answer.data.map((each) => [`${each.label}: ${input[each.index]}`, Math.max(...each.probs)]);
    return [spent(began, answer.usage), ranked("Label of each text", rows)];
  }

  async pairs(first, second) {
    const began = performance.now();
    const inputs = first.map((text) => [text, second]);
    const answer = await (await post("predict", { model: this.model.name, inputs })).json();
    const rows = answer.map(([best], at) => [`${best.label}: ${first[at]}`, best.score]);
    return [timing({ seconds: (performance.now() - began) / 1000 }), ranked("Label of each pair", rows)];
  }
}

function lines(text) {
  const found = text.split("\n").filter((line) => line.trim());
  if (!found.length) throw new Error("Enter at least one line");
  return found;
}

function spent(began, usage) {
  const time = timing({ seconds: (performance.now() - began) / 1000 });
  time.textContent += ` · ${usage.prompt_tokens} tokens`;
  return time;
}

class TextForm {
  constructor(model) {
    this.model = model;
    this.box = h("textarea", { rows: 4, spellcheck: "false", value: SENTENCES });
    this.elements = [field(model.task === "embedding" ? "Texts to compare, one a line" : "Texts, one a line", this.box)];
    this.buttons = [];
  }

  async run() {
    const texts = lines(this.box.value);
    if (this.model.task !== "embedding") {
      const input = { name: "text", datatype: "BYTES", shape: [texts.length], data: texts };
      return shown(this.model, await infer(this.model, [input]));
    }
    const began = performance.now();
    const answer = await (await post("v1/embeddings", { model: this.model.name, input: texts })).json();
    const vectors = answer.data.map((each) => each.embedding.map(Number));
    const time = spent(began, answer.usage);
    time.textContent += ` · ${vectors[0].length} dimensions`;
    return [time, texts.length > 1 ? cosines(texts, vectors) : summary(vectors[0])];
  }
}

class TensorForm {
  constructor(model) {
    this.model = model;
    this.inputs = model.inputs.map((input) => {
      const layout = imageLayout(input, model.sizes);
      return layout ? new ImageInput(input, layout) : new NumberInput(input, model.sizes);
    });
    const legend = (input) => h("legend", {}, input.name, h("span", { class: "soft" }, ` ${input.datatype} [${input.shape.join(", ")}]`));
    this.elements = this.inputs.map((part) => h("fieldset", {}, legend(part.input), part.element));
    this.buttons = model.example ? [h("button", { type: "button", onclick: () => this.example() }, "Use an example")] : [];
  }

  async example() {
    const request = await get(`ops/models/${this.model.name}/example`);
    for (const { name, shape, data } of request.inputs) {
      this.inputs.find((part) => part.input.name === name).set(data.map(Number), shape);
    }
  }

  async run() {
    return shown(this.model, await infer(this.model, this.inputs.map((part) => part.read())));
  }
}

// Numbers as JSON; more than fit into a text box are kept beside it.
class NumberInput {
  constructor(input, sizes) {
    this.input = input;
    this.shape = input.shape.map((size, at) => (typeof size === "number" ? size : this.size(size, at, sizes)));
    this.box = h("textarea", { rows: 4, spellcheck: "false", class: "code", oninput: () => { this.kept = null; } });
    const make = (name, value) => h("button", { type: "button", class: "small", onclick: () => this.fill(value) }, name);
    const random = () => (/INT/.test(input.datatype) ? Math.floor(Math.random() * 10) : Number(gauss().toFixed(4)));
    this.element = h("div", {}, field("Values as JSON", this.box, "Nested lists; their lengths are the shape"),
      h("div", { class: "row" }, make("Zeros", () => 0), make("Random", random)));
    this.fill(() => 0);
  }

  size(name, at, sizes) {
    const [low, high] = sizes[name] ?? [1, SOME];
    return at === 0 ? Math.max(low, 1) : Math.min(Math.max(low, SOME), high);
  }

  fill(value) {
    this.set(Array.from({ length: product(this.shape) }, value), this.shape);
  }

  set(data, shape) {
    this.kept = { data, shape };
    const text = data.length > MOST_TYPED ? `${data.length.toLocaleString("en-US")} numbers in shape ${shape.join(" × ")}` : JSON.stringify(nest(data, shape));
    this.box.value = text;
  }

  read() {
    const { name, datatype } = this.input;
    if (this.kept) return { name, datatype, shape: this.kept.shape, data: this.typed(this.kept.data) };
    let nested;
    try {
      nested = JSON.parse(this.box.value);
    } catch (error) {
      throw new Error(`${name} is not JSON: ${error.message}`);
    }
    const { data, shape } = flatten(nested);
    return { name, datatype, shape, data: this.typed(data) };
  }

  typed(data) {
    return this.input.datatype === "BOOL" ? data.map(Boolean) : data;
  }
}

function gauss() {
  return Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random());
}
