"""A detector that fits the part: statistics of good parts, their graphs in the bundle, and the search for the best."""
