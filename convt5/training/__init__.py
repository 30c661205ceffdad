"""How a run works inside: state, step, loop, logs and folder. Settings live one level up."""
