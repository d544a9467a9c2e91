// Runs a request to its end, and shows a reply while it is being written.

import { chat } from "./api.js";

// Reads chunks into the reply; `onchunk` is called after each. Returns the error that ended the stream, or null if it
// was complete or the user stopped it.
export async function stream(reply, messages, { key, signal, extra = {}, onchunk }) {
  try {
    for await (const chunk of chat({ ...reply.fields, ...extra, messages }, { key, signal })) {
      reply.add(chunk);
      onchunk();
    }
    reply.end();
  } catch (error) {
    if (!signal.aborted) {
      reply.end({ error });
      return error;
    }
    reply.end({ stopped: true });
  }
  return null;
}

// Calls `show` at most once per frame, and if a call takes over 4 ms, for at most a fifth of the time, so that a long reply does
// not stall the page.
export class Painter {
  constructor(show) {
    this.show = show;
    this.frame = 0;
    this.rest = 0; // `show` is not called before this time
  }

  ask() {
    this.frame ||= requestAnimationFrame(() => this.paint());
  }

  paint() {
    this.frame = 0;
    const now = performance.now();
    if (now < this.rest) {
      this.ask();
      return;
    }
    this.show();
    const took = performance.now() - now;
    this.rest = took > 4 ? now + took * 5 : 0;
  }

  end() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
  }
}
