// The view of the experts: numbers, the map, exchanges, memory and the plan.

import { $, gib, make, number } from "./dom.js";
import { HeatMap } from "./heatmap.js";
import { History } from "./history.js";

const WINDOWS = [["5 s", 5], ["1 min", 60], ["all", Infinity]];
const RATE_SECONDS = 3;
const SHOWN_MOVES = 12;

const sum = (list) => list.reduce((a, b) => a + b, 0);

export class Live {
  constructor() {
    this.history = new History();
    this.seconds = 60;
    this.map = new HeatMap($("map"), (cell) => this.describe(cell));
    this.tiles = {};
    $("windows").append(...WINDOWS.map(([name, seconds]) => make("button", {
      type: "button", "aria-pressed": String(seconds === this.seconds), onclick: (event) => this.choose(seconds, event.target),
    }, name)));
  }

  choose(seconds, button) {
    this.seconds = seconds;
    for (const each of $("windows").children) each.setAttribute("aria-pressed", String(each === button));
    if (this.history.now) this.drawMap();
  }

  /** One answer of /tandem/live. */
  take(point) {
    const moves = this.history.add(point);
    this.drawTiles();
    this.drawMap();
    for (const move of moves) this.map.flash(move.row, move.expert);
    if (moves.length || !this.movesDrawn) this.drawMoves();
  }

  recolour() {
    this.map.readColours();
    this.map.draw();
    if (this.history.now) this.drawTiles();
  }

  get oneSided() {
    return !this.history.now.experts?.on_gpu.some((row) => row.includes("1"));
  }

  // --- numbers

  drawTiles() {
    const history = this.history, { stats } = history.now;
    const steps = history.difference((s) => s.steps, RATE_SECONDS);
    const seconds = history.difference((s) => s.step_seconds, RATE_SECONDS);
    this.tile("rate", "Tokens a second", number(history.rates.at(-1)[1]), `${stats.generated_tokens.toLocaleString("en")} in all`, (box) => curve(box, history.rates));
    this.tile("requests", "Requests", String(stats.running), stats.waiting ? `${stats.waiting} waiting` : "none waiting");
    this.drawExpertTiles(stats.experts);
    this.tile("step", "Step", steps ? `${number(seconds / steps * 1000)} ms` : "–", "", (box) => this.drawSplit(box));
    const used = stats.pages_total ? 1 - stats.pages_free / stats.pages_total : 0;
    this.tile("pages", "KV pages in use", `${number(used * 100, 0)} %`, `${stats.pages_cached.toLocaleString("en")} of ${stats.pages_total.toLocaleString("en")} cached`, (box) => bar(box, [["gpu-hot", used]]));
  }

  drawExpertTiles(experts) {
    if (!experts) return;
    const history = this.history;
    const of = (field) => history.difference((s) => sum(s.experts?.[field] ?? [0]), Math.min(this.seconds, 60));
    const rate = (field) => history.rate((s) => sum(s.experts?.[field] ?? [0]), RATE_SECONDS);
    const read = rate("gpu_bytes") + rate("cpu_bytes");
    if (this.oneSided) {
      this.tile("read", "Experts read", `${number(read / 1e9)} GB/s`, "all are in CPU memory");
      return;
    }
    const gpu = of("gpu_tokens"), all = gpu + of("cpu_tokens");
    const hit = all ? gpu / all : experts.hit_rate;
    this.tile("hit", "On the GPU", `${number(hit * 100)} %`, "of routed tokens", (box) => bar(box, [["gpu-hot", hit]]));
    this.tile("swaps", "Exchanges", experts.swaps.toLocaleString("en"), `${number(history.rate((s) => s.experts?.swaps ?? 0, RATE_SECONDS))} a second`);
    this.tile("read", "Experts read", `${number(read / 1e9)} GB/s`, `${number(rate("cpu_bytes") / 1e9)} from RAM`);
  }

  tile(name, title, value, note, more) {
    const tile = this.tiles[name] ??= this.newTile(title);
    tile.value.textContent = value;
    tile.note.textContent = note;
    more?.(tile.more);
  }

  newTile(title) {
    const tile = { value: make("strong"), note: make("span", { class: "note" }), more: make("div", { class: "more" }) };
    $("tiles").append(make("div", { class: "tile" }, make("h3", {}, title), tile.value, tile.note, tile.more));
    return tile;
  }

  /** What the engine's steps were spent on. On a CPU alone nothing is to be divided. */
  drawSplit(box) {
    const of = (counter) => this.history.difference(counter, RATE_SECONDS);
    const whole = of((s) => s.step_seconds);
    if (this.oneSided || !whole) {
      box.replaceChildren();
      return;
    }
    const wait = of((s) => s.experts?.handoff_wait_seconds ?? 0) / whole;
    const serve = of((s) => s.experts?.handoff_serve_seconds ?? 0) / whole;
    if (wait + serve > 0) bar(box, [["gpu-hot", wait, "GPU computes, CPU waits"], ["cpu-hot", serve, "CPU experts"], ["line", 1 - wait - serve, "rest"]], true);
  }

  // --- the map

  drawMap() {
    const { experts, engine, stats } = this.history.now;
    const dense = !experts;
    $("no-map").hidden = !dense;
    $("map").hidden = $("legend").hidden = $("under").hidden = dense;
    if (dense) {
      $("no-map").textContent = !engine.up ? "The map comes back with the engine."
        : stats.steps ? "This model has no routed experts, so there is no traffic to show." : "Waiting for the engine's counts.";
      return;
    }
    this.tokens = this.history.tokens(this.seconds);
    const relative = this.tokens.map((row) => { const even = sum(row) / row.length; return row.map((n) => (even ? n / even : 0)); });
    this.map.show({ layers: experts.layers, relative, here: experts.on_gpu, onlyOneSide: this.oneSided });
    $("map").setAttribute("aria-label", this.inWords(experts));
    this.drawLegend();
    if (!this.map.cell) this.describe(null);
  }

