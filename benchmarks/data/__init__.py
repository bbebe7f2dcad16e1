"""Data sets with ground truth: how they are laid out, their samples and masks, and photographs with defects put in."""
