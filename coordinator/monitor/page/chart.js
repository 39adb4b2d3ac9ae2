// Curves by uPlot: zoom by dragging, buttons, keys and ctrl + wheel; values of the point at the cursor in words; marks.
const TIME_STEPS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400, 172800, 432000, 864000]; // seconds
const timeTick = (value, ticks) => { // all in the unit of the largest
  const most = ticks[ticks.length - 1], [size, unit] = most >= 7200 ? [3600, "h"] : most >= 120 ? [60, "min"] : [1, "s"];
  return `${+(value / size).toFixed(1)} ${unit}`;
};
// Of the axis of time, in 24 hours: [from how many seconds a tick, its words, and below them those where a year, ..., a
// second begins].
const CLOCK_AXIS = [
  [86400 * 28, "{YYYY}-{MM}", null, null, null, null, null, null, 1],
  [86400, "{MM}-{DD}", "\n{YYYY}", null, null, null, null, null, 1],
  [60, "{HH}:{mm}", "\n{YYYY}-{MM}-{DD}", null, "\n{MM}-{DD}", null, null, null, 1],
  [1, "{HH}:{mm}:{ss}", "\n{YYYY}-{MM}-{DD}", null, "\n{MM}-{DD}", null, null, null, 1],
  [0.001, "{HH}:{mm}:{ss}.{fff}", "\n{YYYY}-{MM}-{DD}", null, "\n{MM}-{DD}", null, null, null, 1],
];
const KINDS = {
  loss: { label: "loss", curves: { train_loss: "train", val_loss: "validation" }, say: digits, unit: "nats a token" },
  speed: { label: "tokens a second", curves: { tokens_per_s: "tokens/s" }, say: short, unit: "tokens/s" },
  time: { label: "time of a round", curves: { wall: "whole round", inner: "training", collect: "closing", reduce: "exchange", commit: "commit" }, say: v => v == null ? "" : span(v), unit: "s", clip: true, incrs: TIME_STEPS, tick: timeTick },
  members: { label: "members", curves: { members: "members", contributors: "contributors" }, say: v => v == null ? "" : count(v), unit: "" },
  traffic: { label: "bytes of a round", curves: { bytes_up: "sent", bytes_down: "received" }, say: bytes, unit: "B" },
};
const AXES = { round: "round", tokens: "tokens", time: "time" };
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const ZOOM = 0.5, PAN = 0.25, PAGE = 0.1; // of what is shown
const MARK_REACH = 4; // pixels from a mark, in which its round is meant
const CLIP_QUANTILE = 0.98, CLIP_FACTOR = 2.5; // what is so much above that quantile of its curve flattens the rest

