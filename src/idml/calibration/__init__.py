"""Calibration: the evidence of an answer, the probability that it is right, and guarantees on error rates."""
