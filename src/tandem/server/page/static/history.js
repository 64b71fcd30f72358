// The last minute of what /tandem/live said: differences of its counters are rates, differences of its places moves.

const KEPT_SECONDS = 65;
const MOST_MOVES = 200;

export class History {
  constructor() {
    this.points = [];
    this.moves = []; // newest first: {at, layer, row, expert, toGpu}
    this.rates = []; // [at, tokens a second], for the curve
  }

  /** Returns the moves since the point before. Counters that went back mean a new engine. */
  add(point) {
    const last = this.points.at(-1);
    const restarted = last && (point.engine.restarts !== last.engine.restarts || point.stats.steps < last.stats.steps);
    if (restarted) this.points = [];
    const moves = last && !restarted ? movesBetween(last, point) : [];
    this.points.push(point);
    while (point.at - this.points[0].at > KEPT_SECONDS) this.points.shift();
    this.moves = [...moves, ...this.moves].slice(0, MOST_MOVES);
    this.rates.push([point.at, this.rate((stats) => stats.generated_tokens, 3)]);
    while (point.at - this.rates[0][0] > KEPT_SECONDS) this.rates.shift();
    return moves;
  }

  get now() {
    return this.points.at(-1);
  }

  /** The newest point that is at least so many seconds old, or the oldest. Infinity: none, since the start. */
  before(seconds) {
    if (seconds === Infinity) return null;
    const found = this.points.filter((point) => this.now.at - point.at >= seconds - 0.2);
    return found.at(-1) ?? this.points[0];
  }

  /** Of a counter, a second. */
  rate(counter, seconds) {
    const then = this.before(seconds), now = this.now;
    const passed = now.at - then.at;
    return passed > 0 ? (counter(now.stats) - counter(then.stats)) / passed : 0;
  }

  difference(counter, seconds) {
    const then = this.before(seconds);
    return counter(this.now.stats) - (then ? counter(then.stats) : 0);
  }

  /** Tokens of each expert over the last seconds: rows of numbers. */
  tokens(seconds) {
    const now = this.now.experts, then = this.before(seconds)?.experts;
    return now.tokens.map((row, i) => (then ? row.map((value, e) => value - then.tokens[i][e]) : row));
  }
}

function movesBetween(last, point) {
  if (!last.experts || !point.experts) return [];
  const found = [];
  point.experts.on_gpu.forEach((here, row) => {
    const before = last.experts.on_gpu[row];
    if (here === before) return;
    for (let expert = 0; expert < here.length; expert++) {
      if (here[expert] !== before[expert]) found.push({ at: new Date(), row, layer: point.experts.layers[row], expert, toGpu: here[expert] === "1" });
    }
  });
  return found;
}
