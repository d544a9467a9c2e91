// Client of the server's public API: the model list, and a chat as a stream of chunks.

class ApiError extends Error {
  constructor(message, { status = 0, code = null, param = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.param = param;
  }

  // Whether the answer is missing or incomplete because the server or the network is down.
  get lost() {
    return this.code === "unreachable" || this.code === "broken_off";
  }
}

function headers(key) {
  const given = { "content-type": "application/json" };
  // Headers hold bytes: the key is sent as UTF-8, as the server reads it.
  if (key) given.authorization = "Bearer " + String.fromCharCode(...new TextEncoder().encode(key));
  return given;
}

async function send(path, options) {
  let answer;
  try {
    answer = await fetch(path, options);
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ApiError("The server does not answer.", { code: "unreachable" });
  }
  if (!answer.ok) throw await refusal(answer);
  return answer;
}

async function refusal(answer) {
  let error = {};
  try {
    error = (await answer.json()).error || {};
  } catch {
    // The body is not JSON but, for example, a proxy's error page, so only the status is shown.
  }
  // A proxy answers 502 or 504 if the server is down.
  const code = error.code ?? (answer.status === 502 || answer.status === 504 ? "unreachable" : null);
  return new ApiError(error.message || `the server answered ${answer.status}`, { status: answer.status, code, param: error.param });
}

export async function models(key, { signal } = {}) {
  const answer = await send("v1/models", { headers: headers(key), signal });
  return (await answer.json()).data;
}

export async function healthy({ signal } = {}) {
  await send("health", { signal });
}

// The chunks of a streamed chat as they come. Aborting the signal disconnects, and the server cancels the request.
export async function* chat(body, { key, signal } = {}) {
  const answer = await send("v1/chat/completions", {
    method: "POST",
    headers: headers(key),
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const event of events(answer.body, signal)) {
    if (event === "[DONE]") return;
    const chunk = JSON.parse(event);
    if (chunk.error) throw new ApiError(chunk.error.message, { code: chunk.error.code, param: chunk.error.param });
    yield chunk;
  }
  throw new ApiError("The connection ended before the reply did.", { code: "broken_off" });
}

// Parses server-sent events: an event ends at an empty line, which any network chunk may contain or split.
export async function* events(stream, signal) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let pending = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        throw signal?.aborted ? error : new ApiError("The connection ended before the reply did.", { code: "broken_off" });
      });
      if (done) return;
      pending += decoder.decode(value, { stream: true });
      let end;
      while ((end = pending.indexOf("\n\n")) >= 0) {
        const lines = pending.slice(0, end).split("\n");
        pending = pending.slice(end + 2);
        const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        if (data.length) yield data.join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
