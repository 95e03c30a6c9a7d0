"""`flare`: a real federation. The server and each site are processes of their own, joined by NVIDIA FLARE.

`server` and `site` are the two ends of the wire engine over any link; `nvidia` is the one module that knows FLARE.
"""
