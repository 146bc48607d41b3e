"""A stand-in for Megatron-LM's ``megatron.training``, written for these tests.

Its module and function names, arguments of the same names, and as much behind them as a tiny run needs. Arguments become a ``TransformerConfig``
the way Megatron-LM's do: by the names of the fields, and a few that are called otherwise.
"""
