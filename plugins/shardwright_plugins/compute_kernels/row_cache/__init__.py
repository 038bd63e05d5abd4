"""Tables larger than the device's memory: rows in use are in a cache, all of them in a file or in the CPU's memory."""
