// Tensors

const drawn = new Map();

// A shared array is of one block of threads: it is shown with them.
const blockOf = (tensor) => / of block \[(.*)\]$/.exec(tensor.name)?.[1];
const inMemory = data.tensors.filter((tensor) => tensor.role !== "shared");

function drawTensors() {
  const box = byId("tensors"), room = box.clientWidth;
  const first = data.tensors.map(blockOf).find(Boolean);
  const together = data.tensors.filter((tensor) => [undefined, first].includes(blockOf(tensor)));
  const below = Math.max(300, innerHeight - box.getBoundingClientRect().top - scrollY - 8);
  const cap = fittingCap(together, room, below);
  for (const tensor of data.tensors) {
    const total = tensor.after.length;
    const { node, cells, columns } = grid(tensor.shape, total, room, { cap });
    const strip = make("div", { class: "strip" });
    const shape = about(tensor);
    const holder = make("div", {
      class: "grids", tabindex: 0, role: "group",
      "aria-label": `Tensor ${tensor.name}, ${shape}; arrow keys move from element to element`,
    }, node);
    const heading = make("h2", {}, make("code", {}, tensor.name), " ", make("small", {}, shape));
    if (tensor.outside_lanes) {
      const lanes = `; ${count(tensor.outside_lanes)} lanes of all programs go outside`;
      heading.lastChild.append(lanes);
    }
    byId("tensors").append(
      make("section", { class: "tensor", id: `tensor-${tensor.name}` }, heading, strip, holder),
    );
    drawn.set(tensor.name, { cells, strip, cursor: 0, columns });
    holder.addEventListener("mouseover", (event) => {
      const cell = cellAt(event);
      if (cell) describe(tensor, Number(cell.dataset.n));
    });
    holder.addEventListener("keydown", (event) => moveCursor(event, tensor, holder));
    holder.addEventListener("blur", () => point([]));
  }
}

function moveCursor(event, tensor, holder) {
  const own = drawn.get(tensor.name);
  if (event.key === "Escape") holder.blur();
  const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: own.columns, ArrowUp: -own.columns };
  if (!(event.key in moves)) return;
  event.preventDefault();
  event.stopPropagation();
  const next = own.cursor + moves[event.key];
  if (next >= 0 && next < own.cells.length) own.cursor = next;
  own.cells[own.cursor].scrollIntoView({ block: "nearest", inline: "nearest" });
  describe(tensor, own.cursor);
}

let pointed = [];

// Outlines these cells, and no others.
function point(cells) {
  pointed.forEach((cell) => cell.classList.remove("hit"));
  pointed = cells.filter(Boolean);
  pointed.forEach((cell) => cell.classList.add("hit"));
}

function describe(tensor, element) {
  const own = drawn.get(tensor.name);
  own.cursor = element;
  const event = data.events[nowShown()];
  const parts = [
    `${tensor.name}${indexOf(element, tensor.shape)} = ${valueAt(tensor, element, nowShown())}`,
    `read ${tensor.reads[element]} ×, written ${tensor.writes[element]} ×`,
  ];
  const hits = [own.cells[element]];
  if (event?.tensor === tensor.name) {
    const lanes = event.elements.flatMap((one, lane) => (one === element ? [lane] : []));
    if (lanes.length) parts.push(`lane ${lanes.slice(0, 8).join(", ")}${lanes[8] ? ", …" : ""}`);
    hits.push(...lanes.map((lane) => laneCells[lane]));
  }
  point(hits);
  byId("cell").replaceChildren(parts.join("; "), ...compared(tensor, element));
}

// What an element of the result is at the end, beside what it should be.
function compared(tensor, element) {
  if (!tensor.expected) return [];
  const wrong = tensor.wrong.includes(element);
  const [got, wanted] = [tensor.after[element] ?? "not written", tensor.expected[element]];
  const pair = make("b", { id: "compared", class: wrong ? "wrong" : "" });
  pair.append(`computed ${got} · expected ${wanted}`);
  if (wrong && typeof got === "number" && typeof wanted === "number") {
    pair.append(` · off by ${Number((got - wanted).toPrecision(3))}`);
  }
  return [make("br"), pair];
}

