"""Running a bundle on a card with nothing leaving it: the seam to a card, the loop on its memory."""
