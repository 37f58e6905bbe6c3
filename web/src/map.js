// One head's map: a canvas of cells under axes of tokens, with zoom, a cursor for pointer and keys, and a colour scale.

import { axisLeft, axisTop } from "d3-axis";
import { scaleLinear } from "d3-scale";
import { pointer, select } from "d3-selection";
import { zoom, zoomIdentity } from "d3-zoom";

const MARGIN = 84;
const RIGHT = 30; // where the last slanted label ends
const RAMPS = {
  light: ["#f3f5fb", "#b9cbf2", "#6b8fe0", "#2b51b8", "#0c1b4d"],
  dark: ["#171b28", "#274078", "#247fa8", "#4fc3a9", "#f4f1b0"],
};
const dark = matchMedia("(prefers-color-scheme: dark)");

// The square root spreads the small weights, which are most of them.
const colour = (weight) =>
  scaleLinear([0, 0.25, 0.5, 0.75, 1], RAMPS[dark.matches ? "dark" : "light"])(Math.sqrt(weight));

export function drawMap(node, scaleNode, read) {
  const frame = select(node);
  const canvas = frame.append("canvas").attr("aria-hidden", "true");
  const svg = frame.append("svg").attr("aria-hidden", "true");
  const top = svg.append("g").attr("class", "axis keys");
  const left = svg.append("g").attr("class", "axis queries");
  const cursor = svg.append("g").attr("class", "cursor");
  cursor.append("rect").attr("class", "row");
  cursor.append("rect").attr("class", "column");
  cursor.append("rect").attr("class", "cell");
  const image = document.createElement("canvas");
  let view, weights, size, at = null, transform = zoomIdentity;
  const scale = () => scaleLinear([0, view.cells], [0, size]);

  // The page scrolls under the wheel and under one finger, unless the reader zooms.
  const lone = (event) => event.touches?.length === 1 && transform.k === 1;
  const zooming = zoom()
    .filter((event) => (event.type === "wheel" ? event.ctrlKey || event.metaKey : !event.button && !lone(event)))
    .on("zoom", (event) => draw(event.transform));
  canvas.call(zooming).on("dblclick.zoom", null);
  canvas.on("pointermove", (event) => {
    const [x, y] = pointer(event);
    const cell = [transform.rescaleY(scale()).invert(y), transform.rescaleX(scale()).invert(x)].map(Math.floor);
    point(cell.every((place) => place >= 0 && place < view.cells) ? cell : null);
  });
  canvas.on("pointerleave", () => point(null));
  frame.on("keydown", (event) => {
    const [row, column] = at ?? [0, 0];
    const last = view.cells - 1;
    const moves = {
      ArrowUp: [Math.max(row - 1, 0), column],
      ArrowDown: [Math.min(row + 1, last), column],
      ArrowLeft: [row, Math.max(column - 1, 0)],
      ArrowRight: [row, Math.min(column + 1, last)],
    };
    if (moves[event.key]) point(at ? moves[event.key] : [0, 0]);
    else if (event.key === "+" || event.key === "=") zooming.scaleBy(canvas, 1.6, centre());
    else if (event.key === "-") zooming.scaleBy(canvas, 1 / 1.6, centre());
    else if (event.key === "0") zooming.transform(canvas, zoomIdentity);
    else return;
    event.preventDefault();
  });
  dark.addEventListener("change", () => view && (render(), draw(transform)));

  const centre = () =>
    at && [transform.rescaleX(scale())(at[1] + 0.5), transform.rescaleY(scale())(at[0] + 0.5)];

  function show(nextView, nextWeights) {
    const same = view === nextView;
    [view, weights] = [nextView, nextWeights];
    if (!same) at = null;
    render();
    layout(!same);
    point(at);
  }

  function layout(reset = false) {
    if (!view) return;
    size = Math.max(120, Math.min(node.clientWidth - MARGIN - RIGHT, 620));
    const ratio = devicePixelRatio;
    frame.style("height", `${size + MARGIN + 8}px`);
    svg.attr("width", size + MARGIN + RIGHT).attr("height", size + MARGIN + 8);
    canvas.attr("width", size * ratio).attr("height", size * ratio);
    canvas.style("width", `${size}px`).style("height", `${size}px`).style("left", `${MARGIN}px`).style("top", `${MARGIN}px`);
    zooming.extent([[0, 0], [size, size]]).translateExtent([[0, 0], [size, size]]).scaleExtent([1, Math.max(1, view.cells / 8)]);
    reset ? zooming.transform(canvas, zoomIdentity) : draw(transform);
  }

  function render() {
    image.width = image.height = view.cells;
    const context = image.getContext("2d");
    weights.forEach((weight, cell) => {
      if (weight === 0) return;
      context.fillStyle = Number.isNaN(weight) ? "#d0104c" : colour(weight);
      context.fillRect(cell % view.cells, Math.floor(cell / view.cells), 1, 1);
    });
    scaleNode.replaceChildren(...[0, 0.05, 0.2, 0.5, 1].map((weight) => {
      const key = document.createElement("span");
      key.style.setProperty("--swatch", colour(weight));
      key.textContent = weight === 0 ? "near 0" : weight;
      return key;
    }));
  }

  function draw(next) {
    transform = next;
    const context = canvas.node().getContext("2d");
    const ratio = devicePixelRatio;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, size * ratio, size * ratio);
    context.imageSmoothingEnabled = false;
    context.drawImage(image, transform.x * ratio, transform.y * ratio, size * transform.k * ratio, size * transform.k * ratio);
    axis(top, axisTop, transform.rescaleX(scale()));
    axis(left, axisLeft, transform.rescaleY(scale()));
    place();
  }

  function axis(group, make, scaled) {
    const [from, to] = scaled.domain();
    const every = Math.ceil((13 * (to - from)) / size);
    const cells = Array.from({ length: view.cells }, (_, cell) => cell);
    const ticks = cells.filter((cell) => cell % every === 0 && cell + 0.5 >= from && cell + 0.5 <= to);
    group
      .attr("transform", `translate(${MARGIN},${MARGIN})`)
      .call(make(scaled).tickValues(ticks.map((cell) => cell + 0.5)).tickFormat((tick) => short(view.label(Math.floor(tick)))).tickSize(4));
  }

  function point(next) {
    at = next;
    place();
    read(at && { row: at[0], column: at[1], weight: weights[at[0] * view.cells + at[1]] });
  }

  function place() {
    cursor.style("display", at ? null : "none");
    if (!at) return;
    const cell = (size * transform.k) / view.cells;
    const [y, x] = [at[0] * cell + transform.y, at[1] * cell + transform.x];
    const box = (name, left, top, width, height) => {
      const [l, t] = [Math.max(left, 0), Math.max(top, 0)];
      cursor.select(`.${name}`)
        .attr("x", MARGIN + l).attr("y", MARGIN + t)
        .attr("width", Math.max(0, Math.min(left + width, size) - l)).attr("height", Math.max(0, Math.min(top + height, size) - t));
    };
    box("row", 0, y, size, cell);
    box("column", x, 0, cell, size);
    box("cell", x, y, cell, cell);
  }

  return { show, layout, row: (row) => weights.subarray(row * view.cells, (row + 1) * view.cells), colour };
}

function short(text) {
  const signs = Array.from(text);
  return signs.length > 11 ? `${signs.slice(0, 10).join("")}…` : text;
}
