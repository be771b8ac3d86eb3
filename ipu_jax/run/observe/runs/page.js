"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
// Okabe and Ito's colours, which the colour-blind can tell
const paint = { F: "#56b4e9", B: "#e69f00", W: "#f0e442", FB: "#009e73", exchange: "#999999", collective: "#cc79a7",
  update: "#d55e00" };
const kinds = { F: "forward", B: "backward", W: "backward by weight", FB: "forward and backward of a head",
  exchange: "exchange with neighbours", collective: "other collective", update: "weight update" };
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
const micros = n => n >= 1000 ? (n / 1000).toFixed(2) + " ms" : n + " µs";

function curve(name, points) {
  const figure = add(document.getElementById("curves"), "figure");
  const caption = add(figure, "figcaption", {}, name);
  if (!points.length) { caption.textContent = name + ": nothing was measured"; return; }
  const width = 480, height = 220, left = 58, right = 12, top = 12, bottom = 34;
  const svg = add(figure, "svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": name + " by updates" });
  const xs = points.map(p => p[0]), ys = points.map(p => p[1]);
  let [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  if (x0 === x1) { x0 -= 1; x1 += 1; }
  if (y0 === y1) { y0 -= Math.abs(y0) / 10 || 1; y1 += Math.abs(y1) / 10 || 1; }
  if (name === "accuracy") y1 = Math.min(y1, 1);
  const x = v => left + (v - x0) / (x1 - x0) * (width - left - right);
  const y = v => height - bottom - (v - y0) / (y1 - y0) * (height - top - bottom);
  for (let k = 0; k <= 4; k++) {
    const v = y0 + k * (y1 - y0) / 4;
    add(svg, "line", { class: "grid", x1: left, x2: width - right, y1: y(v), y2: y(v) });
    add(svg, "text", { x: left - 6, y: y(v) + 4, "text-anchor": "end" }, name === "accuracy" ? (100 * v).toFixed(1) + "%" : short(v));
  }
  for (const v of [x0, (x0 + x1) / 2, x1])
    add(svg, "text", { x: x(v), y: height - 16, "text-anchor": v === x0 ? "start" : v === x1 ? "end" : "middle" }, short(Math.round(v)));
  add(svg, "text", { x: (left + width - right) / 2, y: height - 3, "text-anchor": "middle" }, "updates");
  add(svg, "polyline", { class: "curve", points: points.map(p => `${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join(" ") });
  if (points.length < 40) for (const p of points) add(svg, "circle", { class: "dot", cx: x(p[0]), cy: y(p[1]), r: 2.5 });
  svg.addEventListener("pointermove", event => {
    const at = x0 + (event.offsetX / svg.clientWidth * width - left) / (width - left - right) * (x1 - x0);
    const near = points.reduce((best, p) => Math.abs(p[0] - at) < Math.abs(best[0] - at) ? p : best);
    caption.textContent = `${name}: ${name === "accuracy" ? (100 * near[1]).toFixed(2) + "%" : short(near[1])} after ${near[0].toLocaleString("en")} updates`;
  });
  svg.addEventListener("pointerleave", () => { caption.textContent = name; });
}
for (const [name, points] of Object.entries(data.curves)) curve(name, points);

function timeline(shown) {
  const note = document.getElementById("timeline-note");
  if (!shown) { note.textContent = "No steps were traced: run with --trace."; return; }
  note.textContent = `${shown.steps} of ${shown.of} traced steps, what was measured under what was planned; ${shown.clocks}.`;
  document.getElementById("timeline").hidden = false;
  const canvas = document.getElementById("canvas"), words = document.getElementById("slice"), pen = canvas.getContext("2d");
  const rowHeight = 24, gap = 6, axis = 22, labels = 120;
  let first = Infinity, last = -Infinity;
  for (const row of shown.rows) for (const [, , start, length] of row.slices) {
    first = Math.min(first, start); last = Math.max(last, start + length);
  }
  let from = first, to = last, hovered = null;
  const ratio = () => window.devicePixelRatio || 1;
  const width = () => canvas.clientWidth;
  const x = t => labels + (t - from) / (to - from) * (width() - labels);
  const time = px => from + (px - labels) / (width() - labels) * (to - from);
  const top = k => k * (rowHeight + gap) + gap;
  function draw() {
    const height = top(shown.rows.length) + axis;
    canvas.style.height = height + "px";
    canvas.width = width() * ratio(); canvas.height = height * ratio();
    pen.setTransform(ratio(), 0, 0, ratio(), 0, 0);
    pen.font = "12px system-ui, sans-serif"; pen.textBaseline = "middle";
    shown.rows.forEach((row, k) => {
      pen.globalAlpha = 1; pen.fillStyle = style("--ink"); pen.fillText(row.label, 6, top(k) + rowHeight / 2, labels - 12);
      pen.save(); pen.beginPath(); pen.rect(labels, 0, width() - labels, height); pen.clip();
      for (const slice of row.slices) {
        const [kind, name, start, length] = slice, a = x(start), b = Math.max(x(start + length), a + .5);
        if (b < labels || a > width()) continue;
        const inner = kind === "collective" ? 6 : 0;
        pen.globalAlpha = row.plan ? .55 : 1; pen.fillStyle = paint[kind];
        pen.fillRect(a, top(k) + inner, b - a, rowHeight - 2 * inner);
        if (slice === hovered) { pen.strokeStyle = style("--ink"); pen.lineWidth = 2; pen.strokeRect(a + 1, top(k) + 1, Math.max(b - a - 2, 1), rowHeight - 2); }
        else if (b - a > 3) { pen.strokeStyle = style("--paper"); pen.lineWidth = 1; pen.strokeRect(a, top(k) + inner, b - a, rowHeight - 2 * inner); }
      }
      pen.globalAlpha = 1; pen.fillStyle = "#000000";
      for (const [kind, name, start, length] of row.slices) {
        const a = x(start);
        if (kind !== "collective" && x(start + length) - a > pen.measureText(name).width + 6 && a > labels - 40 && a < width())
          pen.fillText(name, a + 3, top(k) + rowHeight / 2);
      }
      pen.restore();
    });
    pen.globalAlpha = 1; pen.fillStyle = style("--soft");
    const spacing = Math.max(2, Math.floor((width() - labels) / 110));
    for (let k = 0; k < spacing; k++) {
      const t = from + k * (to - from) / spacing;
      pen.fillText(micros(Math.round(t - first)), x(t) + 2, height - axis / 2);
      pen.fillRect(x(t), 0, .5, height - 4);
    }
  }
  function zoom(factor, at) {
    const centre = at === undefined ? (from + to) / 2 : at;
    const span = Math.min(Math.max((to - from) * factor, 20), last - first);
    from = Math.min(Math.max(centre - (centre - from) / (to - from) * span, first), last - span); to = from + span; draw();
  }
  function move(by) { const span = to - from; from = Math.min(Math.max(from + by, first), last - span); to = from + span; draw(); }
  canvas.addEventListener("wheel", event => { event.preventDefault(); zoom(event.deltaY > 0 ? 1.25 : .8, time(event.offsetX)); }, { passive: false });
  let held = null;
  canvas.addEventListener("pointerdown", event => { held = event.offsetX; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { held = null; });
  canvas.addEventListener("pointermove", event => {
    if (held !== null) { move((held - event.offsetX) / (width() - labels) * (to - from)); held = event.offsetX; return; }
    const row = shown.rows[Math.floor((event.offsetY - gap / 2) / (rowHeight + gap))], t = time(event.offsetX);
    const under = row && event.offsetX > labels ? row.slices.filter(s => s[2] <= t && t <= s[2] + s[3]) : [];
    const found = under.length ? under[under.length - 1] : null;
    if (found !== hovered) {
      hovered = found; draw();
      words.textContent = found ? `${row.label}: ${found[1]}, ${kinds[found[0]]}, ${micros(found[3])}, from ${micros(found[2] - first)}` : "Point at a slice.";
    }
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
  for (const [kind, name] of Object.entries(kinds)) if (there.has(kind)) {
    const entry = add(document.getElementById("legend"), "span");
    add(entry, "i", { style: `background:${paint[kind]}` }); entry.append(name);
  }
  draw();
}
timeline(data.timeline);

function memory(found) {
  const room = document.getElementById("memory");
  if (!found || !found.ipus.length) { add(room, "p", {}, "It was not asked for."); return; }
  const totals = found.ipus.map(parts => Object.values(parts).reduce((a, b) => a + b, 0));
  const most = Math.max(...totals, 1), tints = ["#56b4e9", "#009e73", "#e69f00", "#cc79a7", "#f0e442", "#999999"];
  const bars = add(room, "div", { class: "bars" }), names = Object.keys(Object.assign({}, ...found.ipus));
  found.ipus.forEach((parts, ipu) => {
    add(bars, "span", {}, "IPU " + ipu);
    const bar = add(bars, "div", { class: "bar" });
    names.forEach((name, k) => { if (parts[name]) add(bar, "div", { style: `width:${100 * parts[name] / most}%;background:${tints[k % tints.length]}`, title: `${name}: ${bytes(parts[name])}` }); });
    add(bars, "span", {}, bytes(totals[ipu]) + (found.limit ? `, ${(100 * totals[ipu] / found.limit).toFixed(2)}% of the limit` : ""));
  });
  const legend = add(room, "p");
  names.forEach((name, k) => { const entry = add(legend, "span", { style: "display:inline-block;margin-right:1rem" });
    add(entry, "i", { style: `display:inline-block;width:.9em;height:.9em;margin-right:.35em;background:${tints[k % tints.length]}` }); entry.append(name); });
  add(room, "p", {}, found.limit ? `The limit is ${bytes(found.limit)}: ${found.limit_of}.` : found.limit_of || "");
}
memory(data.memory);
