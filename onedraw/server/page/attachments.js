// Text files that are sent with a message: read and bounded here, and written into the message as fenced blocks.

import { button, icon, make, sized } from "./dom.js";

const MOST_FILES = 8;
const LARGEST = 256 * 1024; // most bytes of one file
const LARGEST_TOGETHER = 512 * 1024;

// Reads a file as text. Throws an error that says why if the file is too large or is not text.
async function read(file) {
  if (file.size > LARGEST) throw new Error(`${file.name} has ${sized(file.size)}; a file may have ${sized(LARGEST)}`);
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} is not a text file (UTF-8)`);
  }
  if (text.includes("\0")) throw new Error(`${file.name} is not a text file`);
  return { name: file.name.slice(0, 200), text };
}

// The text of the message that is sent to the model, with the files in it.
export function withFiles(text, files) {
  const blocks = files.map((file) => {
    const longest = Math.max(2, ...[...file.text.matchAll(/`+/g)].map(([ticks]) => ticks.length));
    const fence = "`".repeat(longest + 1);
    return `File ${JSON.stringify(file.name)}:\n${fence}\n${file.text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...blocks, ...(text ? [text] : [])].join("\n\n");
}

const bytes = (text) => new TextEncoder().encode(text).length;

// The files that are attached to the next message.
export class Attachments {
  constructor(list, say) {
    this.list = list;
    this.say = say;
    this.files = [];
  }

  async add(files) {
    for (const file of files) {
      try {
        if (this.files.length >= MOST_FILES) throw new Error(`a message may have ${MOST_FILES} files`);
        const added = await read(file);
        const together = [...this.files, added].reduce((sum, { text }) => sum + bytes(text), 0);
        if (together > LARGEST_TOGETHER) throw new Error(`the files of a message may have ${sized(LARGEST_TOGETHER)} together`);
        this.files.push(added);
        this.say(`${added.name} is attached`);
      } catch (error) {
        this.say(`Not attached: ${error.message}`, { wrong: true });
      }
    }
    this.draw();
  }

  take() {
    const { files } = this;
    this.files = [];
    this.draw();
    return files;
  }

  draw() {
    this.list.replaceChildren(...this.files.map((file) => {
      const remove = button("close", `Remove ${file.name}`, () => {
        this.files = this.files.filter((other) => other !== file);
        this.draw();
      });
      return make("li", { class: "file" }, icon("file"), make("span", {}, file.name), make("span", { class: "muted" }, sized(bytes(file.text))), remove);
    }));
    this.list.hidden = !this.files.length;
  }
}

// A file of a sent message, which opens to show its text.
export function fileView(file) {
  return make("details", { class: "sent-file" },
    make("summary", {}, icon("file"), `${file.name} `, make("span", { class: "muted" }, sized(bytes(file.text)))),
    make("pre", { tabindex: "0", role: "group", "aria-label": file.name }, file.text));
}
