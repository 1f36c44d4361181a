"""Configuration of ZeRO, and offload of its state. The exchange itself is in `hpcdist.strategies.data`."""
