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
// The range of several runs. If one of them diverges to ten times what another one needs, it leaves the picture.
function commonRange(lines) {
  const there = lines.filter(values => values.length), [low, high] = range(there.flat());
  const least = Math.max(Math.min(...there.map(values => range(values)[1])), ...there.map(values => Math.min(...values)));
  return [low, least - low < (high - low) / 10 ? least : high];
}

// A page has the curves of one run, or of several over each other, which the legend under each figure names.
const runs = data.runs || [{ name: "", curves: data.curves }];
const drawn = (run, tag, attributes) => ({ class: `${tag} run-${run % 4}${run > 3 ? " dashed" : ""}`, ...attributes });
const after = at => `after ${at.toLocaleString("en")} updates`;
const nearest = (points, at) => points.reduce((best, p) => Math.abs(p[0] - at) < Math.abs(best[0] - at) ? p : best);

// All curves have one axis of updates. It begins at 0, unless the log begins late.
const updates = (xs => {
  const [low, high] = [Math.min(...xs), Math.max(...xs)];
  return [low > high / 4 && low < high ? low : 0, high || 1];
})(runs.flatMap(run => Object.values(run.curves).flat()).map(p => p[0]));

function curve(name) {
  const room = document.getElementById("curves"), lines = runs.map(run => run.curves[name] || []), all = lines.flat();
  const isShare = name.endsWith("accuracy") && all.every(p => p[1] >= 0 && p[1] <= 1);
  const said = v => isShare ? Number((100 * v).toFixed(2)) + "%" : short(v);
  if (lines.every(points => points.length < 2)) {  // numbers, which make no curve
    const each = lines.map((points, k) => points.length ? `${runs[k].name} ${said(points[0][1])} ${after(points[0][0])}`.trim() : "");
    add(room, "p", {}, `${name}: ${each.filter(text => text).join(", ") || "nothing was measured"}`);
    return;
  }
  const figure = add(room, "figure"), caption = add(figure, "figcaption", {}, name);
  const width = 480, height = 220, left = 58, right = 14, top = 14, bottom = 36;
  const svg = add(figure, "svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": name + " by updates" });
  const means = name === "loss" && data.means || [], [x0, x1] = updates;
  let [y0, y1] = commonRange(lines.map(points => points.map(p => p[1])));
  [y0, y1] = [Math.min(y0, ...means.map(mean => mean[2])), Math.max(y1, ...means.map(mean => mean[2]))];
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
  const beyond = all.filter(p => !fits(p));
  const hasDots = lines.every(points => points.length < 40);
  lines.forEach((points, run) => {
    const inside = points.filter(fits);
    add(svg, "polyline", drawn(run, "curve", { points: inside.map(p => `${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join(" ") }));
    if (hasDots) for (const p of inside) add(svg, "circle", drawn(run, "dot", { cx: x(p[0]), cy: y(p[1]), r: 2.5 }));
    for (const p of points) if (!fits(p)) {
      const at = x(p[0]), edge = p[1] > y1 ? top - 6 : height - bottom + 6, base = p[1] > y1 ? edge + 7 : edge - 7;
      const mark = add(svg, "path", drawn(run, "beyond", { d: `M${at - 5} ${base}L${at + 5} ${base}L${at} ${edge}Z` }));
      add(mark, "title", {}, said(p[1]));
    }
  });
  means.forEach(([from, to, value, text], k) => {  // what the verdict names
    add(svg, "line", { class: "mean", x1: x(from), x2: x(to), y1: y(value), y2: y(value) });
    const below = y(value) < top + 20, anchor = k ? { x: x(to), "text-anchor": "end" } : { x: x(from) };
    add(svg, "text", { class: "mean", y: y(value) + (below ? 16 : -8), ...anchor }, `mean ${text}`);
  });
  const whole = name + (beyond.length ? `; ▲▼ beyond the axis: ${[...new Set(beyond.map(p => said(p[1])))].slice(0, 3).join(", ")}` : "");
  caption.textContent = whole;
  const legend = runs.length > 1 && add(figure, "p", { class: "legend" });
  const values = legend ? runs.map(({ name }, run) => {
    const entry = add(legend, "span"), sample = add(entry, "svg", { class: "sample", viewBox: "0 0 24 10", "aria-hidden": "true" });
    add(sample, "line", drawn(run, "curve", { x1: 0, x2: 24, y1: 5, y2: 5 }));
    entry.append(name + " ");
    return add(entry, "b");
  }) : [];
  const rest = () => {
    caption.textContent = whole; cursor.setAttribute("visibility", "hidden");
    values.forEach((value, run) => { value.textContent = lines[run].length ? said(lines[run][lines[run].length - 1][1]) : "-"; });
  };
  // A value stands for its own update; one that is further away than can be seen says for which.
  const point = event => {
    const at = x0 + (event.offsetX / svg.clientWidth * width - left) / (width - left - right) * (x1 - x0);
    const near = nearest(all, at), far = (x1 - x0) / 100;
    cursor.setAttribute("visibility", "visible"); cursor.setAttribute("x1", x(near[0])); cursor.setAttribute("x2", x(near[0]));
    caption.textContent = legend ? `${name} ${after(near[0])}` : `${name}: ${said(near[1])} ${after(near[0])}`;
    values.forEach((value, run) => {
      const points = lines[run], is = points.length && near[0] <= points[points.length - 1][0] + far && nearest(points, near[0]);
      value.textContent = !is ? "-" : said(is[1]) + (Math.abs(is[0] - near[0]) > far ? ` ${after(is[0])}` : "");
    });
  };
  const cursor = add(svg, "line", { class: "cursor", y1: top, y2: height - bottom });
  rest();
  svg.addEventListener("pointerdown", point); svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerleave", rest);
}
for (const name of new Set(runs.flatMap(run => Object.keys(run.curves)))) curve(name);
