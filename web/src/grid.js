// The grid of heads: layers from left to right, heads from top to bottom, one tab stop, arrow keys inside.

import { axisLeft, axisTop } from "d3-axis";
import { scaleBand } from "d3-scale";
import { select } from "d3-selection";
import { data, heads } from "./data.js";

const LEFT = 30;
const TOP = 22;

export function drawGrid(node, choose) {
  const svg = select(node);
  const axes = [svg.append("g").attr("class", "axis"), svg.append("g").attr("class", "axis")];
  const cells = svg
    .selectAll("g.cell")
    .data(heads.filter((head) => head.shown))
    .join("g")
    .attr("class", "cell")
    .attr("role", "button")
    .attr("data-head", (head) => head.name)
    .on("click", (_, head) => choose(head))
    .on("keydown", move);
  cells.append("rect").attr("rx", 4);
  cells.append("text").attr("dy", "0.35em");
  cells.append("title");

  function layout(width) {
    const { heads: rows } = data.model;
    const size = Math.max(13, Math.min(36, Math.floor((width - LEFT - 2) / data.layers.length)));
    const x = scaleBand(data.layers, [LEFT, LEFT + size * data.layers.length]);
    const y = scaleBand(Array.from({ length: rows }, (_, head) => head), [TOP, TOP + size * rows]);
    svg.attr("width", LEFT + size * data.layers.length + 2).attr("height", TOP + size * rows + 2);
    const every = size < 20 ? 5 : 1;
    const tick = (axis) => axis.tickSize(0).tickPadding(6).tickFormat((value, at) => (at % every ? "" : value));
    axes[0].attr("transform", `translate(0,${TOP})`).call(tick(axisTop(x)));
    axes[1].attr("transform", `translate(${LEFT},0)`).call(tick(axisLeft(y)));
    cells.attr("transform", (head) => `translate(${x(head.layer)},${y(head.head)})`);
    cells.select("rect").attr("x", 1).attr("y", 1).attr("width", size - 2).attr("height", size - 2);
    cells.select("text").attr("x", size / 2).attr("y", size / 2).style("font-size", `${Math.min(13, size * 0.45)}px`);
  }

  function paint(chosen, role) {
    const shade = (head) => (role ? role.score[head.index] ?? 0 : 1);
    const ink = (head) => role ?? head.role;
    cells
      .classed("chosen", (head) => head === chosen)
      .classed("none", (head) => !ink(head))
      .classed("pale", (head) => shade(head) < 0.45)
      .classed("labelled", (head) => Boolean(role?.label[head.index]))
      .attr("tabindex", (head) => (head === chosen ? 0 : -1))
      .attr("aria-pressed", (head) => head === chosen)
      .attr("aria-label", describe)
      .style("--light", (head) => ink(head)?.light)
      .style("--dark", (head) => ink(head)?.dark)
      .style("--shade", (head) => shade(head));
    cells.select("text").text((head) => (role ? percent(role.score[head.index]) : head.role?.letter ?? "·"));
    cells.select("title").text(describe);
    function describe(head) {
      const shown = role ?? head.role;
      return shown ? `${head.name}: ${shown.name}, score ${number(shown.score[head.index])}` : `${head.name}: no clear role`;
    }
  }

  function move(event, head) {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (step) {
      event.preventDefault();
      let next = head;
      do next = heads.find((other) => other.row === next.row + step[0] && other.head === next.head + step[1]);
      while (next && !next.shown);
      if (next) focus(next);
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      choose(head);
    }
  }

  function focus(head) {
    choose(head);
    cells.filter((other) => other === head).node().focus();
  }

  return { layout, paint };
}

export const number = (value, digits = 2) => (value == null || Number.isNaN(value) ? "none" : value.toFixed(digits));
const percent = (value) => (value == null ? "" : Math.round(100 * value));
