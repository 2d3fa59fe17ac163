// This step

let laneCells = [];

function words(event) {
  if ("tensor" in event) {
    const lanes = event.elements.length;
    const good = lanes - event.masked.length - event.outside.length;
    const verb = { load: "Loads", store: "Stores to", atomic: "Changes atomically" }[event.kind];
    const parts = [`${verb} ${event.tensor}: ${good} of ${lanes} lanes`];
    if (event.masked.length) parts.push(`${event.masked.length} masked`);
    if (event.outside.length) parts.push(`${event.outside.length} outside of the tensor`);
    return `${parts.join(", ")}; ${count(event.bytes)} bytes`;
  }
  const shapes = event.operands.map((block) => `[${block.shape.join(" × ")}]`);
  if (event.kind === "product") return `Multiplies ${shapes.join(" by ")}`;
  if (event.kind === "instruction") return `Runs ${event.name} on tiles`;
  if (event.kind === "assignment") return `Register ${event.name} gets a new value`;
  return `Takes the ${event.name} of ${shapes.join(" and ")}`;
}

const MOST_TEXTS = 512;

// Values of any shape with what they are in their cells, if there is room; a single row is wrapped.
function blockGrid(shape, values) {
  const room = byId("left").clientWidth;
  const most = Math.max(1, Math.min(16, Math.floor((room - 26) / (TEXT + 1))));
  const lies = shape.filter((size) => size > 1).length > 1 ? shape : [values.length];
  const fits = values.length <= MOST_TEXTS && shapeOfGrid(lies, most).columns <= 16;
  const text = fits ? (n, letters) => short(values[n], letters) : null;
  const made = grid(lies, values.length, room, { text, most: fits ? most : MOST_COLUMNS });
  made.cells.forEach((cell, n) => cell.setAttribute("title", `${indexOf(n, shape)} = ${values[n]}`));
  return made;
}

function drawLanes(event) {
  const tensor = tensors.get(event.tensor);
  const { node, cells } = blockGrid(event.shape, event.values);
  laneCells = cells;
  event.elements.forEach((element, lane) => element >= 0 && cells[lane].classList.add(event.kind));
  event.masked.forEach(([lane]) => cells[lane].classList.add("masked"));
  event.outside.forEach(([lane]) => cells[lane].classList.add("outside"));
  node.addEventListener("mouseover", (over) => {
    const cell = cellAt(over);
    if (!cell) return;
    const lane = Number(cell.dataset.n);
    const element = event.elements[lane];
    if (element >= 0) describe(tensor, element);
    else {
      point([cell]);
      const outside = event.outside.find(([one]) => one === lane);
      byId("cell").textContent = outside
        ? `lane ${lane} goes to offset ${outside[1]}, outside of ${tensor.name}`
        : `lane ${lane} is masked, and has the value ${event.values[lane]}`;
    }
  });
  return [make("h3", {}, `Lanes [${event.shape.join(" × ")}]`), node];
}

function drawComputation(event) {
  // Registers and tiles are drawn with all others.
  if (event.kind === "assignment" || event.kind === "instruction") return [];
  const parts = [];
  const grids = event.operands.map((block, number) => {
    const from = block.source === null ? "" : `, loaded from ${data.events[block.source].tensor}`;
    const made = blockGrid(block.shape, block.values);
    if (from) made.cells.forEach((cell) => cell.classList.add("operand"));
    const name = event.operands.length > 1 ? ["Left", "Right"][number] ?? `Operand ${number}` : "Of";
    parts.push(make("h3", {}, `${name} [${block.shape.join(" × ")}]${from}`), made.node);
    return made;
  });
  if (event.result) {
    const result = blockGrid(event.result.shape, event.result.values);
    parts.push(make("h3", {}, `Result [${event.result.shape.join(" × ")}]`), result.node);
    if (event.kind === "product") {
      result.node.addEventListener("mouseover", (over) => {
        const cell = cellAt(over);
        if (cell) point([cell, ...factors(event, grids, Number(cell.dataset.n))]);
      });
    }
  }
  return parts;
}

// The row of the left and the column of the right operand that make an element of the product.
function factors(event, [left, right], element) {
  const [rows, depth] = event.operands[0].shape.slice(-2);
  const columns = event.operands[1].shape.at(-1);
  const column = element % columns;
  const row = Math.floor(element / columns) % rows;
  const plane = Math.floor(element / (columns * rows));
  const along = [...Array(depth).keys()];
  return [
    ...along.map((k) => left.cells[(plane * rows + row) * depth + k]),
    ...along.map((k) => right.cells[(plane * depth + k) * columns + column]),
  ];
}

// Registers and tiles

function registersAt(now) {
  const held = new Map();
  for (const change of data.changes) {
    if (change.event > now) continue;
    // The variables of a program are its own; registers of a processor are not.
    if (!data.machine && data.events[change.event].program !== state.program) continue;
    if (change.values === null) held.delete(change.register);
    else held.set(change.register, change);
  }
  return held;
}

