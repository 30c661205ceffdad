"""Tables and figures of reports, shared by the commands that write them."""
