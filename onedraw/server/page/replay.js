// Replays a reply (the same request with the same seed), compares the tokens of both, and words the result.

import { spelled } from "./dom.js";
import { firstDifference, Reply } from "./reply.js";

// A reply to the same request with the recorded seed, with or without drafts. A reply that broke off is replayed
// up to its last token.
export function replayOf(reply, { speculation }) {
  const fields = { ...reply.fields, seed: reply.seed, speculation };
  if (reply.partial) {
    delete fields.max_completion_tokens;
    fields.max_tokens = reply.tokens.length;
    if (fields.min_tokens > fields.max_tokens) fields.min_tokens = fields.max_tokens;
  }
  return new Reply({ fields, system: reply.system });
}

// Compares the tokens of a replay with those of the original reply, and returns {same, text}: whether they are equal, and the
// result in words.
export function compared(before, now, how) {
  const difference = firstDifference(before, now, { partial: before.partial || now.partial });
  if (difference) {
    const named = (token) => (token ? `“${spelled(token.text)}”` : "the end");
    const text = `Different ${how}, first at token ${difference.index + 1}: ${named(difference.then)} before, ${named(difference.now)} now.`;
    return { same: false, text: text + (before.fingerprint === now.fingerprint ? "" : " The server has changed meanwhile.") };
  }
  return { same: true, text: `Same tokens ${how}: ${Math.min(before.tokens.length, now.tokens.length)} of ${before.tokens.length}` };
}
