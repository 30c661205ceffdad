"""What a model costs and how far it sees, known before anything runs."""
