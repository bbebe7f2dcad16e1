"""mdps: takes a diffusion anomaly detector (Masked Diffusion Posterior Sampling) from a checkpoint to the line."""

__version__ = "0.1.0"
