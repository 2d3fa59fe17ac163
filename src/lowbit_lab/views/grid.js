"use strict";

// The data is described in docs/view.md. An event is a step of a program; "now" is the number of
// the event that is shown.
const data = JSON.parse(document.getElementById("data").textContent);
const tensors = new Map(data.tensors.map((tensor) => [tensor.name, tensor]));
const eventsOf = data.programs.map(() => []);
data.events.forEach((event, number) => eventsOf[event.program].push(number));

const MOST_COLUMNS = 32; // of a tensor of one dimension, which is wrapped
const TEXT = 34, LETTER = 6.1; // pixels: of a cell with a number in it, of one of its letters
const HIGH = 640; // pixels, about as high as a grid should be
const state = { program: 0, step: 0, show: "step" };
const marks = []; // [cell, class], to be taken away before the next step is drawn
const readAs = new Map(); // how a tile's bytes are read, where the reader has chosen

const byId = (id) => document.getElementById(id);
const sum = (list, of) => list.reduce((total, one) => total + of(one), 0);
const count = (number) => number.toLocaleString("en-US");

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function mark(cell, name) {
  if (cell && !cell.classList.contains(name)) {
    cell.classList.add(name);
    marks.push([cell, name]);
  }
}

// Numbers

// A value in at most so many characters, if there is a way; 0.0012 rather than 1.2e-3.
function short(value, most) {
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && String(value).length <= most) return String(value);
  const plain = Math.abs(value) < 1e4 ? [3, 2, 1, 0].map((digits) => value.toFixed(digits)) : [];
  const good = plain.filter((text) => Number(text) !== 0);
  const powers = [1, 0].map((digits) => value.toExponential(digits).replace("e+", "e"));
  return [...good, ...powers].find((text) => text.length <= most) ?? powers[1];
}

function indexOf(element, shape) {
  const index = [];
  for (let axis = shape.length - 1; axis >= 0; axis--) {
    index.unshift(element % shape[axis]);
    element = Math.floor(element / shape[axis]);
  }
  return `[${index.join(", ")}]`;
}

// What is written to each element, and when: [event, value], undefined for a value that is only
// known to the kernel (atomic operations, parts of an element).
const histories = new Map(data.tensors.map((tensor) => [tensor.name, new Map()]));
data.events.forEach((event, number) => {
  if (event.kind !== "store" && event.kind !== "atomic") return;
  const history = histories.get(event.tensor);
  const plain = event.kind === "store" && event.itemsize === tensors.get(event.tensor).itemsize;
  event.elements.forEach((element, lane) => {
    if (element < 0) return;
    if (!history.has(element)) history.set(element, []);
    history.get(element).push([number, plain ? event.values[lane] : undefined]);
  });
});

function valueAt(tensor, element, now) {
  const written = (histories.get(tensor.name).get(element) ?? []).filter(([at]) => at <= now);
  if (written.length) {
    const value = written.at(-1)[1];
    return value === undefined ? "changed in place" : value;
  }
  return tensor.before ? tensor.before[element] : "not written yet";
}

// Grids of cells

function shapeOfGrid(shape, most = MOST_COLUMNS) {
  if (shape.length === 0) return { planes: 1, rows: 1, columns: 1 };
  if (shape.length === 1) {
    const columns = Math.max(1, Math.min(shape[0], most));
    return { planes: 1, rows: Math.ceil(shape[0] / columns), columns };
  }
  const [rows, columns] = shape.slice(-2);
  return { planes: shape.slice(0, -2).reduce((a, b) => a * b, 1), rows, columns };
}

// Width and height of a cell in pixels, such that the columns fit where there is room. Narrow
// cells are higher than wide, to be easier to point at, unless there are many rows, whose cells are
// smaller. No cell is wider than `cap`.
function cellSize({ planes, rows, columns }, room, wide, cap = 18) {
  if (wide) return [Math.max(TEXT, Math.min(48, Math.floor((room - 40) / columns) - 1)), 16];
  const beside = Math.max(1, Math.min(planes, 4, Math.floor(room / 180)));
  const fitting = Math.floor((room / beside - 45) / columns) - 1;
  const across = Math.max(2, Math.min(cap, fitting, Math.max(6, Math.floor(HIGH / rows) - 1)));
  return [across, planes * rows > 40 || cap < 14 ? across : Math.max(across, 14)];
}

// What a tensor is, besides its name; most are inputs.
const about = ({ dtype, shape, role }) =>
  `${dtype} [${shape.join(" × ")}]${role === "input" ? "" : `, ${role}`}`;

// The widest cells with which all these tensors, beside and below each other, are so high at most.
function fittingCap(shown, room, high) {
  const boxes = (cap) => shown.map((tensor) => {
    const { name, shape } = tensor;
    const heading = 9 * name.length + 7 * about(tensor).length;
    const parts = shapeOfGrid(shape);
    const [across, tall] = cellSize(parts, room, false, cap);
    const wide = parts.columns * (across + 1) + 24;
    const beside = Math.max(1, Math.min(parts.planes, Math.floor(room / wide)));
    const below = Math.ceil(parts.planes / beside);
    const own = parts.rows * (tall + 1) + (shape.length > 1 ? 20 : 6) + (parts.planes > 1 ? 22 : 0);
    return [Math.max(150, heading, beside * wide) + 22, below * own + 36];
  });
  for (let cap = 18; cap > 3; cap--) {
    let left = room, row = 0, total = 0;
    for (const [wide, own] of boxes(cap)) {
      if (wide > left) [left, total, row] = [room, total + row, 0];
      left -= wide;
      row = Math.max(row, own);
    }
    if (total + row <= high) return cap;
  }
  return 3;
}

// Cells of an array of any shape, in C order: more than two dimensions become a grid of grids.
// `room` is the width to fit into; `text` gives what stands in a cell of so
// many characters; null for nothing. What is of one dimension has at most `most` columns.
function grid(shape, total, room, { text = null, cap = 18, most = MOST_COLUMNS } = {}) {
  const { planes, rows, columns } = shapeOfGrid(shape, most);
  const wide = text !== null;
  const [across, high] = cellSize({ planes, rows, columns }, room, wide, cap);
  const every = high >= 12 ? 1 : 10;
  const cells = [];
  const node = make("div", { class: "planes" });
  for (let plane = 0; plane < planes; plane++) {
    const style = `--columns: ${columns}; --cell: ${across}px; --high: ${high}px`;
    const kind = wide ? "plane wide" : across < 8 ? "plane tiny" : "plane";
    const box = make("div", { class: kind, style });
    if (shape.length > 1) {
      box.append(make("span", {}, ""));
      const step = Math.ceil(24 / (across + 1));
      for (let column = 0; column < columns; column++) {
        box.append(make("span", { class: "top" }, column % step ? "" : String(column)));
      }
    }
    for (let row = 0; row < rows; row++) {
      const first = (plane * rows + row) * columns;
      const label = shape.length > 1 ? row : first;
      box.append(make("span", {}, row % every || shape.length === 0 ? "" : String(label)));
      for (let column = 0; column < columns && first + column < total; column++) {
        const cell = make("i", { "data-n": first + column });
        if (wide) cell.textContent = text(first + column, Math.floor((across - 2) / LETTER));
        cells.push(cell);
        box.append(cell);
      }
    }
    const leading = indexOf(plane, shape.slice(0, -2)).slice(1, -1);
    node.append(planes > 1 ? make("div", {}, make("h3", {}, `[${leading}, :, :]`), box) : box);
  }
  return { node, cells, columns };
}

const cellAt = (event) => event.target.closest?.("i[data-n]");