// Source

const lines = new Map();

// What accesses of a line cost: idle lanes, and how many sectors of memory warps ask for.
function costOf(key) {
  const line = data.lines.find((one) => String(one.line) === key);
  if (!line) return [];
  const parts = [];
  if (line.idle) parts.push(`${Math.round((100 * line.idle) / line.lanes)} % masked`);
  if (line.needed) parts.push(`${(line.asked / line.needed).toFixed(1)} × sectors`);
  const title = `${count(line.idle)} of ${count(line.lanes)} lanes are masked; warps of 32 lanes ask `
    + `for ${count(line.asked)} sectors of 32 bytes, and need ${count(line.needed)}`;
  return parts.length ? [make("small", { class: "cost", title }, parts.join(", "))] : [];
}

function drawSource() {
  const keys = new Set(data.events.map((event) => String(event.line)));
  const faults = new Set(data.findings.map((finding) => String(finding.line)));
  data.sources.forEach((source, number) => {
    byId("source").append(make("h3", {}, source.file));
    source.lines.forEach((text, at) => {
      const key = `${number},${source.first_line + at}`;
      const node = make("code", { class: "text", "data-line": source.first_line + at }, text || " ");
      if (keys.has(key)) {
        node.classList.add("steps");
        node.setAttribute("tabindex", 0);
        node.setAttribute("role", "button");
        node.setAttribute("aria-label", `Line ${source.first_line + at}: ${text.trim()}`);
        node.addEventListener("click", () => goToLine(key));
        node.addEventListener("keydown", (event) => {
          if (event.key !== "Enter" && event.key !== " ") return;
          event.preventDefault();
          goToLine(key);
        });
      }
      node.prepend(...costOf(key));
      node.classList.toggle("fault", faults.has(key));
      lines.set(key, node);
      byId("source").append(node);
    });
  });
  if (!data.sources.some((source) => source.lines.length)) {
    byId("source").append(make("h3", {}, "Python does not know the text of this kernel."));
  }
}

// The next step on a line: of this program, else of the programs after it, else from the start.
function goToLine(key) {
  const here = data.programs.length ? nowShown() : -1;
  const order = [...data.events.keys()].filter((n) => String(data.events[n].line) === key);
  const own = order.filter((n) => data.events[n].program === state.program);
  const later = order.filter((n) => data.events[n].program > state.program);
  const next = own.find((n) => n > here) ?? later[0] ?? own[0] ?? order[0];
  goToEvent(next);
}

// Colours of the tensors

const MOST_CHIPS = 40; // lanes outside of a tensor that are listed beside it
function spread(event, element) {
  const wide = event.itemsize / tensors.get(event.tensor).itemsize;
  return wide > 1 ? Array.from({ length: wide }, (_, more) => element + more) : [element];
}

function markAccess(event, name) {
  const { cells } = drawn.get(event.tensor);
  for (const element of event.elements) {
    if (element >= 0) spread(event, element).forEach((one) => mark(cells[one], name));
  }
}

function colourStep(now) {
  const event = data.events[now];
  for (const number of eventsOf[state.program]) {
    if (number < now && "tensor" in data.events[number]) markAccess(data.events[number], "seen");
  }
  if ("tensor" in event) {
    const { cells, strip } = drawn.get(event.tensor);
    event.masked.forEach(([, element]) => element >= 0 && mark(cells[element], "masked"));
    markAccess(event, event.kind);
    strip.append(...event.outside.slice(0, MOST_CHIPS).map(([lane, offset]) => {
      const chip = make("span", { class: "chip", "data-lane": lane, "data-offset": offset });
      chip.append(`lane ${lane} `, make("b", {}, `offset ${offset}`));
      return chip;
    }));
    const more = event.outside.length - MOST_CHIPS;
    if (more > 0) strip.append(`and ${count(more)} more, red among the lanes`);
  } else {
    for (const block of event.operands) {
      if (block.source !== null) markAccess(data.events[block.source], "operand");
    }
  }
}

