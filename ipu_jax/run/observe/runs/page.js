"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const add = (parent, tag, attributes, text) => {
  const space = "http://www.w3.org/2000/svg", isSvg = parent.namespaceURI === space || tag === "svg";
  const element = isSvg ? document.createElementNS(space, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  parent.appendChild(element);
  return element;
};
const short = value => Math.abs(value) >= 10000 ? value.toLocaleString("en", { maximumFractionDigits: 0 })
  : String(Number(value.toPrecision(3)));
const bytes = n => { for (const unit of ["B", "kB", "MB", "GB"]) { if (n < 1000) return short(n) + " " + unit; n /= 1000; }
  return short(n) + " TB"; };
const micros = n => n >= 1e6 ? short(n / 1e6) + " s" : n >= 1000 ? short(n / 1000) + " ms" : short(n) + " µs";
// 1, 2 or 5 times a power of ten
const roundStep = (span, count) => {
  const rough = span / count, power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find(factor => factor * power >= rough * 0.999);
};
const ticks = (low, high, step) => {
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high * (1 + 1e-9) + 1e-12; k++) found.push(Number((k * step).toPrecision(12)));
  return found;
};

// A range in which at most one value in a hundred is left out at an end, and only if this shows the others larger.
function range(values) {
  const sorted = [...values].sort((a, b) => a - b), spare = Math.max(1, Math.floor(sorted.length / 100));
  let [low, high] = [sorted[0], sorted[sorted.length - 1]];
  if (sorted.length > 4) {
    const [lower, upper] = [sorted[spare], sorted[sorted.length - 1 - spare]];
    if (upper - low < (high - low) / 3) high = upper;
    if (high - lower < (high - low) / 3) low = lower;
  }
  return [low, high];
}

// All curves have one axis of updates. It begins at 0, unless the log begins late.
const updates = (xs => {
  const [low, high] = [Math.min(...xs), Math.max(...xs)];
  return [low > high / 4 && low < high ? low : 0, high || 1];
})(Object.values(data.curves).flat().map(p => p[0]));

