// The page: which head, which role and which text are shown, and everything that follows from these three.

import { scaleLinear } from "d3-scale";
import { select } from "d3-selection";
import { data, heads, views } from "./data.js";
import { drawGrid, number } from "./grid.js";
import { drawMap } from "./map.js";

const byId = (id) => document.getElementById(id);
const state = { head: firstHead(), role: null, view: views[0] };
const grid = drawGrid(byId("grid"), (head) => update({ head }));
const map = drawMap(byId("frame"), byId("scale"), read);

function firstHead() {
  const found = data.roles.find((role) => role.name === "induction") ?? data.roles[0];
  const shown = heads.filter((head) => head.shown);
  return shown.reduce((best, head) => ((found?.lift[head.index] ?? -1) > (found?.lift[best.index] ?? -1) ? head : best));
}

function update(change) {
  Object.assign(state, change);
  const { head, role, view } = state;
  grid.paint(head, role);
  select("#legend").selectAll("button").attr("aria-pressed", (entry) => entry === role);
  select("#views").selectAll("button").attr("aria-pressed", (entry) => entry === view);
  byId("shading").textContent = role
    ? `Score of every head as “${role.name}”, in percent; outlined: the heads that carry the label.`
    : "Each head's main role. Choose a role to see how every head scores in it.";
  byId("head-title").textContent = head.role ? `Head ${head.name} · ${head.role.name}` : `Head ${head.name} · no clear role`;
  map.show(view, view.map(head.index));
  bars(head);
  statistics(head);
}

function header() {
  const { model } = data;
  document.title = `${model.name} · multihead`;
  byId("name").textContent = model.name;
  const shared = model.kind === "MHA" ? "" : `, ${model.kvHeads} key/value head${model.kvHeads > 1 ? "s" : ""}`;
  byId("facts").textContent = [
    model.architecture,
    `${model.layers} layers`,
    `${model.heads} ${shared ? "query heads" : "heads"}${shared} (${model.kind})`,
    `d_head ${model.dHead}`,
    model.causal ? "causal" : "bidirectional",
    `${(model.parameters / 1e6).toFixed(1)}M parameters`,
    `seen in ${number(model.seconds, 1)} s, peak memory ${(model.peakMemory / 1e9).toFixed(2)} GB`,
  ].join(" · ");
  byId("notes").textContent = data.notes.join(" · ");
}

function legend() {
  const count = (role) => heads.filter((head) => head.shown && head.role === role).length;
  const buttons = select("#legend")
    .selectAll("button")
    .data([null, ...data.roles])
    .join("button")
    .attr("type", "button")
    .style("--light", (role) => role?.light)
    .style("--dark", (role) => role?.dark)
    .on("click", (_, role) => update({ role: role === state.role ? null : role }));
  buttons.filter((role) => role).append("span").attr("class", "tile").text((role) => role.letter);
  buttons.append("span").text((role) => role?.name ?? "all roles");
  buttons.filter((role) => role && count(role)).append("small").text(count);
}

function viewButtons() {
  select("#views")
    .selectAll("button")
    .data(views)
    .join("button")
    .attr("type", "button")
    .text((view) => (view.exact ? `${view.name}, exact` : `${view.name}, ${view.tokens.length} tokens`))
    .on("click", (_, view) => update({ view }));
}

function bars(head) {
  const rows = select("#bars")
    .selectAll("div.role")
    .data(data.roles.filter((role) => role.score[head.index] != null), (role) => role.name)
    .join((enter) => {
      const row = enter.append("div").attr("class", "role");
      row.append("span").attr("class", "tile").text((role) => role.letter);
      row.append("span").attr("class", "name").text((role) => role.name);
      const track = row.append("span").attr("class", "track");
      track.append("i").attr("class", "score");
      track.append("i").attr("class", "baseline");
      row.append("span").attr("class", "value");
      return row;
    })
    .order()
    .style("--light", (role) => role.light)
    .style("--dark", (role) => role.dark)
    .classed("labelled", (role) => role.label[head.index])
    .attr("title", (role) =>
      `score ${number(role.score[head.index], 3)}, baseline ${number(role.baseline[head.index], 3)}, lift ${number(role.lift[head.index], 3)}`);
  rows.select(".score").style("width", (role) => `${100 * clamp(role.score[head.index])}%`);
  rows.select(".baseline").style("left", (role) => `${100 * clamp(role.baseline[head.index] ?? 0)}%`);
  rows.select(".value").text((role) => number(role.score[head.index]));
}

