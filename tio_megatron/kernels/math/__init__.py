"""Elementary functions and sums over a stack of tensors that every other op is made of; nothing here knows a model."""
