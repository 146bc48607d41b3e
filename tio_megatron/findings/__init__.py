"""How a finding or a refusal is kept, and how values are shown in messages. Decides nothing."""
