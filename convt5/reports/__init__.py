"""Tables and figures, shared by the commands that write reports."""
