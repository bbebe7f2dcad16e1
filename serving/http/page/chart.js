// Scores over time -----------------------------------------------------------------------------------------------

function svg(name, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
}

function scale() {
  const values = page.scores.map((entry) => entry.score).concat([page.threshold, page.wanted].filter((v) => v !== null));
  const low = Math.min(...values), high = Math.max(...values), margin = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
  return { low: low - margin, high: high + margin };
}

function drawChart() {
  if (!page.scores.length) return $("chart").replaceChildren();
  const { low, high } = scale(), left = 52, right = 632, top = 8, foot = 216;
  const x = (index) => left + ((right - left) * (index + 1)) / (page.scores.length + 1);
  const y = (value) => foot - ((foot - top) * (value - low)) / (high - low);
  const parts = [svg("polyline", { class: "curve", points: page.scores.map((e, i) => `${x(i)},${y(e.score)}`).join(" ") })];
  page.scores.forEach((entry, index) => {
    const [cx, cy] = [x(index), y(entry.score)];
    parts.push(entry.verdict === "fail"
      ? svg("path", { class: "cross", d: `M${cx - 4} ${cy - 4}l8 8m0 -8l-8 8` })
      : svg("circle", { class: "dot", cx, cy, r: 2.5 }));
  });
  for (const [value, name] of [[page.threshold, "threshold"], [page.wanted, "wanted"]]) {
    if (value !== null) parts.push(svg("line", { class: name, x1: left, x2: right, y1: y(value), y2: y(value) }));
  }
  parts.push(svg("text", { x: 0, y: top + 12 }, number(high)), svg("text", { x: 0, y: foot }, number(low)));
  if (page.threshold !== null) parts.push(svg("text", { x: left + 4, y: y(page.threshold) - 5 }, "threshold"));
  parts.push(svg("text", { x: left, y: 234 }, clock(page.scores[0].time)));
  parts.push(svg("text", { x: right, y: 234, "text-anchor": "end" }, clock(page.newest.time)));
  $("chart").replaceChildren(...parts);
  const failed = page.scores.filter((entry) => entry.verdict === "fail").length;
  $("chart").setAttribute("aria-label", `the last ${page.scores.length} scores, ${failed} failed; newest ` +
    `${number(page.newest.score)}, threshold ${number(page.threshold)}`);
}

function drawPreview() {
  const current = page.wanted ?? page.threshold;
  $("slider").disabled = !page.scores.length;
  $("preview-reset").disabled = page.wanted === null;
  $("preview-value").textContent = number(current);
  if (!page.scores.length || current === null) return;
  const { low, high } = scale();
  if (page.wanted === null) $("slider").value = (1000 * (current - low)) / (high - low);
  $("slider").setAttribute("aria-valuetext", number(current));
  const share = (limit) => {
    const count = page.scores.filter((entry) => entry.score > limit).length;
    return `${count} of ${page.scores.length} (${((100 * count) / page.scores.length).toFixed(1)} %)`;
  };
  const now = page.threshold === null ? "" : `; at the real one ${share(page.threshold)}`;
  const text = `Above ${number(current)}: ${share(current)} of the last parts would have failed${now}.`;
  if ($("preview-text").textContent !== text) $("preview-text").textContent = text;
}

$("slider").addEventListener("input", () => {
  const { low, high } = page.span || (page.span = scale()); // while it is dragged the ends stay where they are
  page.wanted = low + ((high - low) * $("slider").value) / 1000;
  drawPreview();
  drawChart();
});
$("slider").addEventListener("change", () => { page.span = null; });
$("preview-reset").addEventListener("click", () => {
  page.wanted = null;
  drawPreview();
  drawChart();
});
