"""What a model costs and how far it sees, before anything runs: by formula and by compiler."""
