"""What runs show: factors, cells, arms, contrasts and intervals as typed results, without any rendering."""
