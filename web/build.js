// Bundles src/ into the package: page.js with the licences of what went in, page.css and page.html.

import { build } from "esbuild";
import { readFileSync, writeFileSync } from "node:fs";

const out = process.argv[2] ?? new URL("../src/multihead/show/assets/", import.meta.url).pathname;
const here = (path) => new URL(path, import.meta.url).pathname;

const { metafile, outputFiles } = await build({
  entryPoints: [here("src/page.js"), here("src/page.css")],
  absWorkingDir: here("."),
  outdir: out,
  bundle: true,
  minify: true,
  charset: "ascii",
  format: "iife",
  target: ["chrome123", "firefox121", "safari17.5"],
  legalComments: "none",
  metafile: true,
  write: false,
});

// Every report carries the bundle, so the bundle carries the licences: each text once, after those it covers.
const names = new Set(Object.keys(metafile.inputs).map((path) => path.match(/^node_modules\/([^/]+)\//)?.[1]));
const covered = new Map();
for (const name of [...names].filter(Boolean).sort()) {
  const { version } = JSON.parse(readFileSync(here(`node_modules/${name}/package.json`)));
  const [owner, ...terms] = readFileSync(here(`node_modules/${name}/LICENSE`), "utf8").trim().split("\n");
  const text = terms.join("\n").trim();
  covered.set(text, [...(covered.get(text) ?? []), `${name} ${version}. ${owner}`]);
}
const notice = [...covered].map(([text, owners]) => `${owners.join("\n")}\n\n${text}`).join("\n\n");

for (const { path, text } of outputFiles) {
  writeFileSync(path, path.endsWith(".js") ? `/*!\nThis script holds code of these packages.\n\n${notice}\n*/\n${text}` : text);
}
writeFileSync(`${out}/page.html`, readFileSync(here("src/page.html")));