function colourBlanks(now) {
  for (const tensor of data.tensors) {
    if (tensor.before) continue;
    const history = histories.get(tensor.name);
    drawn.get(tensor.name).cells.forEach((cell, element) => {
      const first = history.get(element)?.[0][0] ?? Infinity;
      cell.classList.toggle("blank", first > now);
    });
  }
}

const largest = (counts) => counts.reduce((a, b) => Math.max(a, b), 0);

function colourHeat(which) {
  const most = Math.max(1, ...data.tensors.map((tensor) => largest(tensor[which])));
  for (const tensor of data.tensors) {
    drawn.get(tensor.name).cells.forEach((cell, element) => {
      const times = tensor[which][element];
      cell.dataset.count = times;
      // One scale for all tensors, on which once is already seen.
      cell.style.setProperty("--heat", times ? 0.15 + (0.85 * times) / most : 0);
      mark(cell, "heat");
    });
  }
}

function colour(now) {
  marks.splice(0).forEach(([cell, name]) => cell.classList.remove(name));
  drawn.forEach(({ strip }) => strip.replaceChildren());
  colourBlanks(state.show === "step" ? now : Infinity);
  if (state.show === "step" && now >= 0) colourStep(now);
  if (state.show === "reads" || state.show === "writes") colourHeat(state.show);
  if (state.show === "wrong") {
    for (const tensor of data.tensors) {
      tensor.wrong.forEach((element) => mark(drawn.get(tensor.name).cells[element], "wrong"));
    }
  }
}

// What occurs in this run.
const occurs = {
  atomic: data.events.some((event) => event.kind === "atomic"),
  operand: data.events.some((event) => event.operands?.some((block) => block.source !== null)),
  masked: data.events.some((event) => event.masked?.length),
  outside: data.events.some((event) => event.outside?.length),
};

function heatKeys(which) {
  return inMemory.map((tensor) => {
    const counts = tensor[which];
    const most = largest(counts);
    const mean = counts.length ? sum(counts, (n) => n) / counts.length : 0;
    return ["none", `${tensor.name}: at most ${most} ×, on average ${mean.toFixed(1)} ×`];
  });
}

function drawLegend() {
  const keys = {
    step: [
      ["load", "loaded now"], ["store", "stored now"], ["atomic", "changed atomically now"],
      ["operand", "loaded before, used now"], ["seen", "touched before by this program"],
      ["masked", "masked lane"], ["outside", "lane outside of the tensor"],
      ["blank", "not written yet"],
    ].filter(([name]) => occurs[name] ?? true),
    reads: [["heat", "often"], ...heatKeys("reads")],
    writes: [["heat", "often"], ...heatKeys("writes")],
    wrong: [["wrong", "not what the specification says"]],
  };
  byId("legend").replaceChildren(...keys[state.show].map(([name, text]) => {
    return make("li", {}, make("span", { class: `key ${name}`, style: "--heat: 1" }), text);
  }));
}

