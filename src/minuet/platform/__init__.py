"""What Minuet knows of machines: the arch table (plain data), detection, and the torch glue."""
