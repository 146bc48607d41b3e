"""Recording models of Hugging Face's transformers, which never run under a contract. Compares nothing."""
