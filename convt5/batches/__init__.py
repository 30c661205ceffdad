"""What every source of batches needs: order, shares of hosts, prefetching, positions."""
