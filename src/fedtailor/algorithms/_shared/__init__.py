"""What two algorithms need: unrolled ADMM, unfolding of averages, degrees of collaboration."""
