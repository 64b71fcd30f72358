// Layers × experts on a canvas. Colour says on which side an expert lives, strength how much traffic it had.

const FULL = 8; // times even use: the strongest colour
const FLASH_SECONDS = 4;
const MARGIN = 30; // for the layers' numbers

/** [r, g, b] that the style sheet gives a custom property now. */
function colour(name) {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = `var(${name})`;
  const rgb = getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number);
  probe.remove();
  return rgb;
}

const mix = (a, b, t) => `rgb(${a.map((v, i) => Math.round(v + (b[i] - v) * t)).join(" ")})`;

export class HeatMap {
  /** `say(cell)` is called with {row, expert} under the pointer or the keyboard, and with null. */
  constructor(canvas, say) {
    this.canvas = canvas;
    this.say = say;
    this.cell = null;
    this.flashes = new Map(); // "row,expert" → when it changed sides, ms
    this.readColours();
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    canvas.addEventListener("pointermove", (event) => this.point(this.at(event)));
    canvas.addEventListener("pointerleave", () => this.point(null));
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => this.point(null));
  }

  readColours() {
    this.ramps = [["--cpu-cold", "--cpu-hot"], ["--gpu-cold", "--gpu-hot"]].map((ramp) => ramp.map(colour));
    this.ink = colour("--ink");
    this.muted = colour("--muted");
  }

  /** layers: their numbers; relative: use of each expert, 1 is even use; here: "0" or "1" of each, a text a layer. */
  show({ layers, relative, here, onlyOneSide }) {
    Object.assign(this, { layers, relative, here, onlyOneSide });
    this.draw();
  }

  flash(row, expert) {
    this.flashes.set(`${row},${expert}`, performance.now());
    this.animate();
  }

  animate() {
    if (this.moving) return;
    this.moving = true;
    const frame = () => {
      const now = performance.now();
      for (const [key, since] of this.flashes) if (now - since > FLASH_SECONDS * 1000) this.flashes.delete(key);
      this.draw();
      this.moving = this.flashes.size > 0;
      if (this.moving) requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  measure() {
    const width = this.canvas.parentElement.clientWidth;
    const experts = this.here[0].length;
    this.margin = width > 500 ? MARGIN : 0;
    this.w = Math.min((width - this.margin) / experts, 44);
    this.h = Math.max(width > 500 ? 5 : 3, Math.min(this.w, width > 500 ? 22 : 12));
    this.gap = this.w >= 5 ? 1 : 0;
    const scale = devicePixelRatio || 1;
    const height = Math.round(this.h * this.layers.length);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    if (this.canvas.width !== Math.round(width * scale) || this.canvas.height !== Math.round(height * scale)) {
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
    }
    return scale;
  }

  draw() {
    if (!this.layers || !this.canvas.parentElement.clientWidth) return;
    const scale = this.measure();
    const brush = this.canvas.getContext("2d");
    brush.setTransform(scale, 0, 0, scale, 0, 0);
    brush.clearRect(0, 0, this.canvas.width, this.canvas.height);
    this.layers.forEach((_, row) => this.drawRow(brush, row));
    this.drawNumbers(brush);
    this.drawRings(brush);
  }

  drawRow(brush, row) {
    const here = this.here[row], relative = this.relative[row];
    const y = Math.round(row * this.h), height = Math.round((row + 1) * this.h) - y - this.gap;
    for (let expert = 0; expert < here.length; expert++) {
      const ramp = this.ramps[this.onlyOneSide ? 1 : Number(here[expert])];
      const strength = Math.min(1, Math.log2(1 + relative[expert]) / Math.log2(1 + FULL));
      const x = this.left(expert);
      brush.fillStyle = mix(ramp[0], ramp[1], strength);
      brush.fillRect(x, y, this.left(expert + 1) - x - this.gap, height);
    }
  }

  left(expert) {
    return this.margin + Math.round(expert * this.w * 2) / 2;
  }

  drawNumbers(brush) {
    if (!this.margin) return;
    const every = Math.ceil(12 / this.h);
    brush.fillStyle = `rgb(${this.muted.join(" ")})`;
    brush.font = "10px ui-monospace, monospace";
    brush.textAlign = "right";
    brush.textBaseline = "middle";
    this.layers.forEach((layer, row) => {
      if (row % every === 0) brush.fillText(String(layer), this.margin - 6, (row + 0.5) * this.h);
    });
  }

  drawRings(brush) {
    const now = performance.now();
    for (const [key, since] of this.flashes) {
      const [row, expert] = key.split(",").map(Number);
      const age = (now - since) / 1000 / FLASH_SECONDS;
      this.ring(brush, row, expert, 1 - age, 1 + 5 * (1 - Math.min(1, age * 4)));
    }
    if (this.cell) this.ring(brush, this.cell.row, this.cell.expert, 1, 1);
  }

  ring(brush, row, expert, opacity, grown) {
    brush.strokeStyle = `rgb(${this.ink.join(" ")} / ${Math.max(0, opacity)})`;
    brush.lineWidth = 1.5;
    brush.strokeRect(this.left(expert) - grown, row * this.h - grown, this.w + 2 * grown - this.gap, this.h + 2 * grown - this.gap);
  }

  at(event) {
    if (!this.layers) return null;
    const box = this.canvas.getBoundingClientRect();
    const expert = Math.floor((event.clientX - box.left - this.margin) / this.w);
    const row = Math.floor((event.clientY - box.top) / this.h);
    const inside = row >= 0 && row < this.layers.length && expert >= 0 && expert < this.here[0].length;
    return inside ? { row, expert } : null;
  }

  key(event) {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!step || !this.layers) return;
    event.preventDefault();
    const { row, expert } = this.cell ?? { row: 0, expert: -step[1] };
    const within = (value, length) => Math.max(0, Math.min(length - 1, value));
    this.point({ row: within(row + step[0], this.layers.length), expert: within(expert + step[1], this.here[0].length) });
  }

  point(cell) {
    this.cell = cell;
    this.say(cell);
    this.draw();
  }
}
