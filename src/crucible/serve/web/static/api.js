// The native API. Paths are relative, so that the page also works below a proxy's prefix.

const KEY = "crucible.key";

export class ApiError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

let askForKey = null;
let asking = null;
let isDeclined = false; // what nobody has asked for just now does not ask again

// How a key is got: a function that resolves to one, or to null.
export function onKeyNeeded(ask) {
  askForKey = ask;
}

async function call(path, { body, accept, signal, isAutomatic = false } = {}) {
  for (;;) {
    const headers = { accept: accept ?? "application/json" };
    const key = sessionStorage.getItem(KEY);
    if (key) headers["x-api-key"] = key;
    if (body !== undefined) headers["content-type"] = "application/json";
    let response;
    try {
      response = await fetch(path, { method: body === undefined ? "GET" : "POST", headers, body: body && JSON.stringify(body), signal });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, "The server cannot be reached.");
    }
    if (response.status !== 401 || !askForKey) return response;
    if (sessionStorage.getItem(KEY) === key) {
      // One question, whatever number of requests wait for its answer.
      const given = isAutomatic && isDeclined ? null : await (asking ??= askForKey(key != null).finally(() => (asking = null)));
      isDeclined = !given;
      if (!given) throw new ApiError(401, "The server asks for a key.");
      sessionStorage.setItem(KEY, given);
    }
  }
}

async function checked(response) {
  if (response.ok) return response;
  let told = null;
  try {
    told = (await response.json()).error;
  } catch {
    // A proxy's error has another shape.
  }
  throw new ApiError(response.status, told?.message ?? `The server answered ${response.status}.`, told?.code);
}

// What the server last said of itself.
export let served = {};

export async function health() {
  served = await (await call("health")).json();
  return served;
}

export async function metrics() {
  return (await checked(await call("metrics", { isAutomatic: true }))).json();
}

export async function tokenize(body) {
  return (await checked(await call("v1/tokenize", { body }))).json();
}

// Events of a native stream, as they come: [name, data].
export async function* stream(body, signal) {
  const response = await checked(await call("v1/generate/stream", { body, accept: "text/event-stream", signal }));
  yield* events(response.body);
}

// Server-sent events of a stream of bytes. One that is cut off is not given.
export async function* events(bytes) {
  const reader = bytes.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        let name = "message";
        const data = [];
        for (const line of block.split("\n")) {
          if (line.startsWith("event:")) name = line.slice(6).trim();
          else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
        }
        if (data.length) yield [name, JSON.parse(data.join("\n"))];
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Runs a request to its end. `onToken` sees each token; the result is what a reply is remembered by.
export async function generate(request, { signal, onToken } = {}) {
  const result = { text: "", token_ids: [], status: "done", error: null, seed: request.seed ?? null, usage: null, finish: null, first: null, rate: null };
  const began = performance.now();
  let firstAt = 0;
  let lastAt = 0;
  try {
    for await (const [name, data] of stream(request, signal)) {
      if (name === "token") {
        lastAt = performance.now();
        if (!result.token_ids.length) {
          firstAt = lastAt;
          result.first = (lastAt - began) / 1000;
        }
        result.token_ids.push(data.token_id);
        result.text += data.text;
        onToken?.(data, result);
      } else if (name === "done") {
        result.usage = data.usage;
        result.finish = data.finish_reason;
        result.seed = data.seed;
      } else if (name === "error") {
        throw new ApiError(200, data.error.message, data.error.code);
      }
    }
    if (result.finish == null) throw new ApiError(200, "The reply was cut off: the connection ended.");
  } catch (error) {
    if (signal?.aborted) {
      result.status = "stopped";
    } else {
      result.status = "error";
      result.error = error instanceof ApiError ? error.message : "The reply was cut off: the connection ended.";
    }
  }
  const gaps = result.token_ids.length - 1;
  result.rate = gaps > 0 && lastAt > firstAt ? (gaps / (lastAt - firstAt)) * 1000 : null;
  return result;
}
