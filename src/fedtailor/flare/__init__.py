"""A real federation: server and sites are processes of their own, connected by NVIDIA FLARE.

`server` and `site` are the two ends of an engine over any link, `protocol` is what they say; `nvidia` alone uses FLARE.
`kits` makes the participants' folders, `policy` decides what leaves a site, `audit` logs it, `operate` runs them.
"""