function drawTotals() {
  const row = (name, loaded, stored, least) => make("tr", {}, make("th", { scope: "row" }, name),
    ...[count(loaded), count(stored), count(least), `${((loaded + stored) / least).toFixed(2)} ×`]
      .map((text) => make("td", {}, text)));
  const head = make("tr", {}, ...["bytes", "loaded", "stored", "least", "moved / least"]
    .map((text) => make("th", { scope: "col" }, text)));
  const total = (name) => sum(inMemory, (tensor) => tensor[name]);
  const rows = inMemory.map((t) => row(t.name, t.loaded_bytes, t.stored_bytes, t.least_bytes));
  rows.push(row("all", total("loaded_bytes"), total("stored_bytes"), total("least_bytes")));
  byId("totals").append(make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
}

// Moving

const nowShown = () => eventsOf[state.program]?.[state.step] ?? -1;

function go(program, step) {
  if (!data.programs.length) return;
  const within = (n, list) => Math.min(Math.max(Math.trunc(n), 0), list.length - 1);
  state.program = within(program, data.programs);
  state.step = within(step, eventsOf[state.program]);
  update();
}

// Past the last step of a program comes the first of the next.
function stepBy(by) {
  const next = state.step + by;
  if (next < 0 && state.program > 0) go(state.program - 1, Infinity);
  else if (next >= eventsOf[state.program]?.length && state.program + 1 < data.programs.length) {
    go(state.program + 1, 0);
  } else go(state.program, next);
}

function programText(program) {
  let first = 0;
  const parts = data.program_axes.map(([name, axes]) => {
    const values = program.slice(first, (first += axes));
    return `${name} ${axes > 1 ? `(${values.join(", ")})` : values[0]}`;
  });
  return parts.join(", ").replace(/^./, (letter) => letter.toUpperCase());
}

function drawControls(event) {
  const last = [data.programs.length - 1, (eventsOf[state.program]?.length ?? 0) - 1];
  const texts = [`${programText(data.programs[state.program] ?? [])}`, ""];
  ["program", "step"].forEach((name, n) => {
    const slider = byId(name);
    slider.max = Math.max(0, last[n]);
    slider.value = state[name];
    slider.disabled = last[n] < 1;
    const where = event ? `${state[name] + 1} of ${last[n] + 1}` : "none";
    byId(`${name}-text`).textContent = n ? where : `${texts[0]} (${where})`;
    slider.setAttribute("aria-valuetext", n ? `${where}: ${event ? words(event) : ""}` : texts[0]);
  });
}

function drawHere(event) {
  lines.forEach((node) => node.classList.remove("now"));
  const line = event && lines.get(String(event.line));
  if (!line) return;
  line.classList.add("now");
  reveal(line);
}

function reveal(line) {
  const box = byId("source");
  const low = line.offsetTop - box.scrollTop;
  if (low < 0 || low > box.clientHeight - 30) box.scrollTop = line.offsetTop - box.clientHeight / 2;
}

function update() {
  const now = nowShown();
  const event = data.events[now];
  point([]);
  laneCells = [];
  drawControls(event);
  drawHere(event);
  const block = data.programs[state.program]?.slice(0, 3).join(", ");
  for (const tensor of data.tensors) {
    byId(`tensor-${tensor.name}`).hidden = ![undefined, block].includes(blockOf(tensor));
  }
  colour(now);
  drawLegend();
  byId("now").textContent = event ? words(event) : "The kernel did nothing that could be recorded.";
  const detail = event ? ("tensor" in event ? drawLanes(event) : drawComputation(event)) : [];
  byId("detail").replaceChildren(...detail);
  drawRegisters();
  document.querySelector(`[name=show][value=${state.show}]`).checked = true;
  remember();
}

// Browsers let a page change its address only so often: Safari 100 times in 30 seconds.
const MOST_CHANGES = 90, SPAN = 30_000; // milliseconds
const changes = []; // when it was changed
let later = 0;

// The place in the run is in the address, where the page has one of its own.
function remember() {
  if (location.protocol === "about:") return;
  clearTimeout(later);
  const now = performance.now();
  while (changes[0] < now - SPAN) changes.shift();
  if (changes.length >= MOST_CHANGES) {
    later = setTimeout(remember, 1000);
    return;
  }
  changes.push(now);
  const { program, step, show } = state;
  history.replaceState(null, "", `#${new URLSearchParams({ program, step, show })}`);
}

function recall() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  if (COLOURS.includes(wanted.get("show"))) state.show = wanted.get("show");
  const [program, step] = ["program", "step"].map((name) => Number(wanted.get(name)) || 0);
  if (data.programs.length) go(program, step);
  else update();
}

// What the colours can show, in the order of the keys.
const COLOURS = ["step", "reads", "writes"];
if (data.tensors.some((tensor) => tensor.wrong.length)) COLOURS.push("wrong");

function show(what) {
  if (!COLOURS.includes(what)) return;
  state.show = what;
  update();
}