function curve(name, points) {
  const figure = add(document.getElementById("curves"), "figure");
  const isShare = name.endsWith("accuracy") && points.every(p => p[1] >= 0 && p[1] <= 1);
  const said = v => isShare ? Number((100 * v).toFixed(2)) + "%" : short(v);
  const alone = points.map(p => `${said(p[1])} after ${p[0].toLocaleString("en")} updates`)[0] || "nothing was measured";
  const title = points.length > 1 ? name : `${name}: ${alone}`, caption = add(figure, "figcaption", {}, title);
  if (points.length < 2) return;  // one point makes no curve
  const width = 480, height = 220, left = 58, right = 14, top = 14, bottom = 36;
  const svg = add(figure, "svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": name + " by updates" });
  const [x0, x1] = updates;
  let [y0, y1] = range(points.map(p => p[1]));
  if (y0 === y1) { [y0, y1] = isShare ? [0, 1] : [y0 - (Math.abs(y0) / 10 || 1), y1 + (Math.abs(y1) / 10 || 1)]; }
  const step = roundStep(y1 - y0, 4), xStep = Math.max(1, roundStep(x1 - x0, 6));
  y0 = Math.floor(y0 / step + 1e-9) * step; y1 = Math.ceil(y1 / step - 1e-9) * step;
  const x = v => left + (v - x0) / (x1 - x0) * (width - left - right);
  const y = v => height - bottom - (Math.min(Math.max(v, y0), y1) - y0) / (y1 - y0) * (height - top - bottom);
  for (const v of ticks(y0, y1, step)) {
    add(svg, "line", { class: "grid", x1: left, x2: width - right, y1: y(v), y2: y(v) });
    add(svg, "text", { x: left - 6, y: y(v) + 4, "text-anchor": "end" }, said(v));
  }
  for (const v of ticks(x0, x1, xStep)) add(svg, "text", { x: x(v), y: height - 18, "text-anchor": "middle" }, short(v));
  add(svg, "text", { x: (left + width - right) / 2, y: height - 3, "text-anchor": "middle" }, "updates");
  const fits = p => p[1] >= y0 - step / 1e6 && p[1] <= y1 + step / 1e6;  // sums of steps are rounded
  const inside = points.filter(fits), beyond = points.filter(p => !fits(p));
  add(svg, "polyline", { class: "curve", points: inside.map(p => `${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join(" ") });
  if (points.length < 40) for (const p of inside) add(svg, "circle", { class: "dot", cx: x(p[0]), cy: y(p[1]), r: 2.5 });
  for (const p of beyond) {
    const at = x(p[0]), edge = p[1] > y1 ? top - 6 : height - bottom + 6, base = p[1] > y1 ? edge + 7 : edge - 7;
    add(add(svg, "path", { class: "beyond", d: `M${at - 5} ${base}L${at + 5} ${base}L${at} ${edge}Z` }), "title", {}, said(p[1]));
  }
  const whole = title + (beyond.length ? `; ▲▼ beyond the axis: ${beyond.slice(0, 3).map(p => said(p[1])).join(", ")}` : "");
  caption.textContent = whole;
  const point = event => {
    const at = x0 + (event.offsetX / svg.clientWidth * width - left) / (width - left - right) * (x1 - x0);
    const near = points.reduce((best, p) => Math.abs(p[0] - at) < Math.abs(best[0] - at) ? p : best);
    caption.textContent = `${name}: ${said(near[1])} after ${near[0].toLocaleString("en")} updates`;
  };
  svg.addEventListener("pointerdown", point); svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerleave", () => { caption.textContent = whole; });
}
for (const [name, points] of Object.entries(data.curves)) curve(name, points);

function timeline(shown) {
  if (!shown) return;
  document.getElementById("timeline").hidden = false;
  document.getElementById("timeline-note").textContent =
    `${shown.steps} of ${shown.of} traced steps: what was planned, and under it what was measured; ${shown.clocks}.`;
  const canvas = document.getElementById("canvas"), words = document.getElementById("slice"), pen = canvas.getContext("2d");
  const rowHeight = 26, gap = 5, axis = 22, isNarrow = () => canvas.clientWidth < 600;
  const labels = () => isNarrow() ? 66 : 120;
  let first = Infinity, last = -Infinity;
  for (const row of shown.rows) for (const [, , start, length] of row.slices) {
    first = Math.min(first, start); last = Math.max(last, start + length);
  }
  let from = first, to = last, hovered = null;
  const ratio = () => window.devicePixelRatio || 1, width = () => canvas.clientWidth;
  const x = t => labels() + (t - from) / (to - from) * (width() - labels());
  const time = px => from + (px - labels()) / (width() - labels()) * (to - from);
  const top = k => k * (rowHeight + gap) + gap;
  function hatch() {
    const tile = document.createElement("canvas"), size = 6 * ratio();
    tile.width = tile.height = size;
    const ink = tile.getContext("2d");
    ink.fillStyle = style("--wait"); ink.fillRect(0, 0, size, size);
    ink.strokeStyle = style("--stroke"); ink.lineWidth = ratio();
    for (const shift of [-size, 0, size]) { ink.beginPath(); ink.moveTo(shift, size); ink.lineTo(shift + size, 0); ink.stroke(); }
    const pattern = pen.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix().scale(1 / ratio()));
    return pattern;
  }
  function fill(kind, waiting, a, upper, breadth, high) {
    const colours = kind === "waiting" ? [waiting] : kind === "other" ? [style("--other")] : shown.kinds[kind].colours;
    colours.forEach((colour, k) => { pen.fillStyle = colour; pen.fillRect(a, upper + k * high / colours.length, breadth, high / colours.length); });
  }
  function draw() {
    const height = top(shown.rows.length) + axis, waiting = hatch();
    canvas.style.height = height + "px";
    canvas.width = width() * ratio(); canvas.height = height * ratio();
    pen.setTransform(ratio(), 0, 0, ratio(), 0, 0);
    pen.font = "12px system-ui, sans-serif"; pen.textBaseline = "middle";
    shown.rows.forEach((row, k) => {
      const upper = top(k) + (row.plan ? 6 : 0), high = rowHeight - (row.plan ? 6 : 0);
      pen.fillStyle = style(row.plan ? "--soft" : "--ink"); pen.fillText(isNarrow() ? row.brief : row.label, 4, upper + high / 2, labels() - 8);
      pen.save(); pen.beginPath(); pen.rect(labels(), 0, width() - labels(), height); pen.clip();
      for (const slice of row.slices) {
        const [kind, , start, length] = slice, a = x(start), b = Math.max(x(start + length), a + .5);
        if (b < labels() || a > width()) continue;
        fill(kind, waiting, a, upper, b - a, high);
        if (slice === hovered) { pen.strokeStyle = style("--ink"); pen.lineWidth = 2; pen.strokeRect(a + 1, upper + 1, Math.max(b - a - 2, 1), high - 2); }
        else if (b - a > 3) { pen.strokeStyle = style("--paper"); pen.lineWidth = 1; pen.strokeRect(a, upper, b - a, high); }
      }
      pen.fillStyle = "#000000";
      row.slices.forEach(([kind, name, start, length], i) => {
        const next = row.slices[i + 1], free = next && next[2] < start + length ? next[2] - start : length;
        const a = x(start);
        if (shown.kinds[kind] && kind !== "waiting" && kind !== "other" && x(start + free) - a > pen.measureText(name).width + 6 && a > labels() - 40 && a < width())
          pen.fillText(name, a + 3, upper + high / 2);
      });
      pen.restore();
    });
    const step = roundStep(to - from, Math.max(2, Math.floor((width() - labels()) / 110)));
    pen.fillStyle = style("--soft");
    for (const t of ticks(from - first, to - first, step)) {
      pen.fillText(micros(t), x(t + first) + 3, height - axis / 2);
      pen.fillRect(x(t + first), 0, .5, height - 4);
    }
  }
  const hold = low => Math.min(Math.max(low, first), last - (to - from));
  function zoom(factor, at) {
    const centre = at === undefined ? (from + to) / 2 : at, span = Math.min(Math.max((to - from) * factor, 20), last - first);
    const low = centre - (centre - from) / (to - from) * span;
    from = Math.min(Math.max(low, first), last - span); to = from + span; draw();
  }
  function move(by) { const span = to - from; from = hold(from + by); to = from + span; draw(); }
  function name(event) {
    const row = shown.rows[Math.floor((event.offsetY - gap / 2) / (rowHeight + gap))], t = time(event.offsetX);
    const under = row && event.offsetX > labels() ? row.slices.filter(s => s[2] <= t && t <= s[2] + s[3]) : [];
    const found = under.length ? under[under.length - 1] : null;
    if (found === hovered) return;
    hovered = found; draw();
    const kind = found && shown.kinds[found[0]].name;
    words.textContent = found ? `${row.label}: ${found[1] === kind ? "" : found[1] + ", "}${kind}, ${micros(found[3])}, from ${micros(found[2] - first)}` : "\u00a0";
  }
  canvas.addEventListener("wheel", event => { event.preventDefault(); zoom(event.deltaY > 0 ? 1.25 : .8, time(event.offsetX)); }, { passive: false });
  const held = new Map();
  canvas.addEventListener("pointerdown", event => { held.set(event.pointerId, event.offsetX); canvas.setPointerCapture(event.pointerId); name(event); });
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, event => held.delete(event.pointerId));
  canvas.addEventListener("pointermove", event => {
    const before = held.get(event.pointerId);
    if (before === undefined) { name(event); return; }
    const other = [...held.entries()].find(([id]) => id !== event.pointerId);
    if (other) zoom(Math.max(Math.abs(before - other[1]), 1) / Math.max(Math.abs(event.offsetX - other[1]), 1), time(other[1]));
    else move((before - event.offsetX) / (width() - labels()) * (to - from));
    held.set(event.pointerId, event.offsetX);
  });
  canvas.addEventListener("keydown", event => {
    const span = to - from, acts = { ArrowLeft: () => move(-span / 8), ArrowRight: () => move(span / 8), "+": () => zoom(.8), "-": () => zoom(1.25) };
    if (acts[event.key]) { event.preventDefault(); acts[event.key](); }
  });
  document.getElementById("zoom-in").onclick = () => zoom(.5);
  document.getElementById("zoom-out").onclick = () => zoom(2);
  document.getElementById("zoom-all").onclick = () => { from = first; to = last; draw(); };
  window.addEventListener("resize", draw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  const there = new Set(shown.rows.flatMap(row => row.slices.map(slice => slice[0])));
  for (const [kind, { name, colours }] of Object.entries(shown.kinds)) if (there.has(kind)) {
    const entry = add(document.getElementById("legend"), "span");
    add(entry, "i", colours.length ? { style: `background:linear-gradient(${colours[0]} 50%,${colours[colours.length - 1]} 50%)` } : { class: kind });
    entry.append(name);
  }
  draw();
}
timeline(data.timeline);

function memory(found) {
  if (!found || !found.ipus.length) return;
  const room = document.getElementById("memory");
  room.hidden = false;
  const totals = found.ipus.map(parts => Object.values(parts).reduce((a, b) => a + b, 0)), most = Math.max(...totals, 1);
  const names = [...new Set(found.ipus.flatMap(Object.keys))].filter(name => found.ipus.some(parts => parts[name])), bars = add(room, "div", { class: "bars" });
  const look = name => ({ style: `background:${found.colours[name] || "#7a7a7a"}` });
  found.ipus.forEach((parts, ipu) => {
    add(bars, "span", {}, "IPU " + ipu);
    const bar = add(bars, "div", { class: "bar" });
    names.forEach(name => { if (parts[name]) {
      const part = add(bar, "div", { ...look(name), title: `${name}: ${bytes(parts[name])}` });
      part.style.width = `${100 * parts[name] / most}%`;
    } });
    add(bars, "span", {}, bytes(totals[ipu]) + (found.limit ? `, ${(100 * totals[ipu] / found.limit).toFixed(1)}% of the limit` : ""));
  });
  const legend = add(room, "p", { class: "legend" });
  for (const name of names) {
    const sizes = found.ipus.map(parts => parts[name] || 0), [low, high] = [Math.min(...sizes), Math.max(...sizes)];
    const entry = add(legend, "span");
    add(entry, "i", look(name)); entry.append(`${name} ${low === high ? bytes(low) : bytes(low) + " to " + bytes(high)}`);
  }
  if (found.limit) add(room, "p", {}, `The limit is ${bytes(found.limit)}, which an IPU can hold.`);
}
memory(data.memory);
