"""verl: its workers under the contract, and its device layer on a CPU. Names verl's and mbridge's symbols; holds no arithmetic of a model."""