// What shows a finding: going to its step, else the colours in which it is seen, else its line, and
// the last step before it; null if it has none of these.
function wayTo(finding) {
  const colours = { "wrong-values": "wrong", unwritten: "writes" }[finding.kind];
  if (COLOURS.includes(colours)) {
    return () => {
      const last = histories.get(finding.tensor)?.get(finding.element)?.at(-1);
      if (last) goToEvent(last[0]);
      show(colours);
      if (finding.element !== null) describe(tensors.get(finding.tensor), finding.element);
    };
  }
  if ((finding.event ?? null) !== null) {
    return () => {
      show("step");
      goToEvent(finding.event);
    };
  }
  const number = data.programs.findIndex((one) => String(one) === String(finding.program));
  const line = lines.get(String(finding.line));
  if (!line) return null;
  return () => {
    if (number >= 0) go(number, Infinity);
    reveal(line);
  };
}

function goToEvent(number) {
  const { program } = data.events[number];
  go(program, eventsOf[program].indexOf(number));
}

function drawHead() {
  byId("title").append(make("code", {}, data.kernel), ` (${data.operation})`);
  const sizes = Object.entries(data.sizes).map(([name, size]) => `${name} = ${size}`).join(", ");
  byId("about").textContent =
    `${data.doc.split("\n\n")[0]} With ${sizes}, ${data.fill} data, by ${data.backend}.`;
  byId("notes").append(...data.notes.map((note) => make("li", {}, note)));
  for (const finding of data.findings) {
    const item = make("li", { class: finding.severity });
    item.append(make("b", {}, finding.title), `: ${finding.message}`);
    const shows = wayTo(finding);
    if (shows) {
      const button = make("button", { type: "button" }, "show");
      button.addEventListener("click", shows);
      item.append(button);
    }
    if (finding.other !== null) {
      const button = make("button", { type: "button", class: "other" }, "the other access");
      button.addEventListener("click", () => {
        show("step");
        goToEvent(finding.other);
      });
      item.append(button);
    }
    byId("findings").append(item);
  }
  byId("show-wrong").hidden = !COLOURS.includes("wrong");
}

// Keys that mean something to a control while it has the focus.
const OWN_KEYS = {
  range: /^(ArrowLeft|ArrowRight|Home|End)$/, radio: /^Arrow/, "select-one": /./,
};

function listen() {
  byId("program").addEventListener("input", (event) => go(Number(event.target.value), state.step));
  byId("step").addEventListener("input", (event) => go(state.program, Number(event.target.value)));
  byId("program-back").addEventListener("click", () => go(state.program - 1, state.step));
  byId("program-on").addEventListener("click", () => go(state.program + 1, state.step));
  byId("step-back").addEventListener("click", () => stepBy(-1));
  byId("step-on").addEventListener("click", () => stepBy(1));
  byId("show").addEventListener("change", (event) => show(event.target.value));
  byId("controls").addEventListener("submit", (event) => event.preventDefault());
  byId("theme").addEventListener("click", () => {
    const style = document.documentElement.style;
    const dark = style.colorScheme
      ? style.colorScheme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    style.colorScheme = dark ? "light" : "dark";
  });
  addEventListener("hashchange", recall);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (OWN_KEYS[event.target.type]?.test(event.key)) return;
    const keys = {
      ArrowRight: () => stepBy(1),
      ArrowLeft: () => stepBy(-1),
      ArrowDown: () => go(state.program + 1, state.step),
      ArrowUp: () => go(state.program - 1, state.step),
      Home: () => go(state.program, 0),
      End: () => go(state.program, Infinity),
      ...Object.fromEntries(COLOURS.map((what, n) => [n + 1, () => show(what)])),
    };
    if (event.key in keys) {
      event.preventDefault();
      keys[event.key]();
    }
  });
}

drawSource();
drawHead();
drawTensors();
drawTotals();
listen();
const placed = location.hash.length > 1;
recall();
// A page that was opened without a place begins where something was found.
if (!placed) data.findings.map(wayTo).find(Boolean)?.();
