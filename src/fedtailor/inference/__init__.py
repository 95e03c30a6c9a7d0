"""Statistical models of a formula over sites: estimates, tests and intervals, as of the pooled rows; only sums leave."""
