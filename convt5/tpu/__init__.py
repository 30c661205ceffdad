"""Planning for TPUs with the real compiler, on machines that have none; used by `inspect`."""