const READINGS = {
  uint8: [1, (view, at) => view.getUint8(at)],
  int8: [1, (view, at) => view.getInt8(at)],
  int32: [4, (view, at) => view.getInt32(at, true)],
  float32: [4, (view, at) => view.getFloat32(at, true)],
  bfloat16: [2, (view, at) => {
    const wide = new DataView(new ArrayBuffer(4));
    wide.setUint16(0, view.getUint16(at, true));
    return wide.getFloat32(0);
  }],
};

function drawTile(number, register, change) {
  // What is loaded is most often bytes, and what is computed from other tiles sums of them.
  const sums = data.events[change.event]?.operands?.length;
  const chosen = readAs.get(number) ?? (sums ? "int32" : "uint8");
  const [size, read] = READINGS[chosen];
  const view = new DataView(Uint8Array.from(change.values).buffer);
  const values = Array.from({ length: view.byteLength / size }, (_, n) => read(view, n * size));
  const shape = [change.shape[0], change.shape[1] / size];
  const select = make("select", { "aria-label": `How to read ${register.name}` });
  for (const name of Object.keys(READINGS)) select.append(make("option", { value: name }, name));
  select.value = chosen;
  select.addEventListener("change", () => {
    readAs.set(number, select.value);
    drawRegisters();
  });
  const { node, cells } = blockGrid(shape, values);
  if (change.event === nowShown()) cells.forEach((cell) => cell.classList.add("changed"));
  return make("div", { class: "tile" }, make("h3", {}, register.name, " as ", select), node);
}

function drawRegister(register, change) {
  const heading = make("h3", {}, make("code", {}, register.name), ` ${register.type}`);
  const { node, cells } = blockGrid(change.shape, change.values);
  if (change.event === nowShown()) cells.forEach((cell) => cell.classList.add("changed"));
  return make("div", { class: "register" }, heading, node);
}

// The variables of a kernel that Python runs, as they are when a step begins: numbers, blocks, and
// what only says where it works.
function drawVariables(held) {
  const now = nowShown();
  const numbers = make("p", { class: "value" });
  const blocks = make("div", { class: "registers" }), indices = blocks.cloneNode();
  for (const [, register, change] of held) {
    if (change.values.length === 1) {
      const text = `${register.name} = ${short(change.values[0], 9)}`;
      const changed = change.event === now ? "changed" : "";
      numbers.append(make("span", { class: changed, title: String(change.values[0]) }, text), " ");
    } else {
      const whole = /^(u?int|bool)/.test(register.type);
      (whole ? indices : blocks).append(drawRegister(register, change));
    }
  }
  byId("scalars").replaceChildren(...(numbers.children.length ? [numbers] : []));
  const title = make("h2", {}, "Blocks when this step begins");
  const parts = blocks.children.length ? [title, blocks] : [];
  if (indices.children.length) {
    const open = byId("indices")?.open ? { open: "" } : {};
    const summary = make("summary", {}, "Indices and masks");
    parts.push(make("details", { id: "indices", ...open }, summary, indices));
  }
  byId("registers").replaceChildren(...parts);
}

function drawRegisters() {
  const machine = data.machine;
  const held = [...registersAt(nowShown())].map(([n, change]) => [n, data.registers[n], change]);
  if (!machine) {
    drawVariables(held);
    return;
  }
  const tiles = held.filter(([, register]) => register.type === "tile");
  const vectors = held.filter(([, register]) => register.slots > 0);
  const scalars = held.filter(([, register]) => register.type !== "tile" && !register.slots);
  const slots = sum(vectors, ([, register]) => register.slots);
  const used = `${slots} of ${machine.vector_registers} vector registers hold variables`;
  const parts = [make("h2", {}, "Registers of ", machine.name), make("p", { id: "used" }, used)];
  const box = make("div", { class: "registers" });
  box.append(...vectors.map(([, register, change]) => drawRegister(register, change)));
  parts.push(box);
  if (scalars.length) {
    const texts = scalars.map(([, register, change]) => `${register.name} = ${change.values[0]}`);
    parts.push(make("p", { class: "value" }, texts.join(", ")));
  }
  if (tiles.length) {
    parts.push(make("h2", {}, `Tiles: ${tiles.length} of ${machine.tiles} have a shape`));
    const holds = ([, , change]) => change.values.some(Boolean) || change.event === nowShown();
    const zeros = tiles.filter((tile) => !holds(tile)).map(([, register]) => register.name);
    if (zeros.length) parts.push(make("p", {}, `${zeros.join(", ")}: zeros`));
    const all = make("div", { class: "registers" });
    all.append(...tiles.filter(holds).map(([n, one, change]) => drawTile(n, one, change)));
    parts.push(all);
  }
  byId("registers").replaceChildren(...parts);
}
