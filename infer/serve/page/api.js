// Requests to this server, with the key when there is one. Addresses are relative, so a prefix in front does no harm.

const STORE = "infer-api-key";

export class RequestError extends Error {
  constructor(status, message, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

export function setKey(key) {
  if (key) sessionStorage.setItem(STORE, key);
  else sessionStorage.removeItem(STORE);
}

export function hasKey() {
  return sessionStorage.getItem(STORE) !== null;
}

function headers(more) {
  const key = sessionStorage.getItem(STORE);
  return key === null ? { ...more } : { ...more, Authorization: `Bearer ${key}` };
}

async function checked(path, options) {
  let answer;
  try {
    answer = await fetch(path, { cache: "no-store", ...options, headers: headers(options?.headers) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestError(0, "the server can't be reached");
  }
  if (answer.ok) return answer;
  let message = `the server answered ${answer.status}`;
  try {
    const said = (await answer.json()).error;
    message = typeof said === "string" ? said : said?.message ?? message;
  } catch {
    // Not JSON, such as from a proxy: the status is all there is to say.
  }
  const after = Number(answer.headers.get("retry-after-ms")) / 1000 || Number(answer.headers.get("retry-after"));
  throw new RequestError(answer.status, message, after || null);
}

export async function get(path) {
  return (await checked(path)).json();
}

export async function post(path, body, options = {}) {
  const init = { method: "POST", body: JSON.stringify(body), ...options };
  return checked(path, { ...init, headers: { "Content-Type": "application/json", ...options.headers } });
}

// A form with a file; the browser names the media type and its boundary.
export async function send(path, form) {
  return checked(path, { method: "POST", body: form });
}

// The JSON of every `data:` line until [DONE]; a comment keeps the connection and says nothing.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new RequestError(event.error.code ?? 500, event.error.message);
      yield event;
    }
  }
}
