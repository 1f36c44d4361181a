"""Parameter servers: some ranks own the parameters, the others send them gradients and get the new values back."""
