"""`mdps trade`: what a millisecond buys. Gradients, steps, the mask pass and precision, weighed against time."""
