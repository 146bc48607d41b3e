"""How files are written, whole or not at all, and how their headers are checked. Knows no format of ours and no engine."""
