// Client of the server's public API: the model list, and a chat as a stream of chunks.

export class ApiError extends Error {
  constructor(message, { status = 0, code = null, param = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.param = param;
  }
}

function headers(key) {
  const given = { "content-type": "application/json" };
  // Headers hold bytes: the key is sent as UTF-8, as the server reads it.
  if (key) given.authorization = "Bearer " + String.fromCharCode(...new TextEncoder().encode(key));
  return given;
}

async function refusal(answer) {
  let error = {};
  try {
    error = (await answer.json()).error || {};
  } catch {
    // not JSON, such as a proxy's error page: the status is shown alone
  }
  return new ApiError(error.message || `the server answered ${answer.status}`, { status: answer.status, code: error.code, param: error.param });
}

export async function models(key) {
  const answer = await fetch("v1/models", { headers: headers(key) });
  if (!answer.ok) throw await refusal(answer);
  return (await answer.json()).data;
}

// The chunks of a streamed chat as they come. Aborting the signal disconnects, and the server cancels the request.
export async function* chat(body, { key, signal } = {}) {
  const answer = await fetch("v1/chat/completions", {
    method: "POST",
    headers: headers(key),
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!answer.ok) throw await refusal(answer);
  for await (const event of events(answer.body)) {
    if (event === "[DONE]") return;
    const chunk = JSON.parse(event);
    if (chunk.error) throw new ApiError(chunk.error.message, { code: chunk.error.code, param: chunk.error.param });
    yield chunk;
  }
  throw new ApiError("the connection ended before the reply did");
}

// Parses server-sent events: an event ends at an empty line, which any network chunk may contain or split.
export async function* events(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let pending = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
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
