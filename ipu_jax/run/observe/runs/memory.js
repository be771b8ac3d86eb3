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
