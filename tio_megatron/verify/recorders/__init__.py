"""Runs a stock engine with the tracer on, one file per engine; each imports its engine only when it is called, and leaves no hook behind."""
