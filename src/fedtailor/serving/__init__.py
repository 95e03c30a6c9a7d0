"""Personal models of a finished run: predict, export, onboard."""