class Chart {
  // `place`: where it is drawn; `says`: where the values at the cursor are told; `pick(index)`: a point was chosen.
  constructor(place, says, { pick, zoomed }) {
    Object.assign(this, { place, says, pick, zoomed, plot: null, data: null, marks: [], beyond: [], top: null, at: null, pinned: null });
    // A browser tells of moves of a mouse that lies still, too, when something below it changes.
    place.addEventListener("mousemove", event => { if (event.movementX || event.movementY) this.pinned = null; });
    place.tabIndex = 0;
    place.setAttribute("role", "application");
    place.addEventListener("keydown", event => this.key(event));
    place.addEventListener("wheel", event => this.wheel(event), { passive: false });
    new ResizeObserver(() => this.fit()).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
  }
  // `data`: { x, rows: {name: [values]}, describe(index) -> words }, `shape`: { curves: {name: label}, say, time, xsay }
  show(data, shape, range) {
    const same = this.plot && this.shape && JSON.stringify([shape.curves, shape.time, shape.axis]) === JSON.stringify([this.shape.curves, this.shape.time, this.shape.axis]);
    const at = this.pinned == null ? -1 : data.x.indexOf(this.data.x[this.pinned]); // stay where keys led
    Object.assign(this, { data, shape, pinned: same && at >= 0 ? at : null });
    if (!same) this.build();
    this.given = range || this.whole();
    this.clip();
    this.plot.setData([data.x, ...Object.keys(shape.curves).map(name => data.rows[name])], false);
    this.plot.setScale("x", this.given);
  }
  // Where the axis ends when few points would flatten all others; `beyond`: those points.
  clip() {
    const { x } = this.data, { min, max } = this.given, inside = x.map((v, i) => v >= min && v <= max ? i : -1).filter(i => i >= 0);
    Object.assign(this, { top: null, beyond: [] });
    if (!this.shape.clip || inside.length < 20) return;
    let usual = 0;
    for (const name in this.shape.curves) {
      const known = inside.map(i => this.data.rows[name][i]).filter(v => v != null).sort((a, b) => a - b);
      if (known.length) usual = Math.max(usual, known[Math.floor(CLIP_QUANTILE * (known.length - 1))]);
    }
    const limit = CLIP_FACTOR * usual, highest = i => Math.max(...Object.keys(this.shape.curves).map(name => this.data.rows[name][i] ?? 0));
    const beyond = inside.filter(i => highest(i) > limit).map(i => ({ index: i, value: highest(i) }));
    if (usual > 0 && beyond.length) Object.assign(this, { top: limit, beyond });
  }
  whole() {
    const { x } = this.data, first = x[0] ?? 0, last = x[x.length - 1] ?? 1;
    return last > first ? { min: first, max: last } : { min: first - 1, max: last + 1 };
  }
  build() {
    if (this.plot) this.plot.destroy();
    const ink = css("--faint"), line = css("--line"), font = "12px system-ui, sans-serif";
    const axis = { stroke: ink, font, grid: { stroke: line, width: 1 }, ticks: { stroke: line } };
    const names = Object.entries(this.shape.curves);
    this.plot = new uPlot({
      width: this.place.clientWidth || 300, height: this.place.clientHeight || 200, ms: 1e-3,
      scales: { x: { time: this.shape.time }, y: { range: (u, low, high) => this.room(low, high) } },
      legend: { show: false }, cursor: { drag: { x: true, y: false, dist: 5 }, points: { size: 6 } },
      axes: [
        { ...axis, space: 70, ...(this.shape.time ? { values: CLOCK_AXIS } : { values: (u, ticks) => ticks.map(t => this.shape.axis === "tokens" ? short(t) : Number.isInteger(t) ? count(t) : "") }) },
        { ...axis, size: 62, values: (u, ticks) => ticks.map(t => this.shape.tick(t, ticks)), ...(this.shape.incrs ? { incrs: this.shape.incrs } : {}) },
      ],
      series: [{}, ...names.map(([, label], i) => ({ label, stroke: css(`--curve-${i}`), width: 1.6, spanGaps: !this.shape.gaps, points: { show: u => u.data[0].length < 60, ...(this.shape.gaps ? { filter: alone } : {}) } }))],
      hooks: { draw: [u => this.drawMarks(u)], setScale: [(u, key) => key === "x" && this.rescaled()], setCursor: [() => this.tell()] },
    }, [[], ...names.map(() => [])], this.place);
    this.plot.over.addEventListener("click", event => {
      const moved = this.plot.select.width > 5;
      if (!moved && this.index != null && event.detail === 1) this.pick(this.index);
    });
  }
  room(low, high) {
    if (low == null) return [0, 1];
    high = Math.min(high, this.top ?? high);
    const more = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
    return [this.shape.zero ? Math.min(low, 0) : low - more, high + more];
  }
  redraw() { if (this.plot) { const { min, max } = this.plot.scales.x; this.build(); this.show(this.data, this.shape, { min, max }); } }
  fit() { if (this.plot) this.plot.setSize({ width: this.place.clientWidth, height: this.place.clientHeight }); }
  rescaled() { // by the reader; what `show` set is told later, too
    const { min, max } = this.plot.scales.x;
    if (min === this.given.min && max === this.given.max) return;
    this.given = { min, max };
    this.zoomed({ min, max });
  }
  // The point at the cursor; keys say exactly which, where several are in a pixel, and a mark has its round.
  get index() { return this.pinned ?? this.marked() ?? this.plot.cursor.idx; }
  marked() {
    const { left } = this.plot.cursor, far = mark => Math.abs(this.plot.valToPos(mark.x, "x") - left);
    if (left == null || left < 0) return null;
    const near = this.marks.filter(mark => far(mark) <= MARK_REACH).sort((a, b) => far(a) - far(b))[0];
    const at = near ? this.data.round.indexOf(near.round) : -1;
    return at < 0 ? null : at;
  }
  tell() {
    const { index } = this;
    if (index == null || index >= this.data.x.length) return text(this.says, this.hint || "");
    const values = Object.entries(this.shape.curves).map(([name, label]) => {
      const value = this.data.rows[name][index];
      return value == null ? null : `${label} ${this.shape.say(value)}`;
    });
    const mark = this.marks.find(one => one.round === this.data.round[index]);
    text(this.says, [this.data.describe(index), ...values.filter(Boolean), mark && mark.text].filter(Boolean).join(" · "));
  }
  drawMarks(u) {
    const { ctx, bbox } = u, { min, max } = u.scales.x;
    const line = (x, color, dash) => {
      if (x < min || x > max) return;
      const at = Math.round(u.valToPos(x, "x", true));
      ctx.save();
      ctx.strokeStyle = color; ctx.lineWidth = Math.max(devicePixelRatio, 1); ctx.setLineDash(dash);
      ctx.beginPath(); ctx.moveTo(at, bbox.top); ctx.lineTo(at, bbox.top + bbox.height); ctx.stroke();
      ctx.restore();
    };
    const colors = { void: css("--bad"), retried: css("--warn"), gone: css("--odd"), joined: css("--good") };
    for (const mark of this.marks) line(mark.x, colors[mark.kind], [3, 4]);
    if (this.at != null) line(this.at, css("--text"), []);
    for (const { index } of this.beyond) { // an arrow up
      const at = u.valToPos(this.data.x[index], "x", true), half = 5 * devicePixelRatio;
      ctx.fillStyle = colors.void;
      ctx.beginPath(); ctx.moveTo(at, bbox.top); ctx.lineTo(at - half, bbox.top + 2 * half); ctx.lineTo(at + half, bbox.top + 2 * half); ctx.fill();
    }
  }
  zoom(factor, middle) {
    if (!this.plot) return;
    const { min, max } = this.plot.scales.x, at = middle ?? (min + max) / 2;
    this.range(at - (at - min) * factor, at + (max - at) * factor);
  }
  pan(share) { const { min, max } = this.plot.scales.x, by = (max - min) * share; this.range(min + by, max + by); }
  range(min, max) {
    const [first, last] = this.span || [min, max], width = Math.min(max - min, last - first);
    if (!(width > 0)) return;
    const from = Math.min(Math.max(min, first), last - width);
    this.plot.setScale("x", { min: from, max: from + width });
  }
  all() { if (this.plot && this.span) { const [min, max] = this.span; this.plot.setScale("x", max > min ? { min, max } : this.whole()); } }
  wheel(event) {
    if (!event.ctrlKey || !this.plot) return; // without it, the page scrolls
    event.preventDefault();
    const left = event.clientX - this.plot.over.getBoundingClientRect().left;
    this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.plot.posToVal(left, "x"));
  }
  key(event) {
    if (!this.plot || event.ctrlKey || event.metaKey || event.altKey) return;
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step && event.shiftKey) this.pan(step * PAN);
    else if (step) this.move(step);
    else if (event.key === "+" || event.key === "=") this.zoom(ZOOM);
    else if (event.key === "-") this.zoom(1 / ZOOM);
    else if (event.key === "0" || event.key === "Escape" && this.closer) this.all();
    else if (event.key === "Home" || event.key === "End") this.move(event.key === "Home" ? -Infinity : Infinity);
    else if (event.key === "PageUp" || event.key === "PageDown") this.move(event.key === "PageUp" ? -PAGE : PAGE);
    else if (event.key === "Enter" && this.index != null) this.pick(this.index);
    else return;
    event.preventDefault();
  }
  get closer() { return !!this.span && (this.given.min > this.span[0] || this.given.max < this.span[1]); }
  move(step) { // by points; less than one is a share of those shown
    const { x } = this.data, { min, max } = this.plot.scales.x;
    const first = Math.max(x.findIndex(v => v >= min), 0), last = x.findLastIndex(v => v <= max);
    const by = Math.abs(step) < 1 ? Math.sign(step) * Math.max(Math.round(Math.abs(step) * (last - first)), 1) : step;
    const next = Math.min(Math.max((this.index ?? (step > 0 ? first - 1 : last + 1)) + by, first), last);
    this.pinned = next;
    this.plot.setCursor({ left: this.plot.valToPos(x[next], "x"), top: this.place.clientHeight / 3 });
    this.tell();
  }
}

// Of a curve with gaps: where points are drawn; those without neighbours always are, else they would not be seen.
function alone(u, series, shown) {
  const values = u.data[series], found = [];
  for (let i = 0; i < values.length; i++)
    if (values[i] != null && (shown || values[i - 1] == null && values[i + 1] == null)) found.push(i);
  return found;
}

function chartKey(place, labels) {
  const entries = Object.values(labels);
  const shown = children(place, entries.length, () => element("span", {}, element("span", { class: "swatch", "aria-hidden": "true" }), element("span")));
  entries.forEach((label, i) => {
    shown[i].firstElementChild.style.background = `var(--curve-${i})`;
    text(shown[i].lastElementChild, label);
  });
}
