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
