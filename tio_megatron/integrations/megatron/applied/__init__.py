"""What is in force: patches, the handshake of ranks, what is refused before a model is built. Computes nothing."""
