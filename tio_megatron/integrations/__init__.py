"""Engines under the contract, one folder each: the only place that names somebody else's symbol. No arithmetic lives here."""