  inWords(experts) {
    const here = sum(experts.on_gpu.map((row) => row.split("1").length - 1));
    return `Traffic of ${experts.layers.length} layers × ${experts.on_gpu[0].length} experts; ${here} are on the GPU. Arrow keys go from one to the next.`;
  }

  drawLegend() {
    const both = [["gpu", "on the GPU"], ["cpu", "in CPU memory"]];
    const sides = this.oneSided ? [["gpu", "all in CPU memory"]] : both;
    const key = String(this.oneSided);
    if ($("legend").dataset.key === key) return;
    $("legend").dataset.key = key;
    $("legend").replaceChildren(...sides.map(([side, name]) => make("span", {}, make("i", { class: `ramp ${side}` }), name)),
      make("span", { class: "fine" }, "no traffic → 8 × even use"));
  }

  describe(cell) {
    const { experts } = this.history.now;
    const total = sum(this.tokens.map(sum));
    if (!cell) {
      $("under").textContent = total ? `${total.toLocaleString("en")} routed tokens` : "No traffic in this time.";
      return;
    }
    const row = this.tokens[cell.row], n = row[cell.expert], even = sum(row) / row.length;
    const side = experts.on_gpu[cell.row][cell.expert] === "1" ? "on the GPU" : "in CPU memory";
    const use = even ? `, ${number(n / even, 2)} × even use` : "";
    $("under").textContent = `Layer ${experts.layers[cell.row]}, expert ${cell.expert}: ${n.toLocaleString("en")} tokens${use}, ${side}`;
  }

  drawMoves() {
    this.movesDrawn = true;
    const shown = this.history.moves.slice(0, SHOWN_MOVES);
    if (!shown.length) {
      $("moves").replaceChildren(make("li", { class: "nothing" }, "None since this page was opened."));
      return;
    }
    $("moves").replaceChildren(...shown.map((move) => make("li", {},
      make("time", {}, move.at.toLocaleTimeString("en", { hour12: false })), `layer ${move.layer}, expert ${move.expert} `,
      make("b", { class: move.toGpu ? "gpu" : "cpu" }, move.toGpu ? "→ GPU" : "→ CPU"))));
  }

  // --- once for each engine

  plan(info) {
    $("memory").replaceChildren(...(info.plan.ledgers ?? []).map(ledger));
    if (!info.plan.ledgers?.length) $("memory").replaceChildren(make("p", { class: "nothing" }, "This engine keeps no ledger."));
    const rows = info.plan.decisions.map((d) => make("tr", {}, make("th", { scope: "row" }, d.name), make("td", {}, make("b", {}, d.value)), make("td", {}, d.reason)));
    const notices = (info.plan.notices ?? []).map((notice) => make("p", { class: "fine" }, notice));
    $("plan").replaceChildren(rows.length ? make("table", {}, make("tbody", {}, ...rows)) : make("p", { class: "nothing" }, "Nothing had to be decided."), ...notices);
  }
}

/** parts: [colour, share, name]. */
function bar(box, parts, named = false) {
  const segments = parts.map(([colour, share]) => {
    const segment = make("i", { class: colour });
    segment.style.flexGrow = String(Math.max(0, share));
    return segment;
  });
  const rest = make("i");
  rest.style.flexGrow = String(Math.max(0, 1 - sum(parts.map((part) => part[1]))));
  const names = parts.map(([colour, share, name]) => make("span", {}, make("i", { class: `dot ${colour}` }), `${name} ${Math.round(Math.max(0, share) * 100)} %`));
  box.replaceChildren(make("div", { class: "bar", "aria-hidden": "true" }, ...segments, rest), ...(named ? [make("div", { class: "names" }, ...names)] : []));
}

function curve(box, rates) {
  const canvas = box.firstChild ?? box.appendChild(make("canvas", { "aria-hidden": "true", class: "curve" }));
  const scale = devicePixelRatio || 1, width = box.clientWidth, height = 28;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const brush = canvas.getContext("2d");
  const most = Math.max(1, ...rates.map((rate) => rate[1])), end = rates.at(-1)[0];
  const x = (at) => (width - 2) * (1 - (end - at) / 60), y = (rate) => (height - 3) * (1 - rate / most) + 1.5;
  brush.scale(scale, scale);
  brush.strokeStyle = getComputedStyle(canvas).color;
  brush.lineWidth = 1.5;
  brush.lineJoin = "round";
  brush.beginPath();
  rates.forEach(([at, rate], i) => (i ? brush.lineTo(x(at), y(rate)) : brush.moveTo(x(at), y(rate))));
  brush.stroke();
}

function ledger({ place, entries, budget_bytes: budget, free_bytes: free }) {
  const total = sum(entries.map((entry) => entry.nbytes));
  const box = make("div");
  bar(box, entries.map((entry, i) => [`part-${i % 6}`, entry.nbytes / budget]));
  const rows = entries.map((entry, i) => make("tr", {}, make("td", {}, make("i", { class: `dot part-${i % 6}` })),
    make("th", { scope: "row" }, entry.name), make("td", { class: "right" }, gib(entry.nbytes)), make("td", { class: "what" }, entry.what)));
  return make("div", { class: "ledger" },
    make("h3", {}, place, make("span", {}, `${gib(total)} of ${gib(budget)}, ${gib(free)} were free`)), box, make("table", {}, make("tbody", {}, ...rows)));
}
