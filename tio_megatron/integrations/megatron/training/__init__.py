"""Gradients, their norm and the optimizer under a contract. Builds no model."""
