"""Secure sums, clipping, noise and what it adds up to."""
