"""Log-probabilities of given tokens from a Megatron model, and where a recorder looks. Learns nothing."""
