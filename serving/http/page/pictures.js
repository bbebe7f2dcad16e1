// Pictures -------------------------------------------------------------------------------------------------------

const layer = () => (page.overlay ? "heat" : "image");

async function drawPictures() {
  const wanted = page.newest && `${page.newest.id} ${layer()}`;
  if (wanted && wanted !== page.shownId) {
    const url = await pictureUrl(page.newest.id, layer());
    if (url) {
      show($("picture"), url, `newest part, ${word(page.newest.verdict)}${page.overlay ? ", with its heat" : ""}`);
      page.shownId = wanted;
    }
  }
  await drawFailures();
}

async function drawFailures() {
  $("no-failures").hidden = page.failures.length > 0;
  for (const [id, item] of page.thumbs) {
    if (page.failures.includes(id)) continue;
    show(item.querySelector("img"), null, "");
    item.remove();
    page.thumbs.delete(id);
  }
  for (const id of [...page.failures].reverse()) {
    if (page.thumbs.has(id)) continue;
    const url = await pictureUrl(id, "heat");
    if (!url) continue;
    const entry = page.scores.find((one) => one.id === id);
    const item = document.createElement("li"), button = tag("button", "", { type: "button" }), image = tag("img", "");
    const label = entry ? `${clock(entry.time)}, score ${number(entry.score)}` : "failure";
    show(image, url, `failed part, ${label}`);
    button.append(image, tag("span", entry ? number(entry.score) : "✕"));
    button.addEventListener("click", () => view(id));
    item.dataset.label = label;
    item.append(button);
    $("failures").prepend(item);
    page.thumbs.set(id, item);
  }
}

async function view(id) {
  page.viewed = id;
  const place = page.failures.indexOf(id), item = page.thumbs.get(id);
  $("viewer-title").textContent = `Failure ${place + 1} of ${page.failures.length}: ${item ? item.dataset.label : ""}`;
  $("viewer-newer").disabled = place <= 0;
  $("viewer-older").disabled = place < 0 || place >= page.failures.length - 1;
  if (!$("viewer").open) $("viewer").showModal();
  show($("viewer-picture"), await pictureUrl(id, layer()), `failed part${page.overlay ? " with its heat" : ""}`);
}

function step(by) {
  const next = page.failures[page.failures.indexOf(page.viewed) + by];
  if (next !== undefined) view(next);
}

function toggleLayer() {
  page.overlay = !page.overlay;
  for (const id of ["layer", "viewer-layer"]) $(id).setAttribute("aria-pressed", page.overlay);
  if ($("viewer").open) view(page.viewed);
  drawPictures().catch(() => {}); // the loop asks again
}

$("layer").addEventListener("click", toggleLayer);
$("viewer-layer").addEventListener("click", toggleLayer);
$("viewer-newer").addEventListener("click", () => step(-1));
$("viewer-older").addEventListener("click", () => step(1));
$("viewer-close").addEventListener("click", () => $("viewer").close());
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select")) return;
  if (event.key === "o" || event.key === "O") toggleLayer();
  if (!$("viewer").open) return;
  if (event.key === "ArrowLeft") step(-1);
  if (event.key === "ArrowRight") step(1);
});

// Trying an image ------------------------------------------------------------------------------------------------

async function attempt(file) {
  if (!file) return;
  $("tried").replaceChildren(tag("p", `${file.name}: judging …`));
  try {
    const found = await askJson(`/inspect/${page.model}?map=png&record=no`, { method: "POST", body: file });
    const image = tag("img", "", { alt: `${file.name} with its heat` });
    image.src = `data:image/png;base64,${found.map.base64}`;
    const sign = { pass: "✔ ", fail: "✖ " }[found.verdict] || "";
    const line = tag("p", `${file.name}: score ${number(found.score)}, ${Math.round(found.times_ms.total)} ms. Not counted.`);
    $("tried").replaceChildren(tag("strong", sign + word(found.verdict)), line, image);
  } catch (error) {
    if (error instanceof WantsToken) return signIn();
    $("tried").replaceChildren(tag("p", `${file.name}: ${error.message}`));
  }
}

$("file").addEventListener("change", () => attempt($("file").files[0]));
for (const name of ["dragenter", "dragover", "dragleave", "drop"]) {
  window.addEventListener(name, (event) => { // anywhere on the page: a miss would replace the page by the image
    event.preventDefault();
    $("drop").classList.toggle("over", name === "dragenter" || name === "dragover");
    if (name === "drop") attempt(event.dataTransfer.files[0]);
  });
}

setInterval(tell, 1000);
loop();
