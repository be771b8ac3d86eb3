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
