// node detect.js detector.onnx part.png: judges a PNG file, prints score, threshold and verdict as JSON.
import { readFileSync } from "node:fs";
import ort from "onnxruntime-node";
import { PNG } from "pngjs";

const [model, file] = process.argv.slice(2);
if (!file) fail("usage: node detect.js detector.onnx part.png", 2);

// Always RGBA, 8 bits. Nothing turns the picture by its EXIF orientation: a photograph that was taken sideways has to be
// turned upright first, as the detector was calibrated on upright ones.
const { width, height, data } = attempt(() => PNG.sync.read(readFileSync(file)), `${file} cannot be read as a PNG file`);
const rgb = data.filter((_, index) => index % 4 !== 3);

const session = await ort.InferenceSession.create(model).catch((error) =>
  fail(`${model} cannot be loaded as a detector: ${error.message}`, 1),
);
const image = new ort.Tensor("uint8", new Uint8Array(rgb), [height, width, 3]);
const { anomaly_score, threshold, verdict, anomaly_map } = await session.run({ image });

console.log(
  JSON.stringify({
    score: anomaly_score.data[0],
    threshold: threshold.data[0],
    verdict: verdict.data[0] ? "fail" : "pass",
    map: anomaly_map.dims,
  }),
);

function attempt(work, sentence) {
  try {
    return work();
  } catch (error) {
    return fail(`${sentence}: ${error.message}`, 1);
  }
}

function fail(sentence, code) {
  console.error(sentence);
  process.exit(code);
}
