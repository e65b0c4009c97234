"""One rank's share of a run on several devices: data parallel, sharded, offloaded."""
