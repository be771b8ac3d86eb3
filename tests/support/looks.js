const name = e => `${e.tagName.toLowerCase()}${e.id && "#" + e.id} '${e.textContent.trim().slice(0, 40)}'`;
const look = e => getComputedStyle(e);
const scrolls = e => /auto|scroll/.test(look(e).overflowX);
const framed = e => { while ((e = e.parentElement) && e !== document.body) if (scrolls(e)) return true; return false; };
const all = [...document.querySelectorAll("main *")].filter(e => e.getClientRects().length && e.checkVisibility());

function cut() {
  const found = [], wide = document.documentElement.clientWidth;
  for (const e of all.filter(e => !e.ownerSVGElement)) {
    const box = e.getBoundingClientRect();
    if (!framed(e) && (box.right > wide + 1 || box.left < -1)) found.push(`wider than the window: ${name(e)}`);
    if (e.clientWidth && e.tagName !== "svg" && !scrolls(e) && e.scrollWidth > e.clientWidth + 1)
      found.push(`its content does not fit: ${name(e)}`);
  }
  for (const svg of document.querySelectorAll("svg")) {
    const frame = svg.getBoundingClientRect(), cuts = look(svg).overflow !== "visible";
    const outside = box => box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1
      || box.bottom > frame.bottom + 1;
    const texts = [...svg.querySelectorAll("text")].map(e => [e, e.getBoundingClientRect()]).filter(([, box]) => box.width);
    texts.forEach(([e, box], k) => {
      if (cuts && outside(box)) found.push(`cut by its picture: ${name(e)}`);
      for (const [other, its] of texts.slice(k + 1))
        if (Math.min(box.right, its.right) - Math.max(box.left, its.left) > 1
            && Math.min(box.bottom, its.bottom) - Math.max(box.top, its.top) > box.height / 3)
          found.push(`over one another: ${name(e)}, ${name(other)}`);
    });
  }
  return found;
}

function lost() {
  const found = [], paper = look(document.body).backgroundColor;
  if (paper !== "rgb(255, 255, 255)" && paper !== "rgba(0, 0, 0, 0)") found.push(`the paper is ${paper}`);
  for (const e of all) {
    const { maxHeight, overflowY, filter, backgroundImage, backgroundColor, printColorAdjust, breakInside } = look(e);
    const painted = backgroundImage !== "none" || backgroundColor !== "rgba(0, 0, 0, 0)";
    if (e.tagName === "BUTTON") found.push(`a button: ${name(e)}`);
    if (maxHeight !== "none") found.push(`no higher than ${maxHeight}: ${name(e)}`);
    if (scrolls(e) || (e.clientHeight && overflowY !== "visible" && e.scrollHeight > e.clientHeight + 1))
      found.push(`scrolls, or is cut: ${name(e)}`);
    if (filter !== "none") found.push(`a filter: ${name(e)}`);
    if (painted && printColorAdjust !== "exact") found.push(`its background is not printed: ${name(e)}`);
    if (/^(svg|canvas)$/i.test(e.tagName) && breakInside === "auto") found.push(`may be torn: ${name(e)}`);
  }
  return found;
}
