"""What `python -m convt5.bench` measures, how it takes times, and how it shows them."""
