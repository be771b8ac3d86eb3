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
  let from = first, to = last, hovered = null, followed = null, way = [];
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
  // What a micro-batch does: F along the stages, then B back. On its way are groups of slices, one of each IPU that shares a task.
  function wayOf({ step, microbatch, replica }) {
    const groups = new Map();
    shown.rows.forEach((row, k) => { if (row.replica === replica) for (const slice of row.slices) {
      const [kind, , , , task] = slice, isForward = /F$/.test(kind), isHead = /FB$/.test(kind);
      if (!task || task[0] !== step || task[1] !== microbatch || /W$/.test(kind)) continue;
      const place = isHead ? [1, 0] : isForward ? [0, task[2]] : [2, -task[2]];
      groups.set(String(place), groups.get(String(place)) || { place, slices: [] });
      groups.get(String(place)).slices.push([k, slice]);
    } });
    const found = [...groups.values()].sort((a, b) => a.place[0] - b.place[0] || a.place[1] - b.place[1]);
    return found.map(({ slices }) => ({ slices, name: slices[0][1][1], start: Math.min(...slices.map(([, s]) => s[2])),
      end: Math.max(...slices.map(([, s]) => s[2] + s[3])) }));
  }
  function follow(chosen) {
    followed = chosen; way = chosen ? wayOf(chosen) : [];
    const note = document.getElementById("way");
    note.textContent = "\u00a0";
    if (way.length) {
      const [begun, ended] = [way[0].start, way[way.length - 1].end];
      const waits = way.slice(1).map((next, k) => [Math.max(0, next.start - way[k].end), next.name]);  // tasks of all IPUs overlap
      const [longest, before] = waits.reduce((a, b) => b[0] > a[0] ? b : a, [0, ""]), waited = waits.reduce((sum, [each]) => sum + each, 0);
      note.textContent = `Micro-batch ${chosen.microbatch}: ${way[0].name} to ${way[way.length - 1].name} in ${micros(ended - begun)}, from ` +
        `${micros(begun - first)}; ${micros(ended - begun - waited)} in ${way.length} tasks` +
        (longest > (ended - begun) / 100 ? `, and the longest wait is ${micros(longest)}, before ${before}.` : ".");
    }
    draw();
  }
  const isFollowed = (row, slice) => !followed || (slice[4] && slice[4][0] === followed.step && slice[4][1] === followed.microbatch
    && (row.plan || row.replica === followed.replica));
  function arrows() {
    for (const [width, colour] of [[5, style("--paper")], [1.6, style("--ink")]]) {
      pen.strokeStyle = pen.fillStyle = colour; pen.lineWidth = width;
      way.slice(1).forEach((next, k) => { for (const [a, sent] of way[k].slices) for (const [b, got] of next.slices) {
        if (a !== b && way[k].slices.length > 1 && next.slices.length > 1) continue;  // each IPU goes on with its own part
        const ended = sent[2] + sent[3], came = Math.min(Math.max(got[2], ended), got[2] + got[3]);  // it may wait inside the task
        const [x0, x1] = [x(ended), x(came)], [y0, y1] = [a, b].map(row => top(row) + rowHeight / 2), bend = Math.max(Math.abs(x1 - x0) / 2, 14);
        pen.beginPath(); pen.moveTo(x0, y0); pen.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1 - 5, y1); pen.stroke();
        pen.beginPath(); pen.moveTo(x1, y1); pen.lineTo(x1 - 7, y1 - 4); pen.lineTo(x1 - 7, y1 + 4); pen.fill();
      } });
    }
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
        pen.globalAlpha = isFollowed(row, slice) ? 1 : .3;
        fill(kind, waiting, a, upper, b - a, high);
        if (slice === hovered) { pen.strokeStyle = style("--ink"); pen.lineWidth = 2; pen.strokeRect(a + 1, upper + 1, Math.max(b - a - 2, 1), high - 2); }
        else if (b - a > 3) { pen.strokeStyle = style("--paper"); pen.lineWidth = 1; pen.strokeRect(a, upper, b - a, high); }
      }
      pen.globalAlpha = 1; pen.fillStyle = "#000000";
      row.slices.forEach((slice, i) => {
        const [kind, name, start, length] = slice;
        if (!isFollowed(row, slice)) return;
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
    pen.save(); pen.beginPath(); pen.rect(labels(), 0, width() - labels(), height); pen.clip();
    arrows();
    pen.restore();
  }
  const hold = (low, span) => Math.min(Math.max(low, first), last - span);
  function zoom(factor, at) {
    const centre = at === undefined ? (from + to) / 2 : at, span = Math.min(Math.max((to - from) * factor, 20), last - first);
    const low = centre - (centre - from) / (to - from) * span;
    from = hold(low, span); to = from + span; draw();
  }
  function move(by) { const span = to - from; from = hold(from + by, span); to = from + span; draw(); }
  function under(event) {
    const row = shown.rows[Math.floor((event.offsetY - gap / 2) / (rowHeight + gap))], t = time(event.offsetX);
    const found = row && event.offsetX > labels() ? row.slices.filter(s => s[2] <= t && t <= s[2] + s[3]) : [];
    return [row, found.length ? found[found.length - 1] : null];
  }
  function name(event) {
    const [row, found] = under(event);
    if (found === hovered) return;
    hovered = found; draw();
    const kind = found && shown.kinds[found[0]].name;
    words.textContent = found ? `${row.label}: ${found[1] === kind ? "" : found[1] + ", "}${kind}, ${micros(found[3])}, from ${micros(found[2] - first)}` : "\u00a0";
  }
  // A click on a task follows its micro-batch; a second one, or one on anything else, follows none.
  function pick(event) {
    const [row, found] = under(event), task = found && found[4];
    const chosen = task && { step: task[0], microbatch: task[1], replica: row.plan ? 0 : row.replica };
    follow(chosen && (!followed || Object.keys(chosen).some(key => chosen[key] !== followed[key])) ? chosen : null);
  }
  const tasks = shown.rows.filter(row => row.replica === 0).flatMap(row => row.slices.filter(slice => slice[4]).map(slice => slice[4]));
  const ways = [...new Map(tasks.map(([step, microbatch]) => [`${step} ${microbatch}`, { step, microbatch, replica: 0 }])).values()]
    .sort((a, b) => a.step - b.step || a.microbatch - b.microbatch);
  function followNext() {
    const at = followed ? ways.findIndex(one => one.step === followed.step && one.microbatch === followed.microbatch) : -1;
    follow(ways[at + 1] || null);
    if (!way.length) return;
    const [begun, ended] = [way[0].start, way[way.length - 1].end], length = ended - begun;
    if (begun < from || ended > to || length < (to - from) / 4) {
      const span = Math.min(Math.max(to - from, 1.2 * length), 3 * length, last - first);
      from = hold(begun + length / 2 - span / 2, span); to = from + span; draw();
    }
  }
  canvas.addEventListener("wheel", event => { event.preventDefault(); zoom(event.deltaY > 0 ? 1.25 : .8, time(event.offsetX)); }, { passive: false });
  const held = new Map();
  let pressed = null;  // where a press that may become a click began
  canvas.addEventListener("pointerdown", event => {
    pressed = held.size ? null : event.offsetX;
    held.set(event.pointerId, event.offsetX); canvas.setPointerCapture(event.pointerId); name(event);
  });
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, event => {
    held.delete(event.pointerId);
    if (end === "pointerup" && pressed !== null && Math.abs(event.offsetX - pressed) < 4) pick(event);
    pressed = null;
  });
  canvas.addEventListener("pointermove", event => {
    const before = held.get(event.pointerId);
    if (before === undefined) { name(event); return; }
    const other = [...held.entries()].find(([id]) => id !== event.pointerId);
    if (other) zoom(Math.max(Math.abs(before - other[1]), 1) / Math.max(Math.abs(event.offsetX - other[1]), 1), time(other[1]));
    else move((before - event.offsetX) / (width() - labels()) * (to - from));
    held.set(event.pointerId, event.offsetX);
  });
  canvas.addEventListener("keydown", event => {
    const span = to - from, acts = { ArrowLeft: () => move(-span / 8), ArrowRight: () => move(span / 8), "+": () => zoom(.8), "-": () => zoom(1.25),
      m: followNext, Escape: () => follow(null) };
    if (acts[event.key]) { event.preventDefault(); acts[event.key](); }
  });
  document.getElementById("zoom-in").onclick = () => zoom(.5);
  document.getElementById("zoom-out").onclick = () => zoom(2);
  document.getElementById("zoom-all").onclick = () => { from = first; to = last; draw(); };
  document.getElementById("follow").onclick = followNext;
  window.addEventListener("resize", draw);
  for (const media of ["(prefers-color-scheme: dark)", "print"]) window.matchMedia(media).addEventListener("change", draw);
  const there = new Set(shown.rows.flatMap(row => row.slices.map(slice => slice[0])));
  for (const [kind, { name, colours }] of Object.entries(shown.kinds)) if (there.has(kind)) {
    const entry = add(document.getElementById("legend"), "span");
    add(entry, "i", colours.length ? { style: `background:linear-gradient(${colours[0]} 50%,${colours[colours.length - 1]} 50%)` } : { class: kind });
    entry.append(name);
  }
  draw();
}
timeline(data.timeline);
