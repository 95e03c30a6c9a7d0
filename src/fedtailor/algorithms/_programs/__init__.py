"""Programs made of several algorithms, such as a fit of tables."""
