"""Training checkpoints that load in another layout: what they hold and what must agree. Computes no gradient."""
