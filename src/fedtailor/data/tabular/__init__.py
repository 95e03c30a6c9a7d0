"""Tables of several clients: read, align, prepare and encode as features."""
