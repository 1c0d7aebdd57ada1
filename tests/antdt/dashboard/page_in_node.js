// Runs the page's script on a document of a few lines, and prints the text that it would show.
// Usage: node page_in_node.js PAGE < STATE; a browser is the better judge where there is one.
"use strict";
const fs = require("fs");
const vm = require("vm");

class Node {
  constructor(tag) { this.tag = tag; this.attributes = {}; this.children = []; this.hidden = false; this.style = {}; }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  append(...inside) { this.children.push(...inside); }
  replaceChildren(...inside) { this.children = inside; }
  set textContent(text) { this.children = [text]; }
  get textContent() { return this.children.map(child => child instanceof Node ? child.textContent : child).join(""); }
  get tBodies() { return this.children; }
  get classList() { return { add: name => { this.className = `${this.className || ""} ${name}`; } }; }
  querySelector(tag) {
    for (const child of this.children) {
      if (!(child instanceof Node)) continue;
      const found = child.tag === tag ? child : child.querySelector(tag);
      if (found) return found;
    }
    return null;
  }
  // Blocks on lines of their own; what is hidden is not shown.
  text() {
    if (this.hidden) return "";
    const inside = this.children.map(child => child instanceof Node ? child.text() : child).join("");
    return ["tr", "li", "div", "p", "h2"].includes(this.tag) ? `${inside}\n` : ["td", "b", "dt"].includes(this.tag) ? `${inside} ` : inside;
  }
}

const html = fs.readFileSync(process.argv[2], "utf8");
const known = {};
for (const [, tag, id] of html.matchAll(/<(\w+)[^>]* id="(\w+)"/g)) known[id] = new Node(tag);
known.workers.append(new Node("tbody"));
known.now.textContent = fs.readFileSync(0, "utf8");
const document = {
  getElementById: id => known[id] ?? null,
  createElement: tag => new Node(tag),
  createElementNS: (_, tag) => new Node(tag),
};
const script = html.match(/<script>\n([\s\S]*)<\/script>/)[1];
vm.runInNewContext(script, { document, Node, EventSource: class {}, Date, JSON, console });
known.now.children = [];
console.log(`title: ${document.title}`);
for (const node of Object.values(known)) process.stdout.write(`${node.text()}\n`);
