"""The commands, a module each: it parses, calls and prints. What one needs is imported when it runs."""

# The sentences of `mdps --help`, in its order.
COMMANDS = {
    "demo": "Show all of it on the example that ships with mdps.",
    "train": "Fit a denoiser to images of good parts.",
    "export": "Turn a checkpoint into a bundle.",
    "calibrate": "Set a bundle's threshold from images of good parts.",
    "predict": "Judge images: verdicts, maps, pictures, a report.",
    "serve": "Judge images over HTTP, and show them on a page.",
    "single-file": "Write a bundle as one ONNX file.",
    "inspect": "Say what a checkpoint or a bundle is.",
    "doctor": "Say which engines and cards work here.",
    "evaluate": "Measure a bundle on a data set with ground truth.",
    "bench": "Time a bundle beside torch and other detectors.",
    "gpu-check": "Try every engine on this machine's card.",
    "peers": "Measure other detectors, through anomalib.",
    "reproduce": "Measure the tables of the paper.",
    "sweep": "Try the settings that the paper leaves open.",
    "trade": "Show what a millisecond buys.",
}
