"""Megatron's modules in the contract's order, and the layer specs that name them. Owns no patch."""
