"""A finished run or fit in use: predict, export, onboard."""
