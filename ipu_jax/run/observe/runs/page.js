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
const short = value => Math.abs(value) >= 1e7 ? value.toExponential(2) : Math.abs(value) >= 10000 ? value.toLocaleString("en", { maximumFractionDigits: 0 })
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
