"""The measurements of `python -m convt5.bench`, how they are timed, and their report."""
