"""Tables of several sites: read, made alike, split and encoded as features."""
