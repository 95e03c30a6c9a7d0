"""Statistical models of a formula over sites: estimates and tests as of the pooled rows, from sums."""