function statistics(head) {
  const rows = select("#statistics")
    .selectAll("div")
    .data(data.statistics)
    .join((enter) => {
      const row = enter.append("div");
      row.append("dt").text((entry) => entry.title).attr("title", (entry) => entry.about);
      row.append("dd").attr("class", "strip").append("svg").attr("viewBox", "0 0 100 12").attr("preserveAspectRatio", "none");
      row.append("dd").attr("class", "value");
      row.append("dd").attr("class", "about").text((entry) => entry.about);
      return row;
    });
  rows.select(".value").text((entry) => number(entry.values[head.index]));
  rows.select("svg").each(function (entry) {
    const values = heads.filter((other) => other.shown).map((other) => ({ other, value: entry.values[other.index] }));
    const known = values.filter(({ value }) => value != null);
    const x = scaleLinear([Math.min(...known.map(({ value }) => value)), Math.max(...known.map(({ value }) => value))], [1, 99]);
    select(this)
      .selectAll("line")
      .data([...known.filter(({ other }) => other !== head), ...known.filter(({ other }) => other === head)])
      .join("line")
      .classed("this", ({ other }) => other === head)
      .attr("x1", ({ value }) => x(value))
      .attr("x2", ({ value }) => x(value))
      .attr("y1", ({ other }) => (other === head ? 0 : 3))
      .attr("y2", ({ other }) => (other === head ? 12 : 9));
  });
}

// Says what the cursor of the map is on, and shades the tokens of that row by their weight.
function read(at) {
  const { view } = state;
  const says = byId("read");
  const name = (cell) => {
    const [from, to] = [view.edges[cell], view.edges[cell + 1] - 1];
    const word = Object.assign(document.createElement("bdi"), { textContent: view.label(cell), className: "token" });
    return [word, ` ${from === to ? from : `${from}–${to}`}`];
  };
  if (at) {
    const unseen = data.model.causal && at.row < at.column;
    const weight = Object.assign(document.createElement("b"), {
      textContent: unseen ? "not visible" : number(at.weight, view.exact ? 4 : 2),
    });
    says.replaceChildren(...name(at.row), " → ", ...name(at.column), view.exact ? "  weight " : "  heaviest weight ", weight);
  } else {
    says.textContent = view.exact
      ? "Rows are queries, columns are keys. Point at a cell for its weight."
      : `A cell holds about ${Math.round(view.tokens.length / view.cells)} × ${Math.round(view.tokens.length / view.cells)} tokens and shows the heaviest weight among them. Ctrl and wheel zoom.`;
  }
  const row = at && view.exact ? map.row(at.row) : null;
  select("#row")
    .selectAll("bdi")
    .data(view.exact ? view.tokens : [])
    .join("bdi")
    .text((token) => token.trim())
    .classed("query", (_, cell) => cell === at?.row)
    .style("--weight", (_, cell) => (row ? Math.sqrt(row[cell] || 0) : 0));
}

function search(text, done) {
  const wanted = text.trim().toLowerCase();
  const head = heads.find((head) => head.name === wanted && head.shown);
  const role = wanted && (data.roles.find((role) => role.name === wanted) ?? data.roles.find((role) => role.name.includes(wanted)));
  const number = /^\d+\.\d+$/.test(wanted);
  byId("answer").textContent = "";
  if (head) update({ head });
  else if (role && !number) update({ role });
  else if (wanted && done) byId("answer").textContent = number ? `no head ${wanted} in this report` : `nothing named “${text.trim()}”`;
  else if (!wanted) update({ role: null });
}

const clamp = (value) => Math.max(0, Math.min(1, value));

header();
legend();
viewButtons();
byId("names").replaceChildren(...[...data.roles, ...heads.filter((head) => head.shown)].map(({ name }) => new Option(name)));
byId("query").addEventListener("input", (event) => search(event.target.value, false));
byId("search").addEventListener("submit", (event) => {
  event.preventDefault();
  search(byId("query").value, true);
});
new ResizeObserver(([{ contentRect }]) => grid.layout(contentRect.width)).observe(document.querySelector(".scroll"));
new ResizeObserver(() => map.layout()).observe(byId("frame"));
grid.layout(document.querySelector(".scroll").clientWidth);
update({});
