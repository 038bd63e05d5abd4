"""Running proposers and partitioners, rating what they propose, and saying why there is no plan."""
