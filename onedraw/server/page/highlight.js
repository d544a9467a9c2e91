// Colours for code: comments, strings, numbers, keywords and called names, by one regular expression per language.

const LONGEST = 100_000; // a longer text is shown without colours
const MOST_PARTS = 4000; // Text after this many coloured parts is shown without colours, since the browser must lay out every part.

const words = (text) => text.split(" ");
const C_WORDS = "break case const continue default do else enum for goto if return sizeof static struct switch typedef union void while int long short char float double unsigned signed bool true false NULL";
const JS_WORDS = "async await break case catch class const continue debugger default delete do else export extends false finally for from function get if import in instanceof let new null of return set static super switch this throw true try typeof undefined var void while with yield";
const SQL_WORDS = "add all alter and as asc begin between by case check column commit constraint create database default delete desc distinct drop else end exists foreign from full group having if in index inner insert into is join key left like limit not null offset on or order outer primary references right rollback select set table then union unique update values view when where with";

const LANGUAGES = {
  python: { comment: "#[^\\n]*", string: `[rRbBfFuU]{0,2}(?:"""[\\s\\S]*?(?:"""|$)|'''[\\s\\S]*?(?:'''|$)|"(?:[^"\\\\\\n]|\\\\.)*"?|'(?:[^'\\\\\\n]|\\\\.)*'?)`, words: "and as assert async await break case class continue def del elif else except False finally for from global if import in is lambda match None nonlocal not or pass raise return self True try while with yield" },
  javascript: { comment: "//[^\\n]*|/\\*[\\s\\S]*?(?:\\*/|$)", string: "\"(?:[^\"\\\\\\n]|\\\\.)*\"?|'(?:[^'\\\\\\n]|\\\\.)*'?|`(?:[^`\\\\]|\\\\[\\s\\S])*`?", words: JS_WORDS + " interface type implements private public protected readonly enum namespace declare abstract as any string number boolean never unknown" },
  c: { comment: "//[^\\n]*|/\\*[\\s\\S]*?(?:\\*/|$)|^[ ]*#[^\\n]*", string: "\"(?:[^\"\\\\\\n]|\\\\.)*\"?|'(?:[^'\\\\\\n]|\\\\.)*'?", words: C_WORDS + " abstract as async auto await base boolean byte catch chan class decimal defer delegate extends extern fallthrough final finally fn foreach fun func go impl implements import in inline instanceof interface internal let loop map match mod mut namespace new nil null nullptr object override package private protected pub public range ref self select Self std string super template this throw throws trait try type typename use using val var virtual where yield" },
  shell: { comment: "(?<![^\\s])#[^\\n]*", string: "\"(?:[^\"\\\\]|\\\\[\\s\\S])*\"?|'[^']*'?", words: "case do done elif else esac exit export fi for function if in local read return set shift source then unset until while cd echo sudo" },
  json: { comment: "//[^\\n]*", string: "\"(?:[^\"\\\\\\n]|\\\\.)*\"?", words: "true false null" },
  sql: { comment: "--[^\\n]*|/\\*[\\s\\S]*?(?:\\*/|$)", string: "'(?:[^']|'')*'?", words: SQL_WORDS, loose: true },
  yaml: { comment: "(?<![^\\s])#[^\\n]*", string: "\"(?:[^\"\\\\\\n]|\\\\.)*\"?|'[^'\\n]*'?", words: "true false null yes no on off" },
  html: { comment: "<!--[\\s\\S]*?(?:-->|$)", string: "\"[^\"\\n]*\"|'[^'\\n]*'", words: "", name: "</?[A-Za-z][\\w-]*" },
  css: { comment: "/\\*[\\s\\S]*?(?:\\*/|$)", string: "\"[^\"\\n]*\"|'[^'\\n]*'", words: "important media supports import keyframes", name: "[\\w-]+(?=\\s*:)" },
};
const ALIASES = { py: "python", python3: "python", js: "javascript", jsx: "javascript", ts: "javascript", tsx: "javascript", typescript: "javascript", mjs: "javascript", "c++": "c", cpp: "c", cc: "c", h: "c", hpp: "c", cs: "c", csharp: "c", java: "c", kotlin: "c", kt: "c", swift: "c", go: "c", golang: "c", rust: "c", rs: "c", php: "c", scala: "c", dart: "c", cuda: "c", bash: "shell", sh: "shell", zsh: "shell", console: "shell", dockerfile: "shell", make: "shell", makefile: "shell", jsonc: "json", json5: "json", yml: "yaml", toml: "yaml", ini: "yaml", xml: "html", svg: "html" };

const compiled = new Map();

function scanner(language) {
  const name = ALIASES[language] ?? language;
  const rules = Object.hasOwn(LANGUAGES, name) ? LANGUAGES[name] : null;
  if (!rules) return null;
  if (!compiled.has(name)) {
    const parts = [
      `(?<comment>${rules.comment})`,
      `(?<string>${rules.string})`,
      rules.name ? `(?<name>${rules.name})` : null,
      "(?<number>\\b(?:0[xXbBoO][\\da-fA-F_]+|\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?)\\b)",
      "(?<call>[A-Za-z_$][\\w$]*(?=\\())|(?<word>[A-Za-z_$][\\w$]*)",
    ];
    const list = new Set(words(rules.words));
    const keyword = rules.loose ? (word) => list.has(word.toLowerCase()) : (word) => list.has(word);
    compiled.set(name, { pattern: new RegExp(parts.filter(Boolean).join("|"), "gm"), keyword });
  }
  return compiled.get(name);
}

// Splits code into [{text, kind}]; kind is null for plain text.
export function highlight(text, language) {
  const known = text.length <= LONGEST ? scanner(language.toLowerCase()) : null;
  if (!known) return [{ text, kind: null }];
  const found = [];
  let at = 0;
  for (const match of text.matchAll(known.pattern)) {
    const { comment, string, name, number, word, call } = match.groups;
    const kind = comment !== undefined ? "comment" : string !== undefined ? "string" : number !== undefined ? "number"
      : name !== undefined ? "name" : known.keyword(call ?? word) ? "keyword" : call !== undefined ? "name" : null;
    if (kind === null) continue;
    if (found.length >= MOST_PARTS) break;
    if (match.index > at) found.push({ text: text.slice(at, match.index), kind: null });
    const last = found.at(-1);
    if (last?.kind === kind) last.text += match[0];
    else found.push({ text: match[0], kind });
    at = match.index + match[0].length;
  }
  if (at < text.length) found.push({ text: text.slice(at), kind: null });
  return found;
}
