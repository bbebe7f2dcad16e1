// node detect.js detector.onnx part.png: judges a PNG file, prints score, threshold and verdict as JSON.
import { readFileSync } from "node:fs";
import ort from "onnxruntime-node";
import { PNG } from "pngjs";

const [model, file] = process.argv.slice(2);
const { width, height, data } = PNG.sync.read(readFileSync(file)); // always RGBA, 8 bits
const rgb = data.filter((_, index) => index % 4 !== 3);

const session = await ort.InferenceSession.create(model);
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
