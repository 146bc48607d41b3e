"""Which tensors of a checkpoint a rank's parameters are, loading them and exporting them. Computes nothing."""
